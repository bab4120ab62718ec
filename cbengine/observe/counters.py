"""Counting what the engine does. Written by the engine thread only; read from anywhere as a snapshot."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from cbengine.outputs import RequestStatus

_WINDOW = 5.0  # seconds over which tokens per second are averaged


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts of "now" first, then totals since start.

    Pages are counted in chunks of the pool: in blocks (one page for each layer) where all layers have the same attention.
    `pages_used + pages_free + pages_cached + pages_reserved == pages_total`.
    """

    running: int = 0
    waiting: int = 0
    """Accepted and not running: new ones, and preempted ones that wait for their next turn."""
    pages_total: int = 0
    pages_used: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    """Nobody's, with content that the next request with the same prefix uses again; free as soon as they are needed."""
    pages_reserved: int = 0
    rows_used: int = 0
    labels: int = 0
    steps_in_flight: int = 0
    tokens_per_second: float = 0.0
    """Generated tokens, averaged over the last five seconds."""
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed, those computed again after a preemption included."""
    preemptions: int = 0
    swaps: int = 0
    """Preemptions whose pages were copied to the CPU pool, and so were not computed again."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache and not computed."""
    cache_hit_rate: float = 0.0
    """Their share in all tokens that requests were let in with."""
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    loop_wakeups: int = 0
    """Posts to event loops: one for each loop and step."""
    host_seconds: float = 0.0
    """Time that the engine thread spent preparing and launching steps."""
    graphs: int = 0
    """Shapes of a step that were captured as CUDA graphs."""
    uptime: float = 0.0


class Counters:
    """The running totals behind `EngineStats`."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.steps = 0
        self.host_seconds = 0.0
        self.ends: dict[RequestStatus, int] = {status: 0 for status in RequestStatus if status.ended}
        self._samples: deque[tuple[float, int]] = deque([(self.started, 0)])

    def launched(self, host_seconds: float) -> None:
        """A step was prepared and launched in `host_seconds`."""
        self.steps += 1
        self.host_seconds += host_seconds

    def committed(self, tokens: int) -> None:
        """`tokens` have been generated in all."""
        now = time.monotonic()
        self._samples.append((now, tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now - _WINDOW:
            self._samples.popleft()

    def ended(self, status: RequestStatus) -> None:
        self.ends[status] += 1

    def tokens_per_second(self) -> float:
        """Over the last few seconds up to now; 0 when nothing was generated in that time. Any thread."""
        samples = list(self._samples)
        now = time.monotonic()
        if samples[-1][0] < now - _WINDOW:
            return 0.0
        span = now - samples[0][0]
        return (samples[-1][1] - samples[0][1]) / span if span > 0 else 0.0
