"""Traces of selected steps, and figures from traces."""
