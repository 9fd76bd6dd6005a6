"""Checks, without waiting, that ranks issue the same operations in the same order."""
