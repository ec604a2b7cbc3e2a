"""Leaf layers: numbers in, arrays out."""
