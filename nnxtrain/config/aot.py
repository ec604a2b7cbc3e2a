"""Compile only."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class AotConfig:
    """Ahead-of-time compilation for a named topology."""

    topology: str | None = key(None, "devices to compile for, such as v5e:4x4", planned=True)
    report: str | None = key(None, "JSON file for the report", planned=True)
    lower_only: bool = key(False, "stop before the compiler", planned=True)
    sweep: str | None = key(None, "grid of key=val,val words to compile", planned=True)
    save: str | None = key(None, "file for the compiled step", planned=True)
    load: str | None = key(None, "file with a compiled step to run", planned=True)
