"""`python -m tests.sim`: what `scripts/sim` runs."""

import sys

from tests.sim._run import main

sys.exit(main())
