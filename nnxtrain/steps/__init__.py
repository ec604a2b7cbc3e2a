"""Pure functions of state and batch."""
