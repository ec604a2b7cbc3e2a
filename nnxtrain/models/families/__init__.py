"""Families of models: one module each."""
