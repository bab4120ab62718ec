"""The invariants I1 to I13 over random workloads and hundreds of legal device schedules.

Each run looks at all of them: `Witness` and `DirectPort` name the invariant that they hold, the device finds whatever is
not ordered, and every answer is compared with the one that is known. `test_hazards.py` shows that these checks bite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cbengine.devices import Device, InlineDevice, ThreadedDevice
from cbengine.errors import RequestFailedError
from cbengine.execution.batch import Filled
from cbengine.outputs import FinishReason
from cbengine.testing import SimDevice
from tests.execution.host_reads import HostReads
from tests.execution.witness import Witness
from tests.execution.workload import MEMORY, Workload, make_driver

SEEDS = range(200)


def _run(device: Device, seed: int, stop: str = "", **overrides: object) -> Witness:
    driver = make_driver(device, seed, **overrides)
    witness = Witness(driver)
    try:
        Workload(driver, seed, stop=stop).run()
        witness.raise_first()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return witness


@pytest.mark.parametrize("stop", ["", "hard", "drain"])
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_the_invariants_hold(scheduler: str, stop: str) -> None:
    seeds = SEEDS[::2] if stop == "drain" else SEEDS
    runs = [_run(SimDevice(seed, memory=MEMORY), seed, stop, scheduler_type=scheduler) for seed in seeds]
    # The workload gets to the places that matter.
    assert sum(run.speculated for run in runs) > 50
    assert sum(run.parts.lifecycle.preemptions for run in runs) > 5
    assert sum(run.driver.pauses_heard for run in runs) > 20
    assert sum(driven.request.cached_tokens for run in runs for driven in run.driver.driven) > 100


@pytest.mark.parametrize("make", [InlineDevice, ThreadedDevice])
def test_the_invariants_hold_on_the_other_devices(make: Callable[[], Device]) -> None:
    for seed in range(30):
        device = make()
        device.attach()
        _run(device, seed, ("", "hard", "drain")[seed % 3])
        device.close()


def test_the_host_reads_no_device_tensor() -> None:
    """I13: outside of operations nothing looks into device memory; tokens come through the pinned outputs alone."""
    for seed in SEEDS[:84]:  # with two slots, a configuration comes back after 24 seeds (see `make_config`)
        device = SimDevice(seed, memory=MEMORY)
        guard = HostReads(device)
        driver = make_driver(device, seed)
        with guard:
            Workload(driver, seed).run()
        assert guard.found == []


def test_a_host_read_of_a_device_tensor_is_found() -> None:
    device = SimDevice(0, memory=MEMORY)
    guard = HostReads(device)
    driver = make_driver(device, 0)
    commit = driver.parts.committer.commit

    def peek(filled: Filled, outputs: np.ndarray) -> None:
        driver.parts.pipeline.last_token.tolist()
        commit(filled, outputs)

    driver.parts.committer.commit = peek
    with guard:
        Workload(driver, 0).run()
    assert set(guard.found) == {"tolist"}


def test_a_request_that_can_never_run_fails_alone() -> None:
    """I5. Admission refuses such a request at the call; here it comes in all the same."""
    driver = make_driver(SimDevice(0, memory=MEMORY), 0, num_blocks=4)
    before = driver.submit([2, 3, 4], max_new_tokens=5, ignore_eos=True)
    never = driver.submit([5] * 16, max_new_tokens=1)
    after = driver.submit([6, 7], max_new_tokens=5, ignore_eos=True)
    driver.run()
    assert isinstance(never.buffer.error, RequestFailedError)
    assert "can never be scheduled: it needs 5 blocks and 4 of 4 are free" in str(never.buffer.error)
    assert before.buffer.ids == before.expected and after.buffer.ids == after.expected
    driver.check_idle()


@pytest.mark.parametrize("others", ["pages", "places"])
def test_a_slow_reader_holds_nobody_up(others: str) -> None:
    """Requests that wait for their reader give way when others wait for their pages or their places in the batch."""
    blocks = 4 if others == "pages" else 40
    driver = make_driver(SimDevice(0, memory=MEMORY), 0, num_blocks=blocks, safety_margin=0.0)
    slow = [driver.submit([2, 3, 4], max_new_tokens=9, ignore_eos=True, unread=1) for _ in range(3)]
    quick = [driver.submit([6, 7, i], max_new_tokens=9, ignore_eos=True) for i in range(2, 5)]
    driver.run()
    assert [d.buffer.ids for d in quick] == [d.expected for d in quick]
    assert all(d.alive and 1 <= len(d.buffer.ids) <= 3 for d in slow)
    while any(d.alive for d in slow):
        for driven in slow:
            driven.buffer.advance(len(driven.buffer.ids))
        driver.run()
    assert {d.buffer.reason for d in slow} == {FinishReason.LENGTH}
    driver.check()


def test_a_reader_that_leaves_while_it_is_waited_for() -> None:
    driver = make_driver(SimDevice(0, memory=MEMORY), 0)
    slow = driver.submit([2, 3, 4], max_new_tokens=9, ignore_eos=True, unread=2)
    driver.run()
    assert slow.alive and driver.parts.rows.num_held == 1
    driver.cancel(slow)
    driver.run()
    driver.check()
