"""Finding marks in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_marker(text: str, start: int, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `markers` begins at or after `start`, and which it is; the longer of two that begin there."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def possible_marker(text: str, start: int, markers: Sequence[str]) -> int:
    """Where the longest end of `text` begins that may still become one of `markers`; `len(text)` if there is none."""
    best = len(text)
    for marker in markers:
        at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while 0 <= at < best:
            if marker.startswith(text[at:]):
                best = at
            at = text.find(marker[0], at + 1)
    return best
