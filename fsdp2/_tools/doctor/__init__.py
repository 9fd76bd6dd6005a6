"""``python -m fsdp2 doctor``: checks of correctness, speed and the machine; settings to change."""
