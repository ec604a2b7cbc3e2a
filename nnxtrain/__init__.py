"""nnxtrain: pretraining of language models as a tree of `flax.nnx` modules, one state and one loop."""

__version__ = "0.1.0"
