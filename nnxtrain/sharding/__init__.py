"""Devices → mesh, logical axes → mesh axes."""
