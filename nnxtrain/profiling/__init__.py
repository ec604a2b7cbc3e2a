"""Which steps are traced, and what a trace says."""
