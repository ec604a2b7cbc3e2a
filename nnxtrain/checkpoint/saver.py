"""When a run saves, and what it goes on from."""

import fnmatch
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from nnxtrain.checkpoint.failures import DifferentTreeError
from nnxtrain.checkpoint.store import CheckpointStore, Saved
from nnxtrain.checkpoint.tree import flat
from nnxtrain.config.checkpoint import CheckpointConfig
from nnxtrain.errors import CheckpointError, ConfigError, NonFiniteError
from nnxtrain.optim.averages import evaluation_model
from nnxtrain.state import TrainStateNNX


class Snapshot(NamedTuple):
    """A step at which a run can be saved: its number, state, position of the data, and loss to keep the best by."""

    step: int
    state: TrainStateNNX
    data: dict[str, Any]
    loss: float | None


class Saver:
    """Saves each step at most once, when it is due, and never a state that is not finite.

    Attributes:
        last: step of the newest checkpoint that the run made or goes on from, or None.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: CheckpointConfig,
        *,
        meta: dict[str, Any],
        is_finite: Callable[[], bool],
        last: int | None,
        now: Callable[[], float] = time.monotonic,
    ):
        """Saves nothing yet.

        Args:
            store: of the run.
            config: when to save.
            meta: what every checkpoint says of the run.
            is_finite: whether all weights and moments of the moment are finite.
            last: step of the checkpoint that the run goes on from, or None.
            now: seconds on a clock, the same for all processes of the run.
        """
        self._store = store
        self._config = config
        self._meta = meta
        self._is_finite = is_finite
        self.last = last
        self._now = now
        self._when = now()

    def is_due(self, step: int) -> bool:
        """Tells whether a save is due after `step` steps."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_time = minutes is not None and self._now() - self._when >= 60 * minutes
        return self._config.enabled and (by_time or (every > 0 and step % every == 0))

    def save(self, snapshot: Snapshot) -> bool:
        """Saves a snapshot, unless it is saved already or saving is switched off; tells whether it is saved.

        A loss that was not known yet when the step was saved is added to its checkpoint.

        Raises:
            CheckpointError: this save, or the one before it, failed.
            NonFiniteError: a weight or moment of the snapshot is not finite.
        """
        if snapshot.step == self.last:
            if snapshot.loss is not None:
                self._store.add_loss(snapshot.step, snapshot.loss)
            return True
        if not self._config.enabled:
            return False
        if not self._is_finite():
            what = "its weights or moments are not all finite, and it is not saved"
            raise NonFiniteError(f"step {snapshot.step}: {what}; try a lower optimizer.learning_rate")
        self._store.save(snapshot.step, snapshot.state, data=snapshot.data, meta=self._meta, loss=snapshot.loss)
        self.last = snapshot.step
        self._when = self._now()
        return True


class RestoreSpec(NamedTuple):
    """What a run asks of a checkpoint.

    Attributes:
        make_state: makes an abstract state, which says where its arrays are to lie.
        tokenizer: fingerprint of the run's tokenizer.
        sequence: tokens of a row, which the position of the data counts.
    """

    make_state: Callable[[], TrainStateNNX]
    tokenizer: str
    sequence: int


def restore_run(
    store: CheckpointStore, wanted: RestoreSpec, *, resume: str, say: Callable[[str], None], falls_back: bool = True
) -> tuple[Saved, TrainStateNNX] | None:
    """Returns the checkpoint that a run goes on from, with its state, or None for a fresh run.

    With `auto` and `must` that is the newest one that can be read; what is skipped is told. Later checkpoints than the
    one chosen are set aside.

    Args:
        store: of the run.
        wanted: what the run asks of it.
        resume: `checkpoint.resume`.
        say: tells people.
        falls_back: whether an older one will do; not where another process might have read the newer one.

    Raises:
        CheckpointError: what was asked for is not there, none can be read, or the newest is of another model.
    """
    steps = [int(resume)] if resume.isdecimal() else store.steps()[::-1]
    if not steps and resume == "must":
        raise CheckpointError(f"checkpoint.resume=must: {store.folder} holds no checkpoint")
    problems = []
    for step in steps:
        state = wanted.make_state()
        try:
            saved = store.read(step)
            check_tokenizer(saved, wanted.tokenizer)
            _check_sequence(saved, wanted.sequence)
            store.restore(saved, state)
        except DifferentTreeError:
            raise
        except CheckpointError as error:
            if not falls_back:
                raise
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"skipped  {problem}")
        if dropped := store.set_aside(step):
            say(f"         checkpoints of steps {dropped} are in checkpoints.dropped/")
        return saved, state
    if problems:
        raise CheckpointError("no checkpoint can be read:\n  " + "\n  ".join(problems))
    return None


def find_weights(
    store: CheckpointStore, config: CheckpointConfig, wanted: RestoreSpec
) -> tuple[Saved, Callable[[str], bool]]:
    """Returns the newest checkpoint of another run, and which of its weights `checkpoint.init_*` choose, by path.

    Raises:
        ConfigError: a pattern of what to take matches no parameter.
        CheckpointError: there is none, or the weights chosen differ in name, shape or type.
    """
    state = wanted.make_state()
    paths = ["/".join(path) for path in flat(state, "model")]
    for pattern in config.init_include:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(f"checkpoint.init_include: {pattern!r} matches no parameter, such as {paths[0]}")

    def wants(path: str) -> bool:
        included = any(fnmatch.fnmatchcase(path, pattern) for pattern in config.init_include)
        return included and not any(fnmatch.fnmatchcase(path, pattern) for pattern in config.init_exclude)

    saved = store.read(store.newest())
    check_tokenizer(saved, wanted.tokenizer)
    store.compare(saved, state, "model", wants=wants)
    return saved, wants


def load_weights(store: CheckpointStore, state: TrainStateNNX, config: CheckpointConfig, *, wanted: RestoreSpec) -> int:
    """Reads the weights that `find_weights` finds into `state`; returns their step."""
    saved, wants = find_weights(store, config, wanted)
    store.restore(saved, state, items=("model",), wants=wants)
    return saved.step


def read_to_evaluate(store: CheckpointStore, wanted: RestoreSpec, *, averages: bool) -> tuple[int, nnx.Module]:
    """Returns the step of the newest checkpoint, and the model with the weights to evaluate with.

    Args:
        store: of the run.
        wanted: what is asked of it.
        averages: whether the optimizer holds these weights; its moments are then read too.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    state = wanted.make_state()
    saved = store.read(store.newest())
    check_tokenizer(saved, wanted.tokenizer)
    items = ("model", "optimizer") if averages else ("model",)
    store.restore(saved, state, items=items)
    return saved.step, evaluation_model(state)


def check_tokenizer(saved: Saved, tokenizer: str) -> None:
    """Raises DifferentTreeError if a checkpoint was trained with another tokenizer than that of this fingerprint."""
    if (was := saved.meta["tokenizer"]) != tokenizer:
        raise DifferentTreeError(f"step {saved.step} was trained with tokenizer {was}, and this run has {tokenizer}")


def _check_sequence(saved: Saved, sequence: int) -> None:
    was = saved.meta["config"].get("batch.sequence")
    if was != sequence:
        rule = f"batch.sequence={sequence}, and step {saved.step} was trained with {was}"
        cure = (
            "rows of another length lie elsewhere in the corpus; start a run of another name with checkpoint.init_from"
        )
        raise DifferentTreeError(f"{rule}: {cure}")
