"""Execution of a step: units, the runtime of a tree of units, and module and autograd hooks."""
