"""Optax chains and learning-rate curves."""
