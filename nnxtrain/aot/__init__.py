"""Compiles the programs of a run ahead of time, for devices that this machine need not have, and reports on them."""
