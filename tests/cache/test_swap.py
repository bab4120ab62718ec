"""Offloading: who gives way, what comes back, and that the copies are ordered against the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cbengine.cache.swap import SwapCosts
from cbengine.devices import Device
from cbengine.execution.swapping import BlockMover, BlockTransfer
from cbengine.outputs import RequestStatus
from cbengine.scheduling.request import Request
from cbengine.testing import RaceError, SimDevice
from tests.cache.churn import MEMORY, make_driver
from tests.support.driver import Driver

SWAP: dict[str, Any] = {"cpu_offload_space": 0.001, "preemption": "swap"}


def oversubscribed(seed: int, device: Device | None = None, **settings: object) -> Driver:
    """A cache for one and a half requests, and eight of them."""
    device = device or SimDevice(seed, memory=MEMORY)
    driver = make_driver(device, num_blocks=9, allow_block_sharing=False, **settings)
    for i in range(8):
        driver.submit([2 + i, 3, 4 + i, 5, 6], max_new_tokens=19, ignore_eos=True)
    return driver


@pytest.mark.parametrize("settings", [{}, SWAP], ids=["recomputed", "swapped"])
def test_five_times_oversubscribed(settings: dict[str, Any]) -> None:
    for seed in range(20):
        driver = oversubscribed(seed, **settings)
        _watch_the_oldest(driver)
        computed = idle = 0
        while driver.turn():
            now = driver.parts.committer.tokens + driver.parts.committer.prompt_tokens
            idle = idle + 1 if now == computed else 0
            computed = now
            assert idle < 4, "nothing gets on"
        driver.check()
        assert 0 < driver.parts.lifecycle.preemptions < 60


def _watch_the_oldest(driver: Driver) -> None:
    inner = driver.parts.lifecycle.transition

    def transition(request: Request, to: RequestStatus, *rest: Any) -> None:
        assert to is not RequestStatus.PREEMPTED or request.id > min(driver.parts.requests), "the oldest lost its place"
        inner(request, to, *rest)

    setattr(driver.parts.lifecycle, "transition", transition)  # noqa: B010 - narrower than the method it wraps


def test_what_was_swapped_out_is_not_computed_again() -> None:
    swaps = 0
    for seed in range(20):
        driver = oversubscribed(seed, **SWAP)
        driver.run()
        driver.check()
        swap, lifecycle = driver.parts.cache.swap, driver.parts.lifecycle
        assert swap is not None and swap.swaps_out == swap.swaps_in
        assert lifecycle.preemptions - swap.swaps_out <= 2  # those who had no token yet
        assert driver.parts.committer.prompt_tokens == 8 * 5
        swaps += swap.swaps_out
    assert swaps > 40


def test_a_full_cpu_pool_recomputes() -> None:
    driver = oversubscribed(0, cpu_offload_space=6e-7, preemption="swap")  # five blocks
    driver.run()
    driver.check()
    assert driver.parts.cache.swap is not None
    assert driver.parts.cache.swap.swaps_out < driver.parts.lifecycle.preemptions
    assert driver.parts.committer.prompt_tokens > 8 * 5


@pytest.mark.parametrize("settings", [{}, SWAP], ids=["recomputed", "swapped"])
def test_the_others_go_on_when_those_who_run_are_cancelled(settings: dict[str, Any]) -> None:
    driver = oversubscribed(3, **settings)
    while not driver.parts.lifecycle.preemptions:
        driver.turn()
    for driven in driver.driven:
        if driven.request.status in (RequestStatus.PREFILLING, RequestStatus.DECODING):
            driver.cancel(driven)
    driver.submit([9, 9], max_new_tokens=3)
    driver.run()
    driver.check()
    assert sum(not driven.cancelled for driven in driver.driven) >= 6


def test_swapping_is_weighed_against_computing() -> None:
    costs = SwapCosts()
    assert costs.prefer_swap(1000, 10)  # nothing is known yet
    costs.moved(1000, 1.0)
    costs.computed(100, 1.0)
    assert costs.prefer_swap(1000, 300) and not costs.prefer_swap(1000, 100)
    assert not SwapCosts("recompute").prefer_swap(1, 1000)
    assert SwapCosts("swap", 1.0, 1e9).prefer_swap(1000, 1)


# --- planted hazards ----------------------------------------------------------------------------------------------


def _no_wait_for_the_steps(patch: pytest.MonkeyPatch, dropped: set[tuple[str, str]]) -> None:
    dropped.add(("wait", "steps_before_swap"))


def _steps_do_not_wait(patch: pytest.MonkeyPatch, dropped: set[tuple[str, str]]) -> None:
    dropped.add(("wait", "inputs_ready"))


def _pages_return_before_they_are_copied(patch: pytest.MonkeyPatch, dropped: set[tuple[str, str]]) -> None:
    patch.setattr(BlockTransfer, "done", lambda self: True)


def _on_a_stream_of_their_own(patch: pytest.MonkeyPatch, dropped: set[tuple[str, str]]) -> None:
    inner = BlockMover.__init__

    def init(self: BlockMover, *args: object) -> None:
        inner(self, *args)  # type: ignore[arg-type]
        self._transfer = self._device.stream("swap")

    patch.setattr(BlockMover, "__init__", init)


HAZARDS: dict[str, tuple[Callable[[pytest.MonkeyPatch, set[tuple[str, str]]], None], str]] = {
    "the copy does not wait for the steps": (_no_wait_for_the_steps, "swap out on transfer"),
    "the steps do not wait for the copy": (_steps_do_not_wait, "transfer and step"),
    "pages are handed out before they are copied": (
        _pages_return_before_they_are_copied,
        "swap out on transfer and the host",
    ),
    "the copies are on a stream that nobody waits for": (_on_a_stream_of_their_own, "on swap"),
}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_planted_hazards_are_found(hazard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_as = HAZARDS[hazard]
    dropped: set[tuple[str, str]] = set()
    plant(monkeypatch, dropped)
    found = 0
    for seed in range(30):
        device = SimDevice(seed, memory=MEMORY, drop=lambda kind, name: (kind, name) in dropped)
        try:
            oversubscribed(seed, device, **SWAP).run()
        except RaceError as race:
            found += found_as in str(race)
    assert found > 5
