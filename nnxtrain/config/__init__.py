"""Every key of a run: its type, default, meaning and checks."""
