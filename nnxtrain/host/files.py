"""Files that are whole or not there, and where a user keeps what can be made again."""

import json
import math
import os
from pathlib import Path
from typing import Any

from nnxtrain.errors import ConfigError


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it, so that no reader ever sees half of it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; a file is wanted")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file as `write_whole` does; numbers that JSON cannot hold become null."""
    write_whole(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Returns `value` with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default_cache_dir() -> Path:
    """Returns the folder below the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nnxtrain"
