"""The composition root: the only room that sees the whole configuration."""
