"""Optimizers, as optax chains, and learning-rate schedules."""
