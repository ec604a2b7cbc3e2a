"""Traces of chosen steps, and figures from traces."""
