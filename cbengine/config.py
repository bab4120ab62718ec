"""Engine-wide settings. Everything about one request is in `SamplingParams` or an argument of `stream`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

MIN_BATCH_TOKENS = 256
"""An inferred token budget never goes under this; an explicit one may."""

SCHEDULERS = ("fifo", "prefill_first")
ADMISSION = ("optimistic", "reserve")
PREEMPTION = ("auto", "swap", "recompute")
BACKPRESSURE = ("buffer", "pause", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of the engine, with its default. `None` means "found out at start"; `engine.config` then has it.

    Raises:
        ValueError: a value is outside what its field allows.
        TypeError: a value has the wrong type.
    """

    # --- the model -------------------------------------------------------------------------------------------------
    dtype: str | None = None
    """Weights and KV: "float32", "bfloat16", "float16" or "auto" (the checkpoint's). Default: float32 on a CPU."""
    device: str | None = None
    """Default "cpu", the only one served so far."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together, in tokens. Default and upper bound: what the model was made for."""
    attention_backend: str | None = None
    """"sdpa" (default) or "eager" (the slow reference)."""

    # --- the cache -------------------------------------------------------------------------------------------------
    page_size: int | None = None
    """Tokens of one layer in a page, at least 4. Default: 256, and 32 on a CPU, where small pages cost nothing: requests share
    more of a common beginning, and a short one takes less memory."""
    num_blocks: int | None = None
    """Cache size in blocks (a block = one page for each layer). Default: from free memory."""
    max_memory_percent: float | None = None
    """Share of the free memory that the engine may take for cache and workspace, in (0, 1]. Default on a CPU: a quarter,
    and no more than 2 GiB, so that it starts on a laptop beside everything else."""

    allow_block_sharing: bool = True
    """The prefix cache: pages that were computed once are used again by every request that begins with the same tokens
    (and has the same `cache_salt`). Only where all layers have full attention; a log line says so where it is off."""
    admission: str = "optimistic"
    """When a waiting request is let in: "optimistic" when its known tokens fit (it may have to give way later, see
    `preemption`), "reserve" when its longest possible answer fits too, so that nobody ever gives way."""
    preemption: str = "auto"
    """What becomes of a request that has to give its pages up for a while: "swap" copies them to the CPU pool and back,
    "recompute" computes them again, "auto" does what is cheaper by what both took lately. Without a CPU pool, or where it
    is full, they are computed again."""
    cpu_offload_space: float | None = 0.0
    """Size of the CPU pool for swapping, in GiB; 0 = none. None: `cpu_offload_space_safety_threshold` of the free RAM."""
    cpu_offload_space_safety_threshold: float = 0.8
    """Share of the free RAM that the CPU pool may take, in (0, 1]."""

    # --- the batch -------------------------------------------------------------------------------------------------
    max_batch_tokens: int | None = None
    """Query tokens in one step. Default on a CPU: 512, which keeps a step (and so the wait of everyone who decodes) short;
    a longer prompt is split over steps."""
    max_requests_per_batch: int | None = None
    """Requests in one step. Default on a CPU: 256. Never more than `max_batch_tokens`."""
    scheduler_type: str = "fifo"
    """"fifo": decoding, then prefilling, then waiting, each by arrival. "prefill_first": prefills before decodes."""
    safety_margin: float | None = None
    """While less than this share of the cache is free, no waiting request is let in beside running ones, in [0, 1].
    Default: 0.15 for "fifo", 0.0 for "prefill_first"."""
    use_async_batching: bool | None = None
    """Two steps in flight: the next batch is prepared while the device computes this one. Default: yes."""

    # --- the queue -------------------------------------------------------------------------------------------------
    max_queue_size: int = 0
    """Most requests that may wait to be scheduled for the first time; then `QueueFullError`. 0 = no limit."""
    max_queued_tokens: int = 0
    """Most prompt tokens that may wait likewise. 0 = no limit."""

    # --- the readers -----------------------------------------------------------------------------------------------
    backpressure: str = "buffer"
    """When a reader falls behind: "buffer" lets its tokens wait in its stream (they are bounded by `max_new_tokens`, and
    the pages are free as soon as the answer ends), "pause" stops scheduling it at `stream_buffer` unread tokens until it
    reads on, "abort" ends it there. A request may choose its own."""
    stream_buffer: int = 64
    """Unread tokens at which "pause" and "abort" act. A few more may come: those of the steps in flight."""

    # --- the rest --------------------------------------------------------------------------------------------------
    seed: int | None = None
    """Makes requests that bring no seed of their own reproducible: the n-th request of an engine then always draws the
    same. Default: every request draws anew."""
    num_threads: int | None = None
    """Threads for one operation on a CPU. Default: torch's own choice."""

    def __post_init__(self) -> None:
        for name in ("dtype", "device", "attention_backend"):
            _check(isinstance(getattr(self, name), (str, type(None))), TypeError, name, self, "a string or None")
        _integer(self, "page_size", 4, optional=True)
        for name in ("max_model_len", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "num_threads"):
            _integer(self, name, 1, optional=True)
        most = 8 * (os.cpu_count() or 8)
        few = self.num_threads is None or self.num_threads <= most
        _check(few, ValueError, "num_threads", self, f"at most {most}, eight for each core of this machine")
        _integer(self, "seed", 0, optional=True)
        _integer(self, "max_queue_size", 0)
        _integer(self, "max_queued_tokens", 0)
        _integer(self, "stream_buffer", 1)
        _check(self.stream_buffer <= sys.maxsize, ValueError, "stream_buffer", self, f"at most {sys.maxsize}")
        _check(self.backpressure in BACKPRESSURE, ValueError, "backpressure", self, f"one of {', '.join(BACKPRESSURE)}")
        _check(self.allow_block_sharing in (True, False), TypeError, "allow_block_sharing", self, "a bool")
        _check(self.admission in ADMISSION, ValueError, "admission", self, f"one of {', '.join(ADMISSION)}")
        _check(self.preemption in PREEMPTION, ValueError, "preemption", self, f"one of {', '.join(PREEMPTION)}")
        space = self.cpu_offload_space
        if space is not None:
            _check(_is_number(space) and space >= 0, ValueError, "cpu_offload_space", self, "at least 0 (GiB), or None")
        share = self.cpu_offload_space_safety_threshold
        _check(
            _is_number(share) and 0 < share <= 1, ValueError, "cpu_offload_space_safety_threshold", self, "in (0, 1]"
        )
        percent = self.max_memory_percent
        if percent is not None:
            _check(_is_number(percent) and 0 < percent <= 1, ValueError, "max_memory_percent", self, "in (0, 1]")
        margin = self.safety_margin
        if margin is not None:
            _check(_is_number(margin) and 0 <= margin <= 1, ValueError, "safety_margin", self, "in [0, 1]")
        _check(self.scheduler_type in SCHEDULERS, ValueError, "scheduler_type", self, f"one of {', '.join(SCHEDULERS)}")
        _check(self.use_async_batching in (True, False, None), TypeError, "use_async_batching", self, "a bool or None")

    def merged(self, overrides: Mapping[str, Any]) -> EngineConfig:
        """A copy with some fields replaced. Raises `TypeError` for a setting that does not exist."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise TypeError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return replace(self, **overrides) if overrides else self

    @property
    def margin(self) -> float:
        """`safety_margin` with its default."""
        if self.safety_margin is not None:
            return self.safety_margin
        return 0.15 if self.scheduler_type == "fifo" else 0.0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(ok: bool, error: type[Exception], name: str, config: EngineConfig, allowed: str) -> None:
    if not ok:
        raise error(f"{name} must be {allowed}, got {getattr(config, name)!r}")


def _integer(config: EngineConfig, name: str, low: int, *, optional: bool = False) -> None:
    value: object = getattr(config, name)
    if value is None and optional:
        return
    kind = "an integer or None" if optional else "an integer"
    integer = value if isinstance(value, int) and not isinstance(value, bool) else None
    _check(integer is not None, TypeError, name, config, kind)
    _check(integer is not None and integer >= low, ValueError, name, config, f"at least {low}")
