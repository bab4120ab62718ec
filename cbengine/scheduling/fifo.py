"""First in, first out."""

from __future__ import annotations

from collections.abc import Callable

from cbengine.scheduling.passes import PassScheduler


class FifoScheduler(PassScheduler):
    """Decoding requests first, then the prompts being computed, then the waiting, each by arrival.

    Nobody who streams is held up by newcomers, beyond what their chunks add to a step.
    """

    def passes(self) -> tuple[Callable[[], None], ...]:
        return (self._decode_pass, self._prefill_pass, self._admit_pass)
