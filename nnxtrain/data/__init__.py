"""Rows of tokens: sources, packing, and the batches of a run."""
