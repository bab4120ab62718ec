"""Stop strings: found on the engine thread, so that a stop ends the request at that step.

An answer ends where the first stop string is complete; of two that become complete together, the one that began first.
The text up to the stop string's beginning is the answer (up to its end with `include`). What can still become a stop
string, the longest end of the text that is a proper beginning of one, is held back, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The stop strings of one growing answer. Engine thread only.

    Args:
        stops: strings that are not empty.
        include: let the stop string itself be part of the answer.
        after: number of tokens before which nothing is matched (`min_new_tokens`); a match lies in later text as a whole.
    """

    __slots__ = ("_after", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False, after: int = 0) -> None:
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        self._include = include
        self._after = after
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add the text of one token. Returns what may be shown now, and whether the answer ends there."""
        if self._after:
            self._after -= 1
            return text, False
        text = self._held + text
        hit = self._first(text)
        if hit is not None:
            start, end = hit
            self._held = ""
            return text[: end if self._include else start], True
        keep = self._possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The answer ended otherwise: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int] | None:
        """Where the first complete stop string begins and ends: the earliest end, then the earliest beginning."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
