"""How the cache is cut up: pages, blocks and chunks.

page   `page_size` tokens of one layer: K rows, then V rows
block  one page for each layer of one attention type: the unit that a block table names
chunk  the unit of the flat pool. With one attention type, a chunk is a block (rounded up to the alignment).

The first two chunks are never handed out: chunk 0 is what padded sequences read and the filler of block tables, chunk 1
is where padded tokens write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cbengine.errors import UnsupportedFeatureError
from cbengine.models.base import LayerSpec, ModelSpec

RESERVED_CHUNKS = 2
READ_BLOCK = 0
WRITE_BLOCK = 1
_ALIGNMENT = 128  # bytes; keeps every block aligned for vector loads and for copies


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
        return sum(g.block_bytes(self.page_size, self.dtype.itemsize) for g in self.groups)

    @staticmethod
    def of(spec: ModelSpec, page_size: int) -> CacheGeometry:
        """Raises `UnsupportedFeatureError` for attention types or KV layouts that the cache has no allocator for."""
        if page_size < 4:
            raise ValueError(f"page_size must be at least 4, got {page_size}")
        kinds = {layer.kind for layer in spec.layers}
        if kinds != {"full_attention"}:
            raise UnsupportedFeatureError(
                f"{spec.name} has layers of type {', '.join(sorted(kinds))}; the cache serves models whose layers are all "
                "full_attention"
            )
        layouts = {(layer.num_kv_heads, layer.head_dim) for layer in spec.layers}
        if len(layouts) != 1:
            raise UnsupportedFeatureError(
                f"{spec.name} has layers with different KV heads (heads, head size): {sorted(layouts)}; one layout for "
                "all layers is supported"
            )
        group = _group("full_attention", spec.layers)
        size = group.block_bytes(page_size, spec.kv_dtype.itemsize)
        return CacheGeometry(page_size, spec.kv_dtype, (group,), -(-size // _ALIGNMENT) * _ALIGNMENT)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_size)


def _group(kind: str, layers: tuple[LayerSpec, ...]) -> LayerGroup:
    members = tuple(i for i, layer in enumerate(layers) if layer.kind == kind)
    first = layers[members[0]]
    return LayerGroup(kind, members, first.num_kv_heads, first.head_dim, first.window)


def layer_views(pool: torch.Tensor, geometry: CacheGeometry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the flat pool into K and V of each layer: views [num_chunks, page_size, num_kv_heads, head_dim].

    `pool`: uint8 [num_chunks * chunk_bytes].
    """
    views: list[tuple[torch.Tensor, torch.Tensor]] = []
    (group,) = geometry.groups
    page = geometry.page_size * group.num_kv_heads * group.head_dim
    chunks = pool.view(geometry.dtype).view(-1, geometry.chunk_bytes // geometry.dtype.itemsize)
    for i in range(len(group.layers)):
        k, v = (
            chunks[:, (2 * i + which) * page : (2 * i + which + 1) * page].unflatten(
                1, (geometry.page_size, group.num_kv_heads, group.head_dim)
            )
            for which in (0, 1)
        )
        views.append((k, v))
    return views
