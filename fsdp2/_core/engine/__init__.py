"""The order of a step: units, the runtime of a tree of units, module and autograd hooks."""
