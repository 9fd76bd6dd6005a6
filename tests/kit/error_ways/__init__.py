"""Programs that end in each code of the package, and what mends them.

A *way* is the shortest program that ends in a code. It takes ``mended``: then it does what the
paragraph's "What to do" says, and ends well. The ways to the messages of a file of
``fsdp2/_core/errors`` are in the file of its name here, and are all called ``_``. Codes that such a
program cannot come to are in ``_elsewhere``. ``tests/behaviour/test_error_paragraphs.py`` runs the
ways, and finds codes that have none.
"""

import importlib
from pathlib import Path

from tests.kit.error_ways._elsewhere import ELSEWHERE
from tests.kit.error_ways._way import WAYS, Way

__all__ = ["ELSEWHERE", "WAYS", "Way"]

for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    importlib.import_module(f"{__name__}.{path.stem}")
