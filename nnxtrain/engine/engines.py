"""The engines by name."""

from nnxtrain.engine.base import Engine
from nnxtrain.engine.single import SingleEngine
from nnxtrain.engine.split import SplitEngine

ENGINES: dict[str, type[Engine]] = {"single": SingleEngine, "split": SplitEngine}
