"""The training and evaluation steps: pure functions of state and batch."""
