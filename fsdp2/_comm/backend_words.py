"""What a backend's error tells for certain about the rank that is missing.

Owns the words of gloo, NCCL and torch's stores. It must not know what was sent.
"""

from __future__ import annotations

import re

CLOSED = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|got 0 bytes|"
    r"remote process exited|ncclRemoteError|connection refused",
    re.IGNORECASE,
)
WAITED = re.compile(
    r"(?:timed out waiting|timeout after|timeout\(ms\)\s*=|timed out after)\s*(\d+)\s*(ms)?",
    re.IGNORECASE,
)


def known_of(cause: str) -> str:
    """Return what is known of "another rank", as a clause that follows it; "" if nothing is."""
    waited = WAITED.search(cause)
    if waited is not None:
        seconds = int(waited[1]) / 1000
        return (
            f"nothing came from it for {seconds:g} s. It stands still, it comes later than that, "
            "or the link to it is cut"
        )
    if CLOSED.search(cause):
        return (
            "it closed the connection. Its program came to its end (had it fewer batches?), or it "
            "failed, or the link to it broke"
        )
    return ""
