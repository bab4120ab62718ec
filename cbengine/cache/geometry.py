"""How the cache is cut up: pages, blocks and chunks.

page   `page_size` tokens of one layer: K rows, then V rows
block  one page for each layer of one attention type (a *group* of layers): the unit that a block table names
chunk  the unit of the flat pool: the smallest number of bytes that whole blocks of every group tile without a rest. Block b
       of a group lies at byte b * (bytes of its blocks), so a chunk is either one group's or another's, and always whole
       blocks. A model with one attention type has chunks of one block.

The first two chunks are never handed out: block 0 of every group is what padded sequences read and the filler of block
tables, block 1 is where padded tokens write. (The idea of tiling one pool is that of transformers' paged cache.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cbengine.errors import UnsupportedFeatureError
from cbengine.models.base import LayerSpec, ModelSpec

RESERVED_CHUNKS = 2
READ_BLOCK = 0
WRITE_BLOCK = 1
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = (FULL, SLIDING)
"""The attention types that the cache has an allocator for, in the order of their groups."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """All layers of one attention type."""

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None

    def block_bytes(self, page_size: int, itemsize: int) -> int:
        return 2 * len(self.layers) * page_size * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The cut for one model: built once, at start."""

    page_size: int
    dtype: torch.dtype
    groups: tuple[LayerGroup, ...]
    chunk_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole-model block: what `num_blocks` counts."""
        return sum(self.group_block_bytes)

    @property
    def group_block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        return tuple(g.block_bytes(self.page_size, self.dtype.itemsize) for g in self.groups)

    @property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        """For each group, how many of its blocks tile a chunk."""
        return tuple(self.chunk_bytes // size for size in self.group_block_bytes)

    def chunks_for(self, num_blocks: int) -> int:
        """Chunks that hold the bytes of `num_blocks` whole-model blocks; at least one for each group."""
        return max(len(self.groups), -(-num_blocks * self.block_bytes // self.chunk_bytes))

    @staticmethod
    def of(spec: ModelSpec, page_size: int) -> CacheGeometry:
        """Raises `UnsupportedFeatureError` for attention types or KV layouts that the cache has no allocator for."""
        if page_size < 4:
            raise ValueError(f"page_size must be at least 4, got {page_size}")
        _check(spec)
        kinds = [kind for kind in KINDS if any(layer.kind == kind for layer in spec.layers)]
        groups = tuple(_group(kind, spec.layers) for kind in kinds)
        sizes = [group.block_bytes(page_size, spec.kv_dtype.itemsize) for group in groups]
        return CacheGeometry(page_size, spec.kv_dtype, groups, math.lcm(*sizes))

    def blocks_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_size)


def group_of_layers(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """For each layer the index of its group in `CacheGeometry.groups`, which is that of its block table in a step."""
    kinds = [kind for kind in KINDS if any(layer.kind == kind for layer in layers)]
    return tuple(kinds.index(layer.kind) for layer in layers)


def _check(spec: ModelSpec) -> None:
    found = sorted({layer.kind for layer in spec.layers} - set(KINDS))
    if found or not spec.layers:
        raise UnsupportedFeatureError(
            f"{spec.name} has layers of type {', '.join(found) or '(none)'}; the cache serves {' and '.join(KINDS)} layers"
        )
    layouts = sorted({(layer.num_kv_heads, layer.head_dim) for layer in spec.layers})
    if len(layouts) != 1:
        raise UnsupportedFeatureError(
            f"{spec.name} has layers with different KV heads (heads, head size): {layouts}; one layout for all layers is "
            "supported"
        )
    windows = {layer.window for layer in spec.layers if layer.kind == SLIDING}
    if len(windows) > 1 or any(not window or window < 1 for window in windows):
        raise UnsupportedFeatureError(
            f"{spec.name} has sliding_attention layers with windows {sorted(map(str, windows))}; one window of at least 1 "
            "token for all of them is supported"
        )
    if any(layer.window is not None for layer in spec.layers if layer.kind == FULL):
        raise UnsupportedFeatureError(
            f"{spec.name} has full_attention layers with a window; a window is supported in sliding_attention layers"
        )


def _group(kind: str, layers: tuple[LayerSpec, ...]) -> LayerGroup:
    members = tuple(i for i, layer in enumerate(layers) if layer.kind == kind)
    first = layers[members[0]]
    return LayerGroup(kind, members, first.num_kv_heads, first.head_dim, first.window)


def block_views(pool: torch.Tensor, geometry: CacheGeometry) -> list[torch.Tensor]:
    """The flat pool as blocks of each group: uint8 [blocks, bytes of a block], all over the same bytes.

    `pool`: uint8 [num_chunks * chunk_bytes].
    """
    return [pool.view(-1, size) for size in geometry.group_block_bytes]


def layer_views(pool: torch.Tensor, geometry: CacheGeometry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the flat pool into K and V of each layer: views [num_blocks of its group, page_size, num_kv_heads, head_dim].

    `pool`: uint8 [num_chunks * chunk_bytes].
    """
    views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in geometry.groups:
        shape = (-1, 2 * len(group.layers), geometry.page_size, group.num_kv_heads, group.head_dim)
        blocks = pool.view(geometry.dtype).view(shape)
        for i, layer in enumerate(group.layers):
            views[layer] = (blocks[:, 2 * i], blocks[:, 2 * i + 1])
    return [views[layer] for layer in sorted(views)]
