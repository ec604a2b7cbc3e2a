"""Command lines, and what they can answer without a run."""
