"""Tile sizes of the attention kernels, chosen for an H200 (132 SMs of 227 KiB shared memory) within an A100's 163 KiB.

Decoding waits for memory: what counts is bytes in flight. 4.8 TB/s times about a microsecond of latency is 36 KB for each
SM. A tile of keys and one of values are 32 KB together; because the addresses of keys come from another load, Triton needs
five stages to keep two tiles in flight (with three or four it is one, as its buffers show), which is 70 KB a program: three
programs on an SM. The query rows are few (the heads of one group, 16 at least for the tensor cores), so four warps do.

Prompts wait for the tensor cores: 128 rows by 64 tokens over eight warps is two of Hopper's warp groups with 64 rows each,
and the accumulator of a head of 128 then takes 64 registers of a thread, and one program an SM's registers. Heads of 256
halve the tokens, not the rows. None of these spills registers on sm_90; on sm_80, where operands of a product
go through registers, heads of 128 and more do, by up to 300 bytes of a thread.

float32 is multiplied by the ordinary units (exact, and what the other backends are compared with); operands of a product
then live in registers, so its tiles are small, and spill 16 bytes at most: it is for checking, not for speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` query rows by `tokens` cached tokens, and how Triton compiles it."""

    rows: int
    tokens: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """As a launch takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# By padded head size, of which the next larger one counts.
_DECODE = {64: Tile(16, 128, 4, 5), 128: Tile(16, 64, 4, 5), 256: Tile(16, 32, 4, 5)}
_VARLEN = {64: Tile(128, 64, 8, 5), 128: Tile(128, 64, 8, 5), 256: Tile(128, 32, 8, 3)}
_DECODE_FLOAT32 = {64: Tile(16, 32, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)}
_VARLEN_FLOAT32 = {64: Tile(32, 32, 4, 2), 128: Tile(32, 16, 8, 2), 256: Tile(16, 16, 8, 2)}

MAX_HEAD_DIM = 256
MERGE = Tile(1, 16, 2, 2)
"""Of the merging kernel, for which `tokens` are splits."""


def power_of_two(n: int) -> int:
    """The smallest that is not less than n."""
    return 1 << (n - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Head size in registers: a power of two, and 16 at least for the tensor cores."""
    return max(16, power_of_two(head_dim))


def decode_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """For `group` query heads of one KV head."""
    return _pick(_DECODE_FLOAT32 if dtype == torch.float32 else _DECODE, head_dim, group)


def varlen_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """For several queries of `group` heads each."""
    return _pick(_VARLEN_FLOAT32 if dtype == torch.float32 else _VARLEN, head_dim, group)


def _pick(table: dict[int, Tile], head_dim: int, group: int) -> Tile:
    dim = padded_dim(head_dim)
    assert dim <= MAX_HEAD_DIM, head_dim
    tile = table[max(64, dim)]
    return Tile(max(tile.rows, power_of_two(group)), tile.tokens, tile.warps, tile.stages)


def splits_for(num_seqs: int, kv_heads: int, tokens: int, multiprocessors: int) -> int:
    """Into how many parts each sequence's `tokens` are cut at most while decoding.

    Enough that two waves of two programs keep every multiprocessor busy, no less than 256 tokens each, and one where there
    are programs enough already: merging costs a launch. Programs in all: fewer than `most_split_programs`.
    """
    programs = num_seqs * kv_heads
    if programs >= 2 * multiprocessors:
        return 1
    return max(1, min(-(-4 * multiprocessors // programs), -(-tokens // 256)))


def most_split_programs(kv_heads: int, multiprocessors: int) -> int:
    """A bound of num_seqs * kv_heads * splits wherever `splits_for` gives more than one."""
    return 6 * multiprocessors + kv_heads
