"""What is written of a run, for programs and for people."""
