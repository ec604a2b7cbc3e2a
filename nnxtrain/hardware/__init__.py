"""Public figures of chips, and devices that need not be here."""
