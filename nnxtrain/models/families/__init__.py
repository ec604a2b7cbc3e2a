"""Model families: one module each."""
