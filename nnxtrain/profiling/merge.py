"""The traces of all processes of a window in one session, which a viewer shows side by side."""

import re
import shutil
from collections import defaultdict
from pathlib import Path

from nnxtrain.errors import ConfigError
from nnxtrain.profiling.trace import trace_files

PROCESS = re.compile(r"(stage_\d+\.)?process_\d+")


def merge(place: Path) -> list[Path]:
    """Copies the traces of each window at `place` to `merged/` inside it; returns these folders.

    Args:
        place: a window, or a folder of windows, such as a run.

    Raises:
        ConfigError: there is no trace, or one that lies in no window.
    """
    windows: dict[Path, list[Path]] = defaultdict(list)
    for file in trace_files(place):
        if len(file.parents) < 5 or not PROCESS.fullmatch(file.parents[3].name):
            raise ConfigError(f"{file} is not in the folder of a process, such as process_0000")
        windows[file.parents[4]].append(file)
    for window, files in windows.items():
        part, final = window / ".merged.part", window / "merged"
        session = part / "plugins" / "profile" / window.name
        shutil.rmtree(part, ignore_errors=True)
        session.mkdir(parents=True)
        for file in files:  # a viewer takes the name of the file for the host
            shutil.copyfile(file, session / f"{file.parents[3].name}.xplane.pb")
        shutil.rmtree(final, ignore_errors=True)
        part.replace(final)
    return [window / "merged" for window in windows]
