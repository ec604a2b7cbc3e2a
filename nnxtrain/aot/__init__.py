"""Compile only: the programs of a run for devices that need not be here, and what they tell."""
