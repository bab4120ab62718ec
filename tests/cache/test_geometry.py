"""How the pool is cut, what the cache refuses, and how much it takes."""

from __future__ import annotations

import pytest
import torch

from cbengine import EngineConfig, UnsupportedFeatureError
from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry, block_views, group_of_layers, layer_views
from cbengine.cache.manager import longest_alone
from cbengine.devices import InlineDevice
from cbengine.models.base import LayerSpec, ModelSpec
from cbengine.testing import FakeModel, SimDevice
from tests.cache.churn import MEMORY, make_driver
from tests.support.driver import Driver


def spec(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("probe", layers, 2, 8, 16, 50, 64, torch.float32, 0, (), {})


def full(heads: int = 1, window: int | None = None) -> LayerSpec:
    return LayerSpec("full_attention", heads, 2, window)


def sliding(window: int | None, heads: int = 1) -> LayerSpec:
    return LayerSpec("sliding_attention", heads, 2, window)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((full(), LayerSpec("chunked_attention", 1, 2)), "chunked_attention"),
        ((full(), LayerSpec("linear_attention", 1, 2)), "linear_attention"),
        ((full(1), full(2)), "different KV heads"),
        ((full(), sliding(4, heads=2)), "different KV heads"),
        ((sliding(4), sliding(8)), "windows"),
        ((sliding(None), full()), "windows"),
        ((full(window=8),), "with a window"),
    ],
)
def test_what_is_refused_is_named(layers: tuple[LayerSpec, ...], said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said) as raised:
        CacheGeometry.of(spec(*layers), 16)
    assert "probe" in str(raised.value) and ("supported" in str(raised.value) or "serves" in str(raised.value))


def test_pages_under_four_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4, got 3"):
        CacheGeometry.of(spec(full()), 3)
    with pytest.raises(ValueError, match="page_size"):
        EngineConfig(page_size=3)


def test_blocks_of_both_types_tile_a_chunk() -> None:
    layers = (full(), sliding(8), sliding(8), sliding(8), full())
    geometry = CacheGeometry.of(spec(*layers), 4)
    page = 2 * 4 * 2 * 4
    assert geometry.group_block_bytes == (2 * page, 3 * page) and geometry.chunk_bytes == 6 * page
    assert geometry.blocks_per_chunk == (3, 2) and group_of_layers(layers) == (0, 1, 1, 1, 0)
    pool = torch.zeros(5 * geometry.chunk_bytes, dtype=torch.uint8)
    views = layer_views(pool, geometry)
    for layer, (key, value) in enumerate(views):
        assert key.shape == value.shape == ((15, 10)[group_of_layers(layers)[layer]], 4, 1, 2)
    # Every byte of a group's blocks belongs to exactly one layer's K or V.
    for group in (0, 1):
        pool.zero_()
        for layer, views_of_layer in enumerate(views):
            if group_of_layers(layers)[layer] == group:
                for part in views_of_layer:
                    part += 1
        assert (pool.view(torch.float32) == 1).all()
    assert [view.shape for view in block_views(pool, geometry)] == [(15, 2 * page), (10, 3 * page)]


def test_the_longest_sequence_is_what_fits_alone() -> None:
    plain = CacheGeometry.of(spec(full(), full()), 4)
    assert longest_alone(plain, 10, 64) == 40
    window = CacheGeometry.of(spec(sliding(8)), 4)
    assert longest_alone(window, 4, 1000) == 1000  # four pages hold a window wherever it lies
    assert longest_alone(window, 2, 1000) == 8
    mixed = CacheGeometry.of(spec(full(), sliding(8), sliding(8), sliding(8)), 4)
    assert longest_alone(mixed, 10, 1000) == (10 - 4) * 3 * 4


