"""Promise: the check of prose finds an idiom where it is written, and honours an exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.prose import found_in

DOCUMENT = """# A page

Nobody reads this. Who reads it waits.
The `nobody` of code is fine. Who reads it?
```python
# Nobody
```
An exception: nobody. <!-- prose: nobody -->
"""

SOURCE = '''"""Which rank sends.

Which rank receives: found in the first line alone.
"""

CODE = "nobody"  # a mark learns of it
TEXT = "It knows the rank"
# nobody, prose: nobody
'''


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", DOCUMENT, [(3, "nobody"), (3, "who")]),
        ("module.py", SOURCE, [(1, "opening"), (6, "acts"), (7, "knows")]),
    ],
)
def test_idioms_are_found(
    name: str, text: str, found: list[tuple[int, str]], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert sorted((line, pattern.name) for line, pattern in found_in(path)) == found
