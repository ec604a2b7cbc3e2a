"""How often each program was compiled, as jax itself reports it."""

from collections import Counter
from collections.abc import Iterable

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileLog:
    """Counts compilations of this process from now on, by the name of the jitted function."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def of(self, programs: Iterable[str]) -> dict[str, int]:
        """Returns the compilations of each of `programs`."""
        return {name: self.counts[f"jit({name})"] for name in programs}

    def repeats(self, programs: Iterable[str]) -> int:
        """Returns the compilations of `programs` beyond the first of each."""
        return sum(max(count - 1, 0) for count in self.of(programs).values())

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            self.counts[str(kwargs.get("fun_name"))] += 1
