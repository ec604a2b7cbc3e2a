"""What happens to the parts of a run in turn: steps, evaluations, saves, going back, and the end."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import jax
from flax import nnx
from jax.profiler import annotate_function

from nnxtrain.checkpoint.saver import Snapshot
from nnxtrain.config.schema import Config
from nnxtrain.errors import STOPPED, CheckpointError, NonFiniteError, UserError
from nnxtrain.host.files import explain, write_whole
from nnxtrain.loops.train_loop import StepRecord, run_loop
from nnxtrain.run.context import RunContext
from nnxtrain.run.parts import RunParts


class Training:
    """Takes a run from its first step to its end.

    Attributes:
        position: of the data after the last step that was recorded.
        total: steps of the whole run, as far as its data goes.
    """

    def __init__(self, parts: RunParts, context: RunContext):
        self._parts = parts
        self._context = context
        self._config: Config = parts.data.program.config
        self._summary = context.summary
        self._say = context.console.say
        self.position = self._seen = parts.start.position
        self.total = parts.total
        self._rollbacks = 0

    def run(self) -> int:
        """Trains, evaluates, saves; returns the exit code."""
        done = self._parts.start.step
        with self._rescued():
            if self._is_eval_due(done):
                self._evaluate(done)
                self._save(done)  # it is saved, but its loss may not have been known
            while True:
                try:
                    done = self._steps_from(done)
                    break
                except NonFiniteError as error:
                    done = self._recover(error)
            self._context.console.stop()
            if self._config.checkpoint.keep_best is None:
                self._save(done)  # before the evaluation, which may fail
            if (self._stops(done) and done < self.total) or not self._evaluate(done):
                return self._stop(done)
            self._finish(done)
        return 0

    @contextmanager
    def _rescued(self) -> Iterator[None]:
        """Saves the steps that are done when an error ends the run; the error stays the one that is raised."""
        try:
            yield
        except (NonFiniteError, CheckpointError):
            raise  # what was good is saved, or cannot be
        except BaseException:
            self._context.console.stop()
            if self._context.cluster.size == 1:  # a save takes all processes, and the others know nothing of this error
                self._rescue()
            raise

    def _rescue(self) -> None:
        step, parts = self._summary["step"], self._parts
        newest = "there is no checkpoint" if parts.saver.last is None else f"the newest is of step {parts.saver.last}"
        try:
            state = parts.engine.state()
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(state))):
                self._say(f"         the step that failed took the state with it, and nothing can be saved: {newest}")
            elif int(state.step[...]) == step:
                self._save(step)
                parts.store.wait()
        except Exception as late:  # the error that ended the run is the one to raise
            self._say(f"         step {step} could not be saved ({str(late).splitlines()[0]}): {newest}")

    def _stop(self, done: int) -> int:
        """Saves because something asks to stop; returns the exit code.

        Raises:
            UserError: nothing could be saved.
        """
        if not self._save(done):
            raise UserError(f"stopped at step {done} by a signal, and nothing is saved: checkpoint.enabled=false")
        self._parts.store.wait()
        return STOPPED

    def _steps_from(self, done: int) -> int:
        """Takes steps to the end, or until something asks to stop; returns the steps done."""
        parts = self._parts
        prefetch = self._config.data.prefetch
        batches = parts.data.train.start(self.position, put=parts.data.put_train, prefetch=prefetch)
        with closing(batches), parts.profiler.steps(done):
            self._context.console.start(done=done, total=self.total)
            steps = range(done, self.total)
            return run_loop(
                parts.engine, batches, steps=steps, record=self._record, between=self._between, stops=self._stops
            )

    def _stops(self, done: int) -> bool:
        """Tells whether a signal, or the platform, asks to stop."""
        return self._is_asked_to_stop() or self._parts.store.is_preempted(done)

    def _is_asked_to_stop(self) -> bool:
        return self._context.cluster.any_asks(self._context.signals.asked)

    def _is_interrupted(self) -> bool:
        """Tells long work between steps whether to give way to a signal; shows the watchdog that it goes on."""
        self._context.watchdog.beat()
        return self._is_asked_to_stop()

    def _record(self, record: StepRecord) -> None:
        """Takes a finished step; that it is done is known before anything is written of it, which may fail."""
        self._context.watchdog.beat()
        self._context.signals.guard_unsaved()
        self._summary.values.setdefault("start_to_first_step_s", time.monotonic() - self._context.caller.began)
        self._seen = record.position
        if not record.metrics["bad"]:
            self.position = record.position
            self._summary.values["step"] = record.step
        self._parts.recorder.train(record, profiled=self._parts.profiler.is_tracing)
        self._parts.store.check()

    def _recover(self, error: NonFiniteError) -> int:
        """Goes back to the newest checkpoint and leaves out the rows that broke it, or saves what is good and gives up.

        Returns: the steps done at the checkpoint.
        """
        parts = self._parts
        self._context.console.stop()
        parts.store.wait()
        if self._config.debug.on_nonfinite != "rollback":
            step = self._summary["step"]
            self._save(step)
            parts.store.wait()
            raise NonFiniteError(f"{error}{self._way_back(step)}") from error
        if not parts.store.steps() or self._rollbacks == self._config.debug.nonfinite_limit:
            why = f"{self._rollbacks} rollbacks before" if self._rollbacks else "no checkpoint to go back to"
            raise NonFiniteError(f"{error}; debug.on_nonfinite=rollback gives up: {why}") from error
        self._rollbacks += 1
        parts.engine.drop()
        first, end = self.position.row, self._seen.row
        skipped = self.position.without(first, end).skipped
        self._say(f"rollback {error}")
        self._say(f"         rows {first} to {end} are left out from now on")
        state, done, position, _ = parts.restorer.find("must")
        self.position = position._replace(skipped=skipped)
        self.total = parts.data.steps(done, self.position)
        parts.restorer.load(parts.engine, state)
        parts.saver.last = done
        parts.recorder.go_back(done, steps=self.total)
        self._summary.values["step"] = done
        return done

    def _way_back(self, step: int) -> str:
        """Returns how to go back behind `step`, whose weights may be what made the next step fail."""
        earlier = [each for each in self._parts.store.steps() if each < step]
        if earlier:
            way = f"go back with checkpoint.resume={earlier[-1]}; there are {', '.join(map(str, earlier))}"
        else:
            way = "there is no earlier checkpoint: start anew with another run_name"
        where = f"step {step} is the newest checkpoint" if self._parts.saver.last == step else "nothing was saved"
        return f"\n  {where}; if its weights are the cause, the same will happen again: {way}"

    def _between(self, done: int) -> Callable[[], None] | None:
        """Returns what is due after `done` steps: evaluation first, so that a save knows its loss."""
        evaluates, saves = self._is_eval_due(done), self._parts.saver.is_due(done)
        turns = self._parts.profiler.turns()

        def due() -> None:
            self._parts.profiler.leave()
            if evaluates:
                self._evaluate(done)
            if saves:
                self._save_and_tell(done)
            if done < self.total:
                self._parts.profiler.enter()

        return due if evaluates or saves or turns else None

    def _is_eval_due(self, done: int) -> bool:
        """Tells whether an evaluation is due between two steps."""
        every = self._config.eval.every_steps
        return every > 0 and done > 0 and done % every == 0

    @functools.partial(annotate_function, name="eval")
    def _evaluate(self, step: int) -> bool:
        """Evaluates every held-out set that was not yet, writes a sample, summary and report.

        Returns: whether that is done; False if it gave way to a stop signal.
        """
        sample = self._sample_of(step)
        missing, is_sampled = self._missing(step, list(self._parts.evaluators))
        if not missing and is_sampled:
            return True
        if not self._evaluate_sets(step, missing):
            return False
        write_whole(sample, self._parts.write_text() + "\n")
        self._context.watchdog.beat()
        self._summary.write(with_picture=True)
        return True

    def _missing(self, step: int, names: list[str]) -> tuple[list[str], bool]:
        """Returns the sets, of these, that have no evaluation at `step`, and whether it has a sample."""
        before = self._parts.recorder.evaluated(step)
        known = [*(name in before for name in names), self._sample_of(step).exists()]
        *evaluated, is_sampled = self._context.cluster.of_first(known)
        return [name for name, is_done in zip(names, evaluated, strict=True) if not is_done], bool(is_sampled)

    def _evaluate_sets(self, step: int, names: Sequence[str]) -> bool:
        for name in names:
            if (result := self._parts.evaluators[name](self._is_interrupted)) is None:
                return False
            self._parts.recorder.evaluation(step, name, result)
        return True

    def _sample_of(self, step: int) -> Path:
        """Returns the file of the text written after `step` steps."""
        return self._context.folders.own / "samples" / f"step_{step:08}.txt"

    def _save_and_tell(self, step: int) -> None:
        """Saves, with the loss that the best is chosen by, and writes summary and report."""
        if (best := self._config.checkpoint.keep_best) is not None:
            self._evaluate_sets(step, self._missing(step, [best])[0])  # a checkpoint without a loss is never the best
        self._save(step)
        try:
            self._summary.write()
        except OSError as error:  # the next save, or the end, writes it again
            self._say(f"warning  {explain(error)}")

    @functools.partial(annotate_function, name="checkpoint")
    def _save(self, step: int) -> bool:
        """Saves the state of the moment, unless that was done; tells whether it is saved.

        Raises:
            NonFiniteError: it is not finite, and is not saved.
        """
        if step == 0:
            return True
        parts = self._parts
        data = self.position.as_json()
        if parts.recorder.unwritten:
            data["unwritten"] = parts.recorder.unwritten  # a resumed run gives them their place
        (loss,) = self._context.cluster.of_first([parts.recorder.loss_of(self._config.checkpoint.keep_best, step)])
        saved = parts.saver.save(Snapshot(step, parts.engine.state(), data, loss))
        self._context.watchdog.beat()
        return saved

    def _finish(self, done: int) -> None:
        """Saves the last step and shows a sample."""
        self._save(done)
        self._parts.store.wait()
        self._summary.values["step"] = done
        if self._context.cluster.index == 0:
            text = self._sample_of(done).read_text(encoding="utf-8").rstrip()
            self._say(f"sample   --------\n{text}\n         --------")
