"""Every kind of cache under churn, over legal device schedules: each answer is the one that the model gives alone."""

from __future__ import annotations

import pytest

from cbengine.cache.prefix import Chain
from cbengine.devices import InlineDevice, ThreadedDevice
from cbengine.testing import SimDevice
from tests.cache.churn import MEMORY, churn, make_driver

LAYERS = {"full": (None, None), "sliding": (6, 6), "hybrid": (None, 5, 5), "uneven": (None, None, 9, 9, 9)}
BLOCKS = {"full": 9, "sliding": 5, "hybrid": 8, "uneven": 9}
SWAP = {"cpu_offload_space": 0.001, "preemption": "swap"}


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_the_prefix_cache_changes_no_token(scheduler: str) -> None:
    found = evicted = preempted = 0
    for seed in range(100):
        driver = make_driver(SimDevice(seed, memory=MEMORY), scheduler_type=scheduler, num_blocks=10)
        sharing = driver.parts.cache.sharing
        assert sharing is not None
        evict = sharing.prefix.evict
        evictions: list[int] = []

        def counted(evict=evict, evictions=evictions) -> int:
            evictions.append(evict())
            return evictions[-1]

        sharing.prefix.evict = counted
        churn(driver, seed)
        found += sharing.prefix.hit_tokens
        evicted += len(evictions)
        preempted += driver.parts.lifecycle.preemptions
    assert found > 500 and evicted > 100 and preempted > 20


def test_a_hash_that_always_collides_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of all sequences have the same key: what is found is compared, and then used or not."""
    monkeypatch.setattr(Chain.__init__, "__defaults__", (None, lambda data: b"the same"))
    found = 0
    for seed in range(15):
        driver = make_driver(SimDevice(seed, memory=MEMORY), num_blocks=10)
        churn(driver, seed)
        assert driver.parts.cache.sharing is not None
        found += driver.parts.cache.sharing.prefix.hit_tokens
    assert found > 0


@pytest.mark.parametrize("layers", LAYERS)
def test_swapped_or_recomputed_the_answers_are_the_same(layers: str) -> None:
    swapped = 0
    for seed in range(40):
        settings = {**SWAP, "preemption": ("swap", "auto")[seed % 2]} if seed % 4 else {}
        driver = make_driver(SimDevice(seed, memory=MEMORY), *LAYERS[layers], num_blocks=BLOCKS[layers], **settings)
        churn(driver, seed)
        swap = driver.parts.cache.swap
        if swap is not None:
            swapped += swap.swaps_in
            assert swap.pool.num_free == swap.pool.capacity
    assert swapped > 5


@pytest.mark.parametrize("layers", LAYERS)
def test_reserved_room_is_never_taken_back(layers: str) -> None:
    for seed in range(30):
        driver = make_driver(SimDevice(seed, memory=MEMORY), *LAYERS[layers], num_blocks=14, admission="reserve")
        churn(driver, seed)
        assert driver.parts.lifecycle.preemptions == 0


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("make", [InlineDevice, ThreadedDevice])
def test_on_the_other_devices(make: type, layers: str) -> None:
    for seed in range(4):
        device = make()
        device.attach()
        churn(make_driver(device, *LAYERS[layers], **SWAP), seed)
        device.close()
