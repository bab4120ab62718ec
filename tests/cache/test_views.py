"""How the cache is cut up, and that no two layers ever touch the same bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry, layer_views
from cbengine.models.base import LayerSpec, ModelSpec
from cbengine.testing import FakeModel

FULL = LayerSpec("full_attention", 2, 8)
SLIDING = LayerSpec("sliding_attention", 2, 8, window=10)

# Layers and dtype: one layer, several, 16-bit, an odd layout, and hybrids whose two groups tile the same bytes.
LAYOUTS: dict[str, tuple[tuple[LayerSpec, ...], torch.dtype]] = {
    "one layer": ((FULL,), torch.float32),
    "three layers": ((FULL,) * 3, torch.float32),
    "bfloat16": ((FULL,) * 2, torch.bfloat16),
    "odd": ((LayerSpec("full_attention", 3, 5),) * 3, torch.float32),
    "hybrid": ((SLIDING, FULL, SLIDING, SLIDING, FULL), torch.float32),
    "windows alone": ((SLIDING,) * 2, torch.float32),
}
layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


def make_spec(layers: tuple[LayerSpec, ...], dtype: torch.dtype = torch.float32) -> ModelSpec:
    return dataclasses.replace(FakeModel().spec, layers=layers, kv_dtype=dtype)


def _geometry(layout: str, page_size: int = 4) -> CacheGeometry:
    return CacheGeometry.of(make_spec(*LAYOUTS[layout]), page_size)


def test_the_bytes_of_a_page_and_of_a_block() -> None:
    """A page holds K and V of `page_size` tokens of one layer, a block one page for each layer."""
    layers = (LayerSpec("full_attention", 3, 64),) * 30  # SmolLM2-135M
    geometry = CacheGeometry.of(make_spec(layers), 256)
    page = 2 * 256 * 3 * 64 * 4
    assert geometry.block_bytes == geometry.chunk_bytes == 30 * page
    assert CacheGeometry.of(make_spec(layers, torch.bfloat16), 256).block_bytes == 15 * page


@layouts
def test_whole_blocks_of_every_group_tile_a_chunk(layout: str) -> None:
    geometry = _geometry(layout)
    sizes = [group.block_bytes(geometry.page_size, geometry.dtype.itemsize) for group in geometry.groups]
    assert all(geometry.chunk_bytes % size == 0 for size in sizes)
    assert geometry.block_bytes == sum(sizes)
    layers = sorted(layer for group in geometry.groups for layer in group.layers)
    assert layers == list(range(len(LAYOUTS[layout][0])))


def test_the_pages_of_a_sequence() -> None:
    geometry = _geometry("one layer", page_size=16)
    assert [geometry.blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


@layouts
def test_views_have_a_page_for_each_block(layout: str) -> None:
    geometry, chunks = _geometry(layout), 5
    pool = torch.zeros(chunks * geometry.chunk_bytes, dtype=torch.uint8)
    for layer, (spec, views) in enumerate(zip(LAYOUTS[layout][0], layer_views(pool, geometry), strict=True)):
        (group,) = (group for group in geometry.groups if layer in group.layers)
        blocks = len(pool) // group.block_bytes(geometry.page_size, geometry.dtype.itemsize)
        for view in views:
            assert view.shape == (blocks, geometry.page_size, spec.num_kv_heads, spec.head_dim)
            assert view.dtype == geometry.dtype and view.stride()[2:] == (spec.head_dim, 1)
            assert view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()


@layouts
def test_the_views_of_a_group_do_not_overlap_and_leave_nothing_out(layout: str) -> None:
    """Write distinct values everywhere, then read everything back."""
    geometry = _geometry(layout)
    pool = torch.zeros(3 * geometry.chunk_bytes, dtype=torch.uint8)
    every = layer_views(pool, geometry)
    for group in geometry.groups:
        pool.zero_()
        views = [view for layer in group.layers for view in every[layer]]
        for number, view in enumerate(views, 1):
            view.copy_(_values(number, view))
        for number, view in enumerate(views, 1):
            assert torch.equal(view, _values(number, view))
        assert (pool.view(geometry.dtype) != 0).all()


def _values(number: int, view: torch.Tensor) -> torch.Tensor:
    """Numbers that differ between views and, where the dtype has room for it, between entries; never 0."""
    if view.dtype == torch.bfloat16:
        return torch.full(view.shape, float(number), dtype=view.dtype)
    return (torch.arange(view.numel()) * 64 + number).to(view.dtype).view(view.shape)


def test_groups_share_bytes_only_where_their_blocks_share_a_chunk() -> None:
    geometry = _geometry("hybrid")
    pool = torch.zeros(6 * geometry.chunk_bytes, dtype=torch.uint8)
    views = layer_views(pool, geometry)
    for group in geometry.groups:
        per_chunk = geometry.chunk_bytes // group.block_bytes(geometry.page_size, geometry.dtype.itemsize)
        pool.zero_()
        for layer in group.layers:
            for view in views[layer]:
                view[3 * per_chunk : 4 * per_chunk] = 1.0  # the blocks of chunk 3
        written = pool.view(6, -1).any(1).tolist()
        assert written == [False, False, False, True, False, False]


def test_reserved_blocks_are_the_first_of_every_group() -> None:
    """Block 0 is what padding reads, block 1 where it writes: both lie in chunks that are never handed out."""
    for layout in LAYOUTS:
        geometry = _geometry(layout)
        for group in geometry.groups:
            size = group.block_bytes(geometry.page_size, geometry.dtype.itemsize)
            assert 2 * size <= RESERVED_CHUNKS * geometry.chunk_bytes
