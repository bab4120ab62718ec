"""I14: an exception anywhere in a step fails that step's requests and nobody else; a lost device ends the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from cbengine.devices.base import Device, DeviceLostError
from cbengine.devices.inline import InlineDevice
from cbengine.errors import EngineDeadError, RequestFailedError
from cbengine.execution.sampler import sample
from cbengine.execution.worker import dead_error
from cbengine.outputs import FinishReason
from cbengine.scheduling.base import StepPlan
from cbengine.testing import SimDevice
from tests.execution.workload import MEMORY, Workload, make_config, make_model
from tests.support.driver import Driver

DEVICES: dict[str, Callable[[int], Device]] = {
    "sim": lambda seed: SimDevice(seed, memory=MEMORY),
    "inline": lambda seed: InlineDevice(),
}


class Planted(Exception):
    pass


@dataclass
class Fault:
    """Raises at the n-th call of the place where it is planted."""

    countdown: int
    error: Exception = field(default_factory=lambda: Planted("boom"))
    raised: bool = False

    def __call__(self, *_: object) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            self.raised = True
            raise self.error


def _before(owner: Any, name: str, fault: Fault, only: Callable[..., bool] = lambda *_: True) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if only(*args):
            fault()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, fault: Fault) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        fault()
        return result

    setattr(owner, name, wrapped)


PLACES: dict[str, Callable[[Driver, Fault], None]] = {
    "the forward": lambda driver, fault: setattr(driver.model, "fault", fault),
    "before the slot is filled": lambda driver, fault: _before(driver.parts.filler, "fill", fault),
    "after the slot was filled": lambda driver, fault: _after(driver.parts.filler, "fill", fault),
    "queueing the inputs": lambda d, fault: _before(d.device, "copy", fault, lambda s, *_: s.name == "transfer"),
    "queueing the step": lambda driver, fault: _before(
        driver.device, "launch", fault, lambda s, *_: s.name == "compute"
    ),
    "queueing the tokens": lambda d, fault: _before(d.device, "copy", fault, lambda s, *_: s.name == "compute"),
    "recording done": lambda driver, fault: _before(driver.device, "record", fault, lambda e, s: s.name == "compute"),
}
"""Where a fault is planted in a driver; "the sampler" is handed to the driver as it is built."""


def _driver(device: Device, seed: int, place: str, fault: Fault) -> Driver:
    def broken_sampler(*args: Any) -> Any:
        fault()
        return sample(*args)

    sampler = broken_sampler if place == "the sampler" else sample
    driver = Driver(make_model(), device, make_config(seed), sampler)
    if place != "the sampler":
        PLACES[place](driver, fault)
    return driver


class Plans:
    """Remembers whom the steps in flight are for, so that those of the broken one are known."""

    def __init__(self, driver: Driver, fault: Fault) -> None:
        self._driver, self._fault = driver, fault
        self._flight: list[set[int]] = []
        self.broken: set[int] | None = None
        """Requests of the step that broke."""
        parts = driver.parts
        self._plan, self._wait = parts.scheduler.plan, parts.pipeline.wait
        parts.scheduler.plan, parts.pipeline.wait = self._planned, self._waited

    def _planned(self) -> StepPlan:
        plan = self._plan()
        if plan:
            owners = [self._driver.parts.rows.requests[row] for row in plan.rows.tolist()]
            self._flight.append({request.id for request in owners if request is not None})
        return plan

    def _waited(self) -> Any:
        requests = self._flight.pop(0)
        try:
            return self._wait()
        except Planted:
            self.broken = requests
            raise

    def turned(self) -> None:
        """After each turn. A step that broke before it was launched was the newest plan."""
        if self._fault.raised and len(self._flight) > self._driver.parts.pipeline.num_in_flight:
            self.broken = self._flight.pop()


def _check(driver: Driver, plans: Plans, fault: Fault) -> int:
    """Who failed was in the broken step, and everybody else has the right answer. Returns how many failed."""
    failed = [d for d in driver.driven if d.buffer.reason is FinishReason.ERROR]
    for driven in failed:
        error = driven.buffer.error
        assert isinstance(error, RequestFailedError)
        assert error.__cause__ is fault.error
        assert error.request_id == driven.request.label
        assert plans.broken is not None and driven.request.id in plans.broken
    for driven in driver.driven:
        ids = driven.buffer.ids
        assert ids == driven.expected[: len(ids)]
        if driven.buffer.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert ids == driven.expected
        elif driven not in failed:
            assert driven.cancelled
    driver.check_idle()
    return len(failed)


@pytest.mark.parametrize("place", [*PLACES, "the sampler"])
@pytest.mark.parametrize("device", list(DEVICES))
def test_only_the_requests_of_the_broken_step_fail(device: str, place: str) -> None:
    failed = finished = 0
    for seed in range(40 if device == "sim" else 10):
        fault = Fault(random.Random(seed).randint(1, 6))
        driver = _driver(DEVICES[device](seed), seed, place, fault)
        plans = Plans(driver, fault)
        workload = Workload(driver, seed)
        while not workload.done:
            workload.turn()
            plans.turned()
        failed += _check(driver, plans, fault)
        finished += sum(d.buffer.reason in (FinishReason.STOP, FinishReason.LENGTH) for d in driver.driven)
    assert failed > 5 and finished > 5


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("place", [place for place in (*PLACES, "the sampler") if "filled" not in place])
@pytest.mark.parametrize("device", list(DEVICES))
def test_a_lost_device_ends_the_loop(device: str, place: str) -> None:
    lost = DeviceLostError("gone")
    fault = Fault(3, lost)
    driver = _driver(DEVICES[device](0), 0, place, fault)
    healthy = [driver.submit([3, 4, 5], max_new_tokens=6, ignore_eos=True) for _ in range(3)]
    with pytest.raises(DeviceLostError) as raised:
        driver.loop.run()
    assert raised.value is lost
    driver.loop.abandon(lambda label: dead_error(label, lost))
    for driven in healthy:
        assert isinstance(driven.buffer.error, EngineDeadError)
        assert driven.buffer.error.__cause__ is lost
        assert driven.buffer.ids == driven.expected[: len(driven.buffer.ids)]
    assert driver.registry.num_labels == 0


@pytest.mark.parametrize("device", list(DEVICES))
def test_inputs_that_do_not_arrive_end_the_loop(device: str) -> None:
    """The step has then run with the inputs of an older one: it may have written to anybody's pages."""
    error = Planted("the copy broke")
    driver = Driver(make_model(), DEVICES[device](0), make_config(0))
    driven = driver.submit([3, 4, 5], max_new_tokens=6, ignore_eos=True)
    driver.turn()
    copy, launch = driver.device.copy, driver.device.launch

    def broken(stream: Any, dst: Any, src: Any) -> None:
        if stream.name == "transfer":
            launch(stream, lambda: _raise(error), name="copy")
        else:
            copy(stream, dst, src)

    driver.device.copy = broken
    with pytest.raises(DeviceLostError, match="did not reach the device") as raised:
        driver.loop.run()
    assert raised.value.__cause__ is error
    assert driven.buffer.ids == driven.expected[: len(driven.buffer.ids)]
