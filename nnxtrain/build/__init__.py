"""The composition root: the only package that sees the complete configuration."""
