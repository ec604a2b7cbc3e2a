"""Layers: modules built from plain sizes, that map arrays to arrays."""
