"""What only real threads can show. Every wait is for an event, so the outcome never depends on speed."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from cbengine.devices import ThreadedDevice

_LONG = 30.0  # seconds after which a test fails instead of hanging


@pytest.fixture
def device() -> Iterator[ThreadedDevice]:
    device = ThreadedDevice()
    yield device
    device.close()


def _wait(gate: threading.Event) -> None:
    if not gate.wait(_LONG):
        raise TimeoutError("the gate was never opened")


def test_the_host_goes_on_while_an_operation_runs(device: ThreadedDevice) -> None:
    stream, done = device.stream("compute"), device.event()
    started, finish = threading.Event(), threading.Event()

    def operation() -> None:
        started.set()
        _wait(finish)

    device.launch(stream, operation)
    device.record(done, stream)
    _wait(started)
    assert not done.query()  # it runs, and here we are
    finish.set()
    done.synchronize()


def test_sleeping_until_a_deadline_or_the_mark(device: ThreadedDevice) -> None:
    stream, done, gate = device.stream("compute"), device.event(), threading.Event()
    done.wait_until(time.perf_counter() + _LONG)  # never recorded
    device.launch(stream, lambda: _wait(gate))
    device.record(done, stream)
    deadline = time.perf_counter() + 0.01
    done.wait_until(deadline)
    assert time.perf_counter() >= deadline and not done.query()
    done.wait_until(deadline)  # in the past
    threading.Timer(0.01, gate.set).start()
    done.wait_until(time.perf_counter() + 10 * _LONG)  # would exceed the test's own timeout
    assert done.query()


def test_what_broke_is_not_raised_by_sleeping(device: ThreadedDevice) -> None:
    stream, done = device.stream("compute"), device.event()
    device.launch(stream, lambda: 1 // 0)
    device.record(done, stream)
    done.wait_until(time.perf_counter() + _LONG)
    with pytest.raises(ZeroDivisionError):
        done.synchronize()


def test_two_streams_run_at_the_same_time(device: ThreadedDevice) -> None:
    meet = threading.Barrier(2, timeout=_LONG)
    events = [device.event(), device.event()]
    for name, event in zip(("compute", "transfer"), events, strict=True):
        device.launch(device.stream(name), meet.wait)
        device.record(event, device.stream(name))
    for event in events:
        event.synchronize()


def test_a_wait_is_for_the_record_that_was_newest_at_the_call(device: ThreadedDevice) -> None:
    first, second = device.stream("first"), device.stream("second")
    event, done = device.event(), device.event()
    gate = threading.Event()
    device.record(event, first)
    device.wait(second, event)
    device.launch(first, lambda: _wait(gate))
    device.record(event, first)  # not what `second` waits for
    device.launch(second, gate.set)  # only this opens the gate
    device.record(done, second)
    done.synchronize()
    event.synchronize()


def test_a_later_record_on_another_stream_does_not_end_an_older_wait(device: ThreadedDevice) -> None:
    slow, quick, waiting = device.stream("slow"), device.stream("quick"), device.stream("waiting")
    event, done, gate, order = device.event(), device.event(), threading.Event(), list[str]()
    device.launch(slow, lambda: _wait(gate))
    device.launch(slow, lambda: order.append("slow"))
    device.record(event, slow)
    device.wait(waiting, event)
    device.launch(waiting, lambda: order.append("waiting"))
    device.record(done, waiting)
    device.record(event, quick)
    event.synchronize()  # the newest: `quick` is through
    assert order == []
    gate.set()
    done.synchronize()
    assert order == ["slow", "waiting"]


def test_streams_are_named_daemon_threads(device: ThreadedDevice) -> None:
    seen: list[threading.Thread] = []
    for name in ("compute", "transfer"):
        device.launch(device.stream(name), lambda: seen.append(threading.current_thread()))
        device.synchronize()
    assert [(t.name, t.daemon) for t in seen] == [("cbengine-compute", True), ("cbengine-transfer", True)]


def test_a_worker_keeps_nothing_while_it_waits_for_work(device: ThreadedDevice) -> None:
    class Payload:
        def run(self) -> None:
            ran.set()

    ran, payload = threading.Event(), Payload()
    gone = weakref.ref(payload)
    device.launch(device.stream("compute"), payload.run)
    _wait(ran)
    del payload
    give_up = time.monotonic() + _LONG
    while gone() is not None and time.monotonic() < give_up:  # until the worker is back at its queue
        time.sleep(0.001)
    assert gone() is None


def test_many_steps_of_a_double_buffer_keep_their_order(device: ThreadedDevice) -> None:
    transfer, compute = device.stream("transfer"), device.stream("compute")
    slots = [[device.host_buffer((64,), torch.int64) for _ in ("inputs", "inside", "outputs")] for _ in range(2)]
    ready, done = [device.event("inputs_ready") for _ in slots], [device.event("done") for _ in slots]
    outputs: list[int] = []
    for step in range(200):
        host, inside, result = slots[step % 2]
        done[step % 2].synchronize()
        if step >= 2:
            assert torch.all(result == result[0])
            outputs.append(int(result[0]))
        host.fill_(step)
        device.copy(transfer, inside, host)
        device.record(ready[step % 2], transfer)
        device.wait(compute, ready[step % 2])
        device.launch(compute, lambda inside=inside: inside.mul_(3))
        device.copy(compute, result, inside)
        device.record(done[step % 2], compute)
    device.synchronize()
    assert outputs == [3 * step for step in range(198)]


@pytest.fixture
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_the_switch_interval_is_low_while_a_device_is_attached(interval: float) -> None:
    first, second = ThreadedDevice(), ThreadedDevice()
    assert sys.getswitchinterval() == interval
    first.attach()
    first.attach()
    second.attach()
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    first.close()
    first.close()
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    second.close()
    assert sys.getswitchinterval() == interval


def test_a_switch_interval_that_somebody_else_set_stays(interval: float) -> None:
    device = ThreadedDevice()
    device.attach()
    sys.setswitchinterval(0.002)
    device.close()
    assert sys.getswitchinterval() == pytest.approx(0.002)
    sys.setswitchinterval(5e-5)
    device = ThreadedDevice()
    device.attach()
    assert sys.getswitchinterval() == pytest.approx(5e-5)  # lower already
    device.close()
    assert sys.getswitchinterval() == pytest.approx(5e-5)


def test_attach_and_close_from_many_threads_restore_the_interval(interval: float) -> None:
    def use() -> None:
        for _ in range(20):
            device = ThreadedDevice()
            device.attach()
            device.close()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == interval


def test_a_device_that_nobody_closed_leaves_nothing(interval: float) -> None:
    device = ThreadedDevice()
    device.attach()
    device.launch(device.stream("compute"), lambda: None)
    device.synchronize()
    thread = next(t for t in threading.enumerate() if t.name == "cbengine-compute")
    del device
    gc.collect()
    thread.join(_LONG)
    assert not thread.is_alive()
    assert sys.getswitchinterval() == interval


def test_num_threads_is_for_the_compute_worker_alone() -> None:
    default = torch.get_num_threads()
    wanted = default + 1
    device = ThreadedDevice(num_threads=wanted)
    seen: dict[str, int] = {}
    for name in ("compute", "transfer"):
        device.launch(device.stream(name), lambda name=name: seen.update({name: torch.get_num_threads()}))
        device.synchronize()
    device.close()
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == {"compute": wanted, "transfer": default}
    assert (fresh, torch.get_num_threads()) == ([default], default)
    with pytest.raises(ValueError, match="num_threads"):
        ThreadedDevice(num_threads=0)
