"""Configuration files written on the spot."""

import pytest


@pytest.fixture
def write(tmp_path):
    """Returns `(content, name) -> Path`, which writes a configuration file."""

    def write_file(content: str | bytes, name: str = "run.yml"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file
