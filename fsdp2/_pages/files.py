"""Files of text that are there whole, or not at all. It must not know what is in them."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, in place of one that is there. Of several writers the last one's stays.

    Raises:
        OSError: it cannot be written; a file that was there is as it was.
    """
    # ranks on several machines may have one process id, and one folder
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:  # of the file that was asked for, not of the one beside it
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)
