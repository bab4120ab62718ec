"""What clients saw of a workload, and the figures that are made of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cbengine.cli.workload import Workload


@dataclass(slots=True)
class Record:
    """One request, as its client saw it; times in seconds of one clock."""

    submit: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each token came."""
    ids: list[int] = field(default_factory=list)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """From each token to the next one: when both came."""
        return list(itertools.pairwise(self.times))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Seconds, and tokens per second; None where there is nothing to measure."""

    wall: float
    """From the first request to the last token."""
    output_tokens: int
    output_rate: float
    total_rate: float
    """Prompt and output tokens."""
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    quiet_itl_p50: float | None = None
    """Of the requests that decode while the long prompt has not come (see the workload "long")."""
    quiet_itl_p99: float | None = None
    beside_itl_p99: float | None = None
    """Of the same requests, from its arrival to its first token."""
    wrong_length: int = 0
    """Requests whose answer is longer or shorter than it was asked to be."""


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The value at that share of all values, nearest rank; None of none."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else None


def figures(workload: Workload, records: Sequence[Record]) -> Figures:
    """Make the figures of a run in which every request got at least one token."""
    start = min(record.submit for record in records)
    wall = max(record.times[-1] for record in records) - start
    tokens = sum(len(record.times) for record in records)
    first = [record.times[0] - record.submit for record in records]
    gaps = [later - sooner for record in records for sooner, later in record.gaps]
    quiet, beside = _around(workload, records)
    wrong = [len(r.ids) != item.max_new_tokens for r, item in zip(records, workload.items, strict=True)]
    return Figures(
        wall=wall,
        output_tokens=tokens,
        output_rate=tokens / wall,
        total_rate=(tokens + workload.prompt_tokens) / wall,
        ttft_p50=percentile(first, 50),
        ttft_p99=percentile(first, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        quiet_itl_p50=percentile(quiet, 50),
        quiet_itl_p99=percentile(quiet, 99),
        beside_itl_p99=percentile(beside, 99),
        wrong_length=sum(wrong),
    )


def _around(workload: Workload, records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Gaps of the requests that decode: before a late one comes, and while its prompt is computed."""
    late = [r for r, item in zip(records, workload.items, strict=True) if item.after_tokens]
    if not late:
        return [], []
    decoders = [r for r, item in zip(records, workload.items, strict=True) if not item.after_tokens]
    running = max(record.times[0] for record in decoders)
    arrival, computed = min(record.submit for record in late), max(record.times[0] for record in late)
    gaps = [gap for record in decoders for gap in record.gaps]
    quiet = [later - sooner for sooner, later in gaps if sooner >= running and later <= arrival]
    return quiet, [later - sooner for sooner, later in gaps if later > arrival and sooner < computed]


def differing(one: Sequence[Record], other: Sequence[Record]) -> int:
    """Requests whose tokens are not the same in two runs."""
    return sum(a.ids != b.ids for a, b in zip(one, other, strict=True))
