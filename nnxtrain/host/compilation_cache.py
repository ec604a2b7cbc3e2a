"""Where compiled programs are kept between processes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from nnxtrain.config.schema import Config
from nnxtrain.host.files import default_cache_dir


def use_compilation_cache(config: Config) -> None:
    """Lets jax keep compiled programs on disk where `debug.compilation_cache` says.

    Not for several CPU devices in one process: programs that come from the cache run their collectives in an order in
    which the devices wait for each other for good (seen with jax 0.10.2).
    """
    place = config.debug.compilation_cache
    if place == "auto" and jax.config.values["jax_compilation_cache_dir"]:
        return  # the user's own choice
    if place is None or (jax.default_backend() == "cpu" and jax.device_count() > 1):
        folder = None
    else:
        folder = str(default_cache_dir() / "xla" if place == "auto" else Path(place).expanduser())
    jax.config.update("jax_compilation_cache_dir", folder)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Lets the compiler do its work: what the cache gives took no time, and cannot be saved again on CPU."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
