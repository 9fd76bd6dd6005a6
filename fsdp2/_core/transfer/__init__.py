"""Full tensors from shards and back, between steps, in bounded memory."""
