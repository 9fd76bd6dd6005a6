"""``python -m fsdp2 doctor``: check correctness, speed and the machine; recommend settings."""
