"""What users call on a model: sharding it, its settings, what it looks like."""
