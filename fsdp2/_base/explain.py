"""``python -m fsdp2 explain FS104``: what the code of a message means.

Owns that command line. It imports nothing of torch: who has just met an error waits for no more
than the text. ``fsdp2/__init__.py`` starts it before it loads anything else.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from fsdp2._base.paragraphs import CODE, in_terminal, read_paragraphs


def main(arguments: Sequence[str]) -> None:
    """Print paragraphs. Ends with 2, and a word about it, if the arguments are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 explain",
        description="Say what the code of a message means, how one gets there, and what to do.",
        allow_abbrev=False,
    )
    parser.add_argument("codes", nargs="*", help="as FS104, or a whole message; none: list all")
    given = parser.parse_args(arguments)
    try:
        _explain(parser, given.codes)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` does; Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _explain(parser: argparse.ArgumentParser, codes: Sequence[str]) -> None:
    known = {paragraph.code: paragraph for paragraph in read_paragraphs()}
    if not codes:
        print("\n".join(f"{one.code}  {one.title}" for one in known.values()))
        return
    text = " ".join(codes)
    if re.fullmatch(r"[\d\s,]+", text):
        text = re.sub(r"\b(?=\d{3}\b)", "FS", text)
    asked = list(dict.fromkeys(CODE.findall(text.upper())))
    if not asked:
        parser.error(f"codes: expected one as FS104, found {' '.join(codes)!r}")
    unknown = [code for code in asked if code not in known]
    if unknown:
        parser.error(f"codes: there is no {', '.join(unknown)} in fsdp2 of this version")
    print("\n\n\n".join(in_terminal(known[code]) for code in asked))
