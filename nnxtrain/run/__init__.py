"""The run as a thing on this machine: its directory, its console."""
