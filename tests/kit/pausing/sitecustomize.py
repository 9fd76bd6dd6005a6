"""Python imports this at its start, if the folder is on PYTHONPATH; see
`tests/kit/torchs_own.py`."""

import atexit
import time

atexit.register(time.sleep, 0.1)  # registered first, so it runs last, just before Python ends
