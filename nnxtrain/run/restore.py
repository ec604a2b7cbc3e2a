"""What a run starts from: its newest checkpoint, the weights of another run, or nothing."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from nnxtrain.build.feed import Data
from nnxtrain.checkpoint.saver import find_weights, load_weights, restore_run
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.config.record import as_mapping, differences
from nnxtrain.data.batches import START, Position
from nnxtrain.engine.base import Engine
from nnxtrain.errors import ConfigError
from nnxtrain.state import TrainStateNNX


class Restored(NamedTuple):
    """What a run starts from.

    Attributes:
        state: None for a fresh one.
        step: steps that are behind.
        position: where the data goes on.
        unwritten: rows up to that step which a full disk kept out of `metrics.jsonl`.
    """

    state: TrainStateNNX | None
    step: int
    position: Position
    unwritten: Sequence[dict[str, Any]] = ()


class Restorer:
    """Finds what a run starts from, and gives it to the engine."""

    def __init__(self, data: Data, store: CheckpointStore, *, say: Callable[[str], None], falls_back: bool):
        """Reads nothing yet.

        Args:
            data: of the run, and its program.
            store: of the run.
            say: tells people.
            falls_back: whether an older checkpoint will do where the newest cannot be read.
        """
        self._data = data
        self._config = data.program.config
        self._store = store
        self._say = say
        self._falls_back = falls_back

    def find(self, resume: str) -> Restored:
        """Reads the checkpoint that the run goes on from; `resume` is `checkpoint.resume`.

        Raises:
            CheckpointError: as `restore_run` does.
            ConfigError: there is none, and the weights that `checkpoint.init_from` names are not there either.
        """
        wanted = self._data.program.restore_spec
        found = restore_run(self._store, wanted, resume=resume, say=self._say, falls_back=self._falls_back)
        if found is None:
            if self._config.checkpoint.init_from is not None:
                self._check_source()  # refuses before anything is written
            return Restored(None, 0, START)
        saved, state = found
        self._say(f"resumes  from step {saved.step}")
        changes = differences(saved.meta["config"], as_mapping(self._config))
        if (was := saved.meta.get("corpus")) != (now := self._data.dataset.description):
            changes.append(f"corpus: {was} → {now}; the position in rows stays")
        described = self._data.dataset.held_out_descriptions
        for name, was in saved.meta.get("held_out", {}).items():
            if (now := described.get(name, was)) != was:
                changes.append(f"held-out set {name}: {was} → {now}; its losses before are those of other text")
        for line in changes:
            self._say(f"         {line}")
        return Restored(state, saved.step, Position.from_json(saved.data), saved.data.get("unwritten", ()))

    def load(self, engine: Engine, state: TrainStateNNX | None) -> None:
        """Gives the engine a state that was found, or a fresh one with the weights of `checkpoint.init_from`."""
        if state is None:
            engine.initialise()
            if self._config.checkpoint.init_from is None:
                return
            state = engine.state()
            with closing(self._source()) as store:
                step = load_weights(store, state, self._config.checkpoint, wanted=self._data.program.restore_spec)
            state.init_optimizer(state.optimizer.tx)
            self._say(f"weights  of {store.folder.parent}, step {step}")
        state.guard.release()
        engine.load(state)

    def _source(self) -> CheckpointStore:
        run = Path(str(self._config.checkpoint.init_from)).expanduser()
        return CheckpointStore(run / "checkpoints", self._config.checkpoint)

    def _check_source(self) -> None:
        with closing(self._source()) as source:
            if not source.steps():
                raise ConfigError(f"checkpoint.init_from={self._config.checkpoint.init_from}: no checkpoint is there")
            find_weights(source, self._config.checkpoint, self._data.program.restore_spec)