def test_a_window_keeps_its_size_however_long_the_sequence() -> None:
    """Pure sliding: the same few pages for 400 tokens as for 40. Prefilled in pieces, then decoded."""
    driver = make_driver(SimDevice(1, memory=MEMORY), 9, 9, num_blocks=8, max_batch_tokens=6)
    driver.submit([2 + i % 20 for i in range(150)], max_new_tokens=250, ignore_eos=True)
    most = 0
    while driver.turn():
        most = max(most, driver.parts.cache.usage().used)
    driver.check()
    assert 3 <= most <= -(-(9 + 2 * 6) // 4) + 1


def test_a_hybrid_takes_the_pages_that_its_geometry_predicts() -> None:
    windows = (None, 40, 40, 40)
    model = FakeModel(windows=windows, max_model_len=5000)
    driver = make_driver(SimDevice(1, memory=MEMORY), *windows, num_blocks=200)
    assert driver.model.spec.max_model_len < model.spec.max_model_len
    driver.submit([2 + i % 20 for i in range(490)], max_new_tokens=10, ignore_eos=True)
    seen = []
    while driver.turn():
        for row in range(driver.parts.rows.capacity):
            if driver.parts.rows.requests[row] is not None and driver.parts.rows.known[row] > 492:
                seen.append(driver.parts.cache.held(row))
    driver.check()
    assert seen and all(held[0] in (124, 125) and held[1] <= 40 // 4 + 2 for held in seen)


def test_a_hybrid_of_4000_tokens_takes_the_pages_that_its_geometry_predicts() -> None:
    """Gemma 3's layers: of six one with full attention, which keeps everything; the others keep their window of 512."""
    model = FakeModel(windows=(512, 512, 512, 512, 512, None), max_model_len=4096)
    config = EngineConfig(page_size=32, num_blocks=200, max_batch_tokens=512, max_requests_per_batch=2)
    driver = Driver(model, InlineDevice(), config)
    driver.submit([2 + i % 90 for i in range(4000)], max_new_tokens=40, ignore_eos=True)
    cache, rows, seen = driver.parts.cache, driver.parts.rows, []
    ratio = cache.geometry.blocks_per_chunk
    assert [group.kind for group in cache.geometry.groups] == ["full_attention", "sliding_attention"] and ratio == (
        5,
        1,
    )
    while driver.turn():
        row = next((row for row, request in enumerate(rows.requests) if request is not None), None)
        if row is not None and rows.computed[row] >= 4000:
            computed = int(rows.computed[row])
            # Committed tokens leave the window; pages reach up to the token that is computed next.
            first, ends = (computed - 512) // 32, (-(-computed // 32), -(-(computed + 1) // 32))
            full, window = cache.held(row)
            seen.append(full in ends and first + window in ends and cache.usage().used == -(-full // 5) + window)
    driver.check()
    assert len(seen) > 30 and all(seen)


def test_a_model_that_slides_has_no_prefix_cache_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "cbengine"):
        assert make_driver(SimDevice(0, memory=MEMORY), None, 8).parts.cache.sharing is None
    assert "no prefix cache" in caplog.text and "sliding window" in caplog.text
    assert make_driver(SimDevice(0, memory=MEMORY)).parts.cache.sharing is not None
    assert make_driver(SimDevice(0, memory=MEMORY), allow_block_sharing=False).parts.cache.sharing is None


@pytest.mark.parametrize("windows", [(None, None), (8, 8), (None, 8, 8, 8)])
@pytest.mark.parametrize("space", [0.0, 0.01])
def test_the_plan_is_what_is_allocated(windows: tuple[int | None, ...], space: float) -> None:
    driver = make_driver(
        SimDevice(0, memory=MEMORY),
        *windows,
        num_blocks=500,
        max_batch_tokens=256,
        max_requests_per_batch=64,
        cpu_offload_space=space,
    )
    plan, parts, pool = driver.built.memory, driver.parts, driver.built.pool
    assert plan.kv_bytes == pool.nbytes and pool.nbytes % RESERVED_CHUNKS == 0
    assert plan.slot_bytes == pytest.approx(parts.pipeline.nbytes, rel=0.05)
    assert plan.bookkeeping_bytes == pytest.approx(parts.rows.nbytes + parts.cache.nbytes, rel=0.05)
    swap = parts.cache.swap
    assert plan.offload_bytes == (0 if swap is None else swap.num_chunks * swap.geometry.chunk_bytes)
    assert bool(swap) == bool(space)
