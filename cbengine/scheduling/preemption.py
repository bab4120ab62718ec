"""Who gives way when a running request cannot get its next page."""

from __future__ import annotations

from collections.abc import Sequence

from cbengine.scheduling.request import Request


def choose_victim(prefilling: Sequence[Request], decoding: Sequence[Request]) -> Request | None:
    """The newest of the active requests, or None if only one is left. Both sequences are sorted by arrival.

    The newest has waited least and has the least to compute again; and since the oldest is never chosen while another
    runs, it always gets on, so that everything accepted ends some day.
    """
    if len(prefilling) + len(decoding) < 2:
        return None
    candidates = [group[-1] for group in (prefilling, decoding) if group]
    return max(candidates, key=lambda request: request.id)
