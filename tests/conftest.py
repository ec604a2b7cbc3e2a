"""Eight CPU devices and a quick compiler for the tests, before jax looks at the machine."""

import gc
import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

for number in (signal.SIGHUP, signal.SIGINT):  # `nohup` and shells in the background ignore them, for children too
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# the compiler spends most of its time on the speed of the program, and on splitting it among threads
QUICKLY = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICKLY += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config):
    """Compiles quickly where numbers alone are of interest, in other processes too; slow tests do as users do."""
    if config.option.markexpr != "slow":
        os.environ["XLA_FLAGS"] += QUICKLY


def pytest_collection_finish():
    """Spares the collector what was imported: walks over that were a seventh of the time of each trace."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"  # one for all workers
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def quick_compiles(_compiled):
    """Keeps compiled programs on disk, for files whose programs are of one device: those of several lock up on CPU."""
    words = {"jax_compilation_cache_dir": str(_compiled), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: jax.config.values[name] for name in words}
    for name, value in words.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
