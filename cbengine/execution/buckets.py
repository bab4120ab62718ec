"""The shapes that graphs are captured in, and which of them a step is padded up to.

A graph computes one shape: T tokens of S sequences with block tables of W columns. A step takes the smallest captured shape
that holds it, or runs eagerly. Two kinds ("paths", as transformers calls them): *decode*, where every sequence has one token,
and *varlen*, where some are chunks of prompts. Padding belongs to the dummy row and the reserved blocks of the cache.

Sizes of decode batches: 1, 2, 4, 8 and then by 8 (the sizes that vLLM and SGLang capture too). Names and defaults of the
padding intervals are those of transformers' continuous batching.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cbengine.execution.slots import StepSizes

Q_INTERVAL = 64
KV_INTERVAL = 16384
_VARLEN_SHAPES = 8
"""Most varlen shapes. Larger steps keep a device busy for longer than queueing them takes: a graph would gain nothing."""
_VARLEN_SEQS = 64
"""Most sequences of a varlen shape: attention kernels start a block of threads for each of them, used or not."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A captured shape. All sequences may sample."""

    decode: bool
    tokens: int  # T; of a decode bucket the same as S
    seqs: int  # S
    width: int  # W

    def sizes(self, groups: int) -> StepSizes:
        """The layout of a step of this shape that nobody asked anything special of."""
        return StepSizes(self.tokens, self.seqs, self.width, self.seqs, 0, groups)

    def __str__(self) -> str:
        what = f"{self.seqs} decodes" if self.decode else f"{self.tokens} tokens of {self.seqs}"
        return f"{what} x {self.width} blocks"


class Buckets:
    """What was captured, by path and width."""

    def __init__(self) -> None:
        self._by_width: tuple[dict[int, list[Bucket]], dict[int, list[Bucket]]] = ({}, {})

    def add(self, bucket: Bucket) -> None:
        of_path = self._by_width[bucket.decode]
        for width in sorted({*of_path, bucket.width}):
            of_path[width] = sorted({*of_path.pop(width, ()), *([bucket] if width == bucket.width else ())}, key=_size)

    def find(self, *, decode: bool, tokens: int, seqs: int, width: int) -> Bucket | None:
        """The smallest that holds such a step. Engine thread, once a step."""
        for columns, buckets in self._by_width[decode].items():
            if columns < width:
                continue
            for bucket in buckets[bisect_left(buckets, tokens, key=_size) :]:
                if bucket.seqs >= seqs:
                    return bucket
        return None


def _size(bucket: Bucket) -> int:
    return bucket.tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step can be at most."""

    requests: int
    tokens: int
    width: int  # columns of a full block table
    page_size: int


def plan_buckets(
    limits: Limits, *, varlen: bool, decode: bool, q_interval: int, kv_interval: int, most: int
) -> list[Bucket]:
    """The shapes to capture, at most `most`, the largest first: the small ones then fit into the memory of the large ones.

    Intervals of 0 stand for the defaults. Where there may be too few for all, decode batches come before mixed ones and
    short contexts before long ones.
    """
    kv_pages = -(-(kv_interval or KV_INTERVAL) // limits.page_size)
    widths = [min(end, limits.width) for end in range(kv_pages, limits.width + kv_pages, kv_pages)]
    mixed = _varlen_sizes(limits, q_interval or Q_INTERVAL) if varlen else []
    single = decode_sizes(limits.requests, max(1, most - len(mixed))) if decode else []
    wanted: list[Bucket] = []
    for width in widths:
        wanted += [Bucket(True, size, size, width) for size in single]
        wanted += [Bucket(False, tokens, seqs, width) for tokens, seqs in mixed]
    return sorted(wanted[:most], key=lambda b: (b.tokens, b.seqs * b.width, b.decode), reverse=True)


def decode_sizes(limit: int, most: int) -> list[int]:
    """1, 2, 4, 8, then by 8 up to `limit`; coarser where that would be more than `most`: by an eighth of the size, so that at
    most an eighth of a batch is padding, or else by doubling."""
    by_eight = [1, 2, 4, *range(8, limit, 8)]
    eighths = [1, 2, 4, 8]
    while eighths[-1] < limit:
        eighths.append(eighths[-1] + max(8, (1 << eighths[-1].bit_length() - 1) // 8))
    doubled = [1 << power for power in range(limit.bit_length())]
    for ladder in (by_eight, eighths, doubled):
        sizes = sorted({size for size in ladder if size < limit} | {limit})
        if len(sizes) <= most:
            return sizes
    return sorted({size for size in doubled if size < limit} | {limit})[:most]


def _varlen_sizes(limits: Limits, interval: int) -> list[tuple[int, int]]:
    """(T, S) of the varlen shapes."""
    ends = range(interval, limits.tokens + interval, interval)[:_VARLEN_SHAPES]
    sizes = [min(end, limits.tokens) for end in ends]
    return [(tokens, min(tokens, limits.requests, _VARLEN_SEQS)) for tokens in sizes]


def pad(
    section: Callable[[str], np.ndarray], bucket: Bucket, *, tokens: int, seqs: int, samples: int, dummy_row: int
) -> None:
    """Fill the rest of a step's model inputs, which has so many tokens, sequences and samples of its own.

    `section(name)` is a section of the packed inputs, int32. Padded sequences have a context of 0 tokens and a block table of
    zeros, which are the reserved blocks; of a decode step they have one token each, else none, and the padded tokens come
    after the last sequence.
    """
    section("token_ids")[tokens:] = 0
    section("positions")[tokens:] = 0
    starts = section("query_starts")
    starts[seqs:] = np.arange(seqs, bucket.seqs + 1) if bucket.decode else tokens
    section("context_lens")[seqs:] = 0
    section("rows")[seqs:] = dummy_row
    section("sample_index")[samples : bucket.seqs] = 0
    section("block_tables").reshape(-1, bucket.seqs, bucket.width)[:, seqs:] = 0


def largest(buckets: Iterable[Bucket], *, decode: bool) -> Bucket | None:
    """The one that takes the most memory on a path."""
    return max((b for b in buckets if b.decode is decode), key=_size, default=None)
