"""Data sources, selected by `data.source`; one file each."""

from nnxtrain.data.sources.table import DATASETS

__all__ = ["DATASETS"]
