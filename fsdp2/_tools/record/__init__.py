"""Recordings: ``record`` (one rank, during the run), ``read_recordings`` (all ranks, later)."""
