"""Published figures of chips, and devices to compile for."""
