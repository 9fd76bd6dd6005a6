"""Accidents of workers and machines, and how a run goes on: ``python -m tests.accidents``."""
