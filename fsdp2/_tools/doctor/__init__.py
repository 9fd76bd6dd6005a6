"""``python -m fsdp2 doctor``: is it right here, is it fast, is the machine well, what to set."""
