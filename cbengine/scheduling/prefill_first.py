"""Prefills in progress before decodes: the first token comes sooner, the others wait for it."""

from __future__ import annotations

from collections.abc import Callable

from cbengine.scheduling.passes import PassScheduler


class PrefillFirstScheduler(PassScheduler):
    """A prompt once begun is computed before anyone decodes; newcomers still come last."""

    def passes(self) -> tuple[Callable[[], None], ...]:
        return (self._prefill_pass, self._decode_pass, self._admit_pass)
