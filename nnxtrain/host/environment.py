"""What software a run was made with."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def environment() -> dict[str, Any]:
    """Returns what `env.json` says of software: versions, platform, commit of the package's source tree."""
    return {
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Returns the commit of the source tree that the package lies in, or None where it lies in no tree of its own."""
    package = Path(__file__).parents[1]
    command = ["git", "-C", str(package), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        top, commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.split("\n")[
            :2
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return commit if Path(top) == package.parent.resolve() else None
