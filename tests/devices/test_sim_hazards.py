"""A right double-buffered loop passes under every seed, and each wrong one is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbengine.devices import Device, InlineDevice, ThreadedDevice
from cbengine.testing import RaceError, SimDevice
from tests.devices.toy_loop import ToyLoop, reference

SEEDS = range(200)

# name: (kind and event of the calls to drop, or the fault planted in the loop; an operation that must be named)
HAZARDS: dict[str, tuple[tuple[str, str] | str, str]] = {
    "compute does not wait for its inputs": (("wait", "inputs_ready"), "copy on transfer"),
    "inputs_ready is not recorded": (("record", "inputs_ready"), "copy on transfer"),
    "no wait before a slot is refilled": (("synchronize", "inputs_read"), "copy on transfer"),
    "no wait before outputs are read": (("synchronize", "done"), "copy on compute"),
    "compute does not wait for the restored page": (("wait", "swapped"), "restore on swap"),
    "a page is restored while steps still write it": ("page returned at once", "forward on compute"),
    "done is recorded before the outputs are copied": ("record too early", "copy on compute"),
}


def _run(seed: int, hazard: tuple[str, str] | str, *, check_races: bool) -> list[list[int]]:
    def drop(kind: str, name: str) -> bool:
        return (kind, name) == hazard

    device = SimDevice(seed, check_races=check_races, drop=drop)
    try:
        return ToyLoop(device, hazard if isinstance(hazard, str) else "").run()
    finally:
        device.close()


@pytest.mark.parametrize("check_races", [True, False])
def test_the_right_loop_passes_under_every_seed(check_races: bool) -> None:
    expected = reference()
    assert [s for s in SEEDS if _run(s, "", check_races=check_races) != expected] == []


@pytest.mark.parametrize("make", [InlineDevice, ThreadedDevice])
def test_the_right_loop_passes_on_the_other_devices(make: Callable[[], Device]) -> None:
    device = make()
    for _ in range(10):
        assert ToyLoop(device).run() == reference()
    device.close()


@pytest.mark.parametrize("hazard", list(HAZARDS))
def test_the_race_check_finds_a_hazard_under_every_seed(hazard: str) -> None:
    planted, operation = HAZARDS[hazard]
    for seed in SEEDS:
        with pytest.raises(RaceError) as raised:
            _run(seed, planted, check_races=True)
        assert operation in (raised.value.first, raised.value.second)


@pytest.mark.parametrize("hazard", list(HAZARDS))
def test_a_hazard_also_shows_as_wrong_tokens(hazard: str) -> None:
    expected = reference()
    planted, _ = HAZARDS[hazard]
    wrong = [seed for seed in SEEDS[:60] if _run(seed, planted, check_races=False) != expected]
    assert len(wrong) >= 10
