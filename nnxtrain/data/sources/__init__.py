"""Data sources: what `data.source` names, one file each."""

from nnxtrain.data.sources.table import DATASETS

__all__ = ["DATASETS"]
