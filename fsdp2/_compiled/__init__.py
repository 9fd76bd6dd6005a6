"""The training step as functions that a compiler can trace."""
