"""Train states on disk."""
