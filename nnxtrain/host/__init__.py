"""The process that a run lives in: streams, signals, files, other processes."""
