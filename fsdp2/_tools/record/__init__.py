"""``record`` records a rank during the run; ``read_recordings`` reads all ranks' files later."""
