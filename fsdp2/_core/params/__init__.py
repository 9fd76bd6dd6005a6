"""One communication bucket: a group of parameters that are gathered and reduced together."""
