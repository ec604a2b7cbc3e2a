"""Token rows: sources, packing, and the batches that a run reads."""
