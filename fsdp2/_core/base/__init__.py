"""Shared by all layers: errors, events, policies, argument checks, and private torch names."""
