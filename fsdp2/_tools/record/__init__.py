"""What a run did: see ``record`` (one rank, as it runs) and ``read_recordings`` (all, later)."""
