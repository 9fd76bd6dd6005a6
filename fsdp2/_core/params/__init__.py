"""One bucket of communication: parameters that are gathered and reduced together."""
