"""The layout of the house is checked, and the check can fail."""

import ast

import pytest

from tests.support import ROOT
from tools.check_floors import FLOORS, cycles, import_problems, main, size_problems


def test_the_package_keeps_to_its_floors():
    """`make lint` runs the same."""
    assert main(ROOT) == 0


@pytest.mark.parametrize(
    ("room", "source", "found"),
    [
        ("nn", "from nnxtrain.models.decoder import Decoder", True),
        ("nn", "import nnxtrain.loops", True),
        ("nn", "from nnxtrain import build", True),
        ("nn", "from nnxtrain.data.packing import PackedRows", True),
        ("nn", "def f():\n    from nnxtrain.types import Batch", True),
        ("models", "from nnxtrain.nn.mlp import GatedMlp", False),
        ("data", "from nnxtrain.tokenizers.byte import ByteTokenizer", False),
        ("config", "from nnxtrain.errors import ConfigError", False),
        ("train", "def f():\n    from nnxtrain.build import make_program", False),
        ("profiling.__main__", "def f():\n    from nnxtrain.run.directory import write_whole", False),
        ("profiling", "from nnxtrain.run.directory import write_whole", True),
        ("build", "from nnxtrain.profiling.__main__ import main", True),
    ],
)
def test_imports_go_down_only(room, source, found):
    """A check that finds nothing would pass on every layout."""
    assert bool(list(import_problems(ast.parse(source), room))) is found


@pytest.mark.parametrize("back", ["from nnxtrain.data import packing", "from nnxtrain.data.packing import x", "x = 1"])
def test_a_cycle_inside_a_folder_is_found(back):
    """Imports inside one folder are allowed, and could go in a circle."""
    trees = {
        "nnxtrain.data.packing": ast.parse("from nnxtrain.data.files import find_files"),
        "nnxtrain.data.files": ast.parse(back),
    }
    assert bool(list(cycles(trees))) is (back != "x = 1")


def test_long_functions_and_many_parameters_are_found(tmp_path):
    """The limits of the house."""
    body = "\n".join(f"    x = {number}" for number in range(61))
    path = tmp_path / "long.py"
    path.write_text(f"def long(a, b, c, d, e, f, g):\n{body}\n" + "\n" * 400)
    problems = list(size_problems(path, ast.parse(path.read_text()), FLOORS["nn"]))
    assert len(problems) == 3
