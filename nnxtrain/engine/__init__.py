"""Engines compile and run a training step, behind one interface."""
