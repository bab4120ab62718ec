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
    longest = max(map(len, markers), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(marker.startswith(tail) for marker in markers):
            return at
    return len(text)
