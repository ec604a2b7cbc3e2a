"""Weights on disk."""
