"""Snapshots of a running engine, for `stats()` and `health()`. Any thread: reads single attributes, never waits."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbengine.observe.counters import EngineStats
from cbengine.outputs import RequestStatus

if TYPE_CHECKING:
    from cbengine.execution.loop import LoopParts
    from cbengine.execution.worker import Worker


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`bool(health)` is True while requests are taken."""

    status: str
    """"new", "starting", "running", "stopping" (it finishes what it has), "stopped", "dead" (it failed) or "closed"."""
    error: BaseException | None = None
    """What it died of."""

    def __bool__(self) -> bool:
        return self.status == "running"

    @staticmethod
    def of(worker: Worker | None, *, closed: bool) -> EngineHealth:
        if worker is None:
            return EngineHealth("closed" if closed else "new")
        state = worker.state.value
        if worker.fault is not None:
            return EngineHealth("dead", worker.fault)
        if state != "ended":
            return EngineHealth("stopping" if worker.stopping else state)
        return EngineHealth("closed" if closed else "stopped")


def final_snapshot(parts: LoopParts) -> EngineStats:
    """The totals at the end of a run. Nothing is held any more: what an engine that died did not get to return went with
    its cache."""
    last = snapshot(parts)
    return replace(
        last,
        running=0,
        waiting=0,
        pages_used=0,
        pages_cached=0,
        pages_free=last.pages_total - last.pages_reserved,
        rows_used=0,
        labels=0,
        steps_in_flight=0,
    )


def snapshot(parts: LoopParts) -> EngineStats:
    """The counts as of now."""
    counters, usage = parts.counters, parts.cache.usage()
    running = parts.scheduler.num_running
    sharing = parts.cache.sharing
    found, asked = (0, 0) if sharing is None else (sharing.prefix.hit_tokens, sharing.prefix.queried_tokens)
    return EngineStats(
        running=running,
        waiting=max(0, len(parts.requests) - running),
        pages_total=usage.total,
        pages_used=usage.used,
        pages_free=usage.free,
        pages_cached=usage.cached,
        pages_reserved=usage.reserved,
        rows_used=parts.rows.num_used,
        labels=parts.registry.num_labels,
        steps_in_flight=parts.pipeline.num_in_flight,
        tokens_per_second=counters.tokens_per_second(),
        steps=counters.steps,
        generated_tokens=parts.committer.tokens,
        prompt_tokens=parts.committer.prompt_tokens,
        preemptions=parts.lifecycle.preemptions,
        swaps=0 if parts.cache.swap is None else parts.cache.swap.swaps_out,
        cached_tokens=found,
        cache_hit_rate=found / asked if asked else 0.0,
        requests_finished=counters.ends[RequestStatus.FINISHED],
        requests_cancelled=counters.ends[RequestStatus.CANCELLED],
        requests_failed=counters.ends[RequestStatus.FAILED],
        loop_wakeups=parts.outbox.wakeups,
        host_seconds=counters.host_seconds,
        graphs=len(parts.pipeline.graphs),
        uptime=time.monotonic() - counters.started,
    )
