"""Starts and stops the traces of a run between its steps; if a trace fails, the run continues without traces."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import jax

from nnxtrain.config.profile import ProfileConfig
from nnxtrain.profiling.session import OnTrace, Place, Session, TraceRequest, first_line
from nnxtrain.profiling.windows import Phase, make_profile_schedule

ON_DEMAND = "PROFILE_NOW"  # a file of this name in the run directory requests a window
SLOW_S = 30.0  # between two lines that say that a trace is still being written


class Profiler:
    """Traces the steps of one process that the schedule, or a file, requests."""

    def __init__(
        self,
        config: ProfileConfig,
        place: Place,
        *,
        drain: Callable[[], object],
        say: Callable[[str], None],
        alive: Callable[[], None],
        on_trace_ready: OnTrace = None,
    ):
        """Stores its arguments; `steps` starts tracing.

        Args:
            config: which steps are traced, and how.
            place: where traces are written, inside the run directory.
            drain: waits until the devices are idle; kernels that are still running would be missing from a trace.
            say: prints a line.
            alive: tells the watchdog that slow writing is not a hang.
            on_trace_ready: called with each trace after it is written; its errors are printed and do not end the run.
        """
        self._config = config
        self._place = place
        self._drain = drain
        self._say = say
        self._alive = alive
        self._on_trace_ready = on_trace_ready
        self._schedule = make_profile_schedule(config) if config.is_traced(place.process) else None
        self._request = place.folder.parent / ON_DEMAND
        self._session: Session | None = None
        self._done = 0  # steps of the run
        self._taken = 0  # steps of this process
        self._opened = 0  # `_taken` when the session began
        self._until = 0  # `_taken` at the end of the window that a file requested
        self._is_off = False

    @property
    def is_tracing(self) -> bool:
        """Whether a tracer is running, which makes steps slower."""
        return self._session is not None

    @contextlib.contextmanager
    def steps(self, done: int) -> Iterator[None]:
        """Traces the steps of a loop that starts after `done` steps; a window that is open when it ends is partial."""
        self._done = done
        with self._server():
            self._look()
            self.enter()
            try:
                yield
            except BaseException as error:
                if "RESOURCE_EXHAUSTED" in str(error):
                    self._keep_memory()
                self._end(attempted=1)
                raise
            finally:
                self._end()

    def turns(self) -> bool:
        """Counts a step; returns whether a trace ends or begins before the next one."""
        self._done += 1
        self._taken += 1
        self._look()
        return (self._session and self._session.want) != self._want()

    def leave(self) -> None:
        """Ends the trace that the next step does not belong to."""
        if self._session is not None and self._session.want != self._want():
            self._end()

    def enter(self) -> None:
        """Begins the trace that the next step belongs to."""
        want = self._want()
        if want is None or self._session is not None:
            return
        try:
            self._drain()
            self._session = Session(self._config, self._place, want=want, step=self._done)
            self._opened = self._taken
        except Exception as error:
            self._give_up("no trace can be taken", error)

    def _want(self) -> TraceRequest | None:
        if self._is_off:
            return None
        if self._taken < self._until:
            return TraceRequest(True, until=self._until)
        phase = Phase.IDLE if self._schedule is None else self._schedule.phase(self._taken)
        if self._schedule is None or phase == Phase.IDLE:
            return None
        return TraceRequest(phase != Phase.WARMUP, cycle=self._schedule.cycle(self._taken))

    def _look(self) -> None:
        """Handles a request for a window, which is a file."""
        if self._place.process > 0 or self._is_off or not self._request.exists():
            return
        try:
            self._request.unlink()
        except OSError as error:
            self._give_up(f"{ON_DEMAND} cannot be removed", error)
        if self._session is not None and self._session.want == self._want():
            self._say(f"profile  {ON_DEMAND} is ignored: a window is open")
        else:
            self._until = self._taken + self._config.active

    def _end(self, *, attempted: int = 0) -> None:
        """Ends the current trace and keeps it if it is of a window; `attempted` is 1 if a step failed."""
        session, self._session = self._session, None
        if session is None:
            return
        info = None
        try:
            with contextlib.suppress(Exception):  # errors of the devices are reported by the training loop
                self._drain()
            with self._progress():
                session.stop()
                if session.want.is_kept and (count := self._taken - self._opened + attempted):
                    info = session.keep(count, say=self._say)
        except Exception as error:
            self._give_up(f"the trace from step {session.step} on cannot be written", error)
        finally:
            session.clear()
        if info is not None and self._on_trace_ready is not None:
            try:
                self._on_trace_ready(info)
            except Exception as error:
                self._say(f"profile  on_trace_ready failed: {first_line(error)}")

    def _keep_memory(self) -> None:
        """Writes a profile of device memory after it ran out."""
        if self._config.memory == "never":
            return
        path = self._place.folder / f"out_of_memory_{self._done:08}" / self._place.name / "memory.pprof.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(path)
            self._say(f"profile  out of memory; device memory profile: {path}")
        except Exception as error:
            self._say(f"profile  out of memory; the device memory profile cannot be written: {first_line(error)}")

    def _give_up(self, what: str, error: Exception) -> None:
        self._is_off = True
        self._say(f"profile  {what}: {first_line(error)}; the run continues without traces")

    @contextlib.contextmanager
    def _server(self) -> Iterator[None]:
        """Runs the profiler server for external tools, if a port is set."""
        port = self._config.server_port
        try:
            if port:
                jax.profiler.start_server(port)
        except Exception as error:
            self._say(f"profile  profile.server_port={port} cannot be opened: {first_line(error)}")
            port = 0
        try:
            yield
        finally:
            if port:
                jax.profiler.stop_server()

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        """Reports slow writing to the console and the watchdog."""
        ended = threading.Event()
        began = time.monotonic()

        def tell() -> None:
            said = began
            while not ended.wait(1):
                self._alive()
                if (now := time.monotonic()) - said > SLOW_S:
                    said = now
                    self._say(f"profile  a trace is being written, {now - began:.0f} s so far")

        threading.Thread(target=tell, name="profile-patience", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
