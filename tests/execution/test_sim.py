"""Random workloads over hundreds of legal device schedules; every invariant by its effect."""

from __future__ import annotations

import pytest

from cbengine.config import EngineConfig
from cbengine.testing import FakeModel, SimDevice
from tests.support.driver import Driver, random_workload

SEEDS = range(200)


def make(seed: int, **overrides: object) -> Driver:
    settings: dict[str, object] = {"page_size": 4, "num_blocks": 24, "max_batch_tokens": 16, "max_requests_per_batch": 4}
    return Driver(FakeModel(), SimDevice(seed), EngineConfig().merged({**settings, **overrides}))


@pytest.mark.parametrize("stop", ["", "hard", "drain"])
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_random_workloads(scheduler: str, stop: str) -> None:
    for seed in SEEDS:
        driver = make(seed, scheduler_type=scheduler)
        random_workload(driver, seed, stop=stop)
        driver.check()


def test_starved_of_pages() -> None:
    preempted = 0
    for seed in SEEDS:
        driver = make(seed, num_blocks=8, safety_margin=0.0)
        random_workload(driver, seed, cancel_share=0.1)
        driver.check()
        preempted += driver.parts.lifecycle.preemptions
    assert preempted > 100
