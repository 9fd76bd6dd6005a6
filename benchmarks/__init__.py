"""Measurements of the package: each module prints one table, with the command that made it."""
