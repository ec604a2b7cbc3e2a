"""Module trees, how their layers are stacked, and text from their logits."""
