"""Configurations written on the spot: loaded, or refused."""

from pathlib import Path

import pytest

from nnxtrain.config.load import load
from nnxtrain.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Returns `(content, name) -> Path`, which writes a configuration file."""

    def write_file(content: str | bytes, name: str = "run.yml") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


@pytest.fixture
def loaded(write):
    """Returns `(content, *words) -> Config`."""
    return lambda content, *words: load(write(content), words)


@pytest.fixture
def refused(loaded, tmp_path):
    """Returns `(content, *words) -> message`; fails if the configuration is accepted. Places are relative."""

    def message_of(content: str | bytes, *words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded(content, *words)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message_of
