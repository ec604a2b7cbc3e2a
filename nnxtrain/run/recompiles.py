"""How often each program was compiled, as jax itself reports it."""

import weakref
from collections import Counter
from collections.abc import Iterable

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileLog:
    """Counts compilations of this process by the name of the jitted function, from now on until it is closed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        counts = self.counts

        def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
            if event == COMPILED:
                counts[str(kwargs.get("fun_name"))] += 1

        jax.monitoring.register_event_duration_secs_listener(count)
        # jax would keep the listener, and call it, for as long as the process lives
        self._close = weakref.finalize(self, jax.monitoring.unregister_event_duration_listener, count)

    def of(self, programs: Iterable[str]) -> dict[str, int]:
        """Returns the compilations of each of `programs`."""
        return {name: self.counts[f"jit({name})"] for name in programs}

    def repeats(self, programs: Iterable[str]) -> int:
        """Returns the compilations of `programs` beyond the first of each."""
        return sum(max(count - 1, 0) for count in self.of(programs).values())

    def close(self) -> None:
        """Stops counting; what was counted stays."""
        self._close()
