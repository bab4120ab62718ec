"""How long the running step will take, so that the next one can be planned late. Engine thread only.

With two steps in flight a newcomer would wait for the one that runs and for the whole one launched behind it. Planned just
before the running one ends, the second step holds everybody who came meanwhile, and the device still never waits.

A forecast is low on purpose: too low, and a newcomer waits as long as without it; too high, and the device stands still.
"""

from __future__ import annotations

from collections import deque

_SHARE = 0.9
"""Of the shortest of the steps that were like this one."""
_ROOM = 1.5e-3
"""Seconds beside what a launch takes: the thread that waits has to be woken, and the processors are busy."""
_NEAR = 8
"""A step with a few rows less says how long one takes at least."""
_TELLING = 16
"""Prompt tokens from which on a step says what one costs: with fewer, most of its time is not theirs."""


class Forecast:
    """Learns from every step: what decoding so many rows takes, and what a prompt's token adds."""

    def __init__(self) -> None:
        self._decodes: dict[int, deque[float]] = {0: deque([0.0])}
        self._per_token: deque[float] = deque(maxlen=8)
        self._launch = 0.0

    def saw(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        if not prompt_tokens:
            self._decodes.setdefault(decodes, deque(maxlen=4)).append(seconds)
        elif prompt_tokens >= _TELLING and (base := self._base(decodes)) is not None:
            self._per_token.append(max(0.0, seconds - base) / prompt_tokens)

    def launched(self, seconds: float) -> None:
        """Planning, filling and launching a step has taken so long."""
        self._launch = max(seconds, 0.9 * self._launch)

    def wait(self, decodes: int, prompt_tokens: int) -> float:
        """Seconds from the start of such a step to the moment when the next has to be planned. 0: at once."""
        base = self._base(decodes)
        if base is None or (prompt_tokens and not self._per_token):
            return 0.0
        seconds = base + (prompt_tokens * min(self._per_token) if prompt_tokens else 0.0)
        return max(0.0, _SHARE * seconds - _ROOM - 2 * self._launch)

    def _base(self, decodes: int) -> float | None:
        for count in range(decodes, max(-1, decodes - _NEAR), -1):
            if count in self._decodes:
                return min(self._decodes[count])
        return None
