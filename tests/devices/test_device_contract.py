"""The contract of `cbengine.devices.base`, on every device that runs on a CPU, and on the CUDA device over a stand-in."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from cbengine.devices import Device, DeviceLostError, InlineDevice, ThreadedDevice
from cbengine.devices.cuda import CudaDevice
from cbengine.testing import SimDevice
from tests.devices.fake_cuda import FakeCuda

_FACTORIES: dict[str, Callable[[], Device]] = {
    "inline": InlineDevice,
    "threaded": ThreadedDevice,
    "sim-lazy": lambda: SimDevice(1, eagerness=0.0),
    "sim-mixed": lambda: SimDevice(2, eagerness=0.5),
    "sim-eager": lambda: SimDevice(3, eagerness=0.95),
    "cuda": lambda: CudaDevice(runtime=FakeCuda()),
}


@pytest.fixture(params=list(_FACTORIES))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = _FACTORIES[request.param]()
    device.attach()
    yield device
    device.close()


class Planted(Exception):
    pass


def _raise(error: BaseException) -> Callable[[], None]:
    def planted_operation() -> None:
        raise error

    return planted_operation


def test_a_stream_runs_in_launch_order(device: Device) -> None:
    stream, done = device.stream("compute"), device.event("done")
    ran: list[int] = []
    for i in range(20):
        device.launch(stream, lambda i=i: ran.append(i))
    device.record(done, stream)
    done.synchronize()
    assert ran == list(range(20))


def test_streams_are_ordered_by_events(device: Device) -> None:
    transfer, compute = device.stream("transfer"), device.stream("compute")
    inputs_ready, done = device.event("inputs_ready"), device.event("done")
    source, result = (device.host_buffer((4,), torch.int64) for _ in range(2))
    inside = device.device_buffer((4,), torch.int64)
    source.copy_(torch.arange(4))
    device.copy(transfer, inside, source)
    device.record(inputs_ready, transfer)
    device.wait(compute, inputs_ready)
    device.launch(compute, lambda: inside.mul_(10), reads=(inside,), writes=(inside,))
    device.copy(compute, result, inside)
    device.record(done, compute)
    done.synchronize()
    assert result.tolist() == [0, 10, 20, 30]


def test_a_copy_of_another_shape_is_reported_by_the_span(device: Device) -> None:
    stream, done = device.stream("transfer"), device.event()
    device.copy(stream, device.device_buffer((4,), torch.int64), device.host_buffer((3,), torch.int64))
    device.record(done, stream)
    with pytest.raises(RuntimeError):
        done.synchronize()


def test_an_event_that_was_never_recorded_holds_nothing_back(device: Device) -> None:
    stream, never, done = device.stream("compute"), device.event("never"), device.event("done")
    assert never.query()
    never.synchronize()
    ran: list[str] = []
    device.wait(stream, never)
    device.launch(stream, lambda: ran.append("op"))
    device.record(done, stream)
    done.synchronize()
    assert ran == ["op"]


def test_synchronize_waits_for_the_newest_record(device: Device) -> None:
    stream, event = device.stream("compute"), device.event()
    ran: list[int] = []
    for i in range(5):
        device.launch(stream, lambda i=i: ran.append(i))
        device.record(event, stream)
    event.synchronize()
    assert ran == [0, 1, 2, 3, 4]
    event.synchronize()  # still reached
    assert event.query()


def test_an_event_can_be_recorded_on_one_stream_after_the_other(device: Device) -> None:
    first, second, event = device.stream("first"), device.stream("second"), device.event()
    ran: list[str] = []
    device.launch(first, lambda: ran.append("first"))
    device.record(event, first)
    event.synchronize()
    device.wait(second, event)
    device.launch(second, lambda: ran.append("second"))
    device.record(event, second)
    event.synchronize()
    assert ran == ["first", "second"]


def test_query_becomes_true_without_a_synchronize(device: Device) -> None:
    stream, done, ran = device.stream("compute"), device.event(), threading.Event()
    for _ in range(10):
        device.launch(stream, lambda: None)
    device.launch(stream, ran.set)
    device.record(done, stream)
    while not done.query():
        ran.wait(0.01)
    assert ran.is_set()


def test_an_error_ends_its_span_and_no_other(device: Device) -> None:
    compute, transfer = device.stream("compute"), device.stream("transfer")
    before, broken, after, other = (device.event(name) for name in ("before", "broken", "after", "other"))
    error, ran = Planted("boom"), list[str]()
    device.launch(compute, lambda: ran.append("before"))
    device.record(before, compute)
    device.launch(compute, lambda: ran.append("same span"))
    device.launch(compute, _raise(error))
    device.launch(compute, lambda: ran.append("skipped"))
    device.launch(transfer, lambda: ran.append("neighbour"))
    device.record(other, transfer)
    device.wait(compute, other)
    device.launch(compute, _raise(Planted("a skipped operation raises nothing")))
    device.record(broken, compute)
    device.launch(compute, lambda: ran.append("after"))
    device.record(after, compute)
    after.synchronize()
    before.synchronize()
    other.synchronize()
    assert sorted(ran) == ["after", "before", "neighbour", "same span"]
    assert broken.query()
    with pytest.raises(Planted) as raised:
        broken.synchronize()
    assert raised.value is error


def test_an_error_is_reported_once(device: Device) -> None:
    stream, done = device.stream("compute"), device.event()
    device.launch(stream, _raise(Planted()))
    device.record(done, stream)
    with pytest.raises(Planted):
        done.synchronize()
    done.synchronize()
    device.record(done, stream)
    done.synchronize()


def test_a_wait_orders_but_passes_no_error_on(device: Device) -> None:
    swap, compute = device.stream("swap"), device.stream("compute")
    swapped, done = device.event("swapped"), device.event("done")
    ran: list[str] = []
    device.launch(swap, _raise(Planted()))
    device.record(swapped, swap)
    device.wait(compute, swapped)
    device.launch(compute, lambda: ran.append("compute"))
    device.record(done, compute)
    done.synchronize()
    assert ran == ["compute"]
    with pytest.raises(Planted):
        swapped.synchronize()


def test_a_newer_record_hides_an_older_error(device: Device) -> None:
    stream, done = device.stream("compute"), device.event()
    device.launch(stream, _raise(Planted()))
    device.record(done, stream)
    device.record(done, stream)
    done.synchronize()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["KeyboardInterrupt", "SystemExit"])
def test_no_kind_of_exception_ends_a_stream(device: Device, error: BaseException) -> None:
    stream, done = device.stream("compute"), device.event()
    device.launch(stream, _raise(error))
    device.record(done, stream)
    with pytest.raises(type(error)):
        done.synchronize()
    ran: list[str] = []
    device.launch(stream, lambda: ran.append("next"))
    device.record(done, stream)
    done.synchronize()
    assert ran == ["next"]


def test_the_traceback_of_an_error_starts_in_the_operation(device: Device) -> None:
    stream, done = device.stream("compute"), device.event()
    device.launch(stream, _raise(Planted()))
    device.record(done, stream)
    with pytest.raises(Planted) as raised:
        done.synchronize()
    names = [entry.name for entry in raised.traceback]
    assert names[-1] == "planted_operation"
    assert "run_operation" not in names


def test_synchronize_empties_every_stream_and_reports_nothing(device: Device) -> None:
    compute, transfer = device.stream("compute"), device.stream("transfer")
    event, done = device.event(), device.event()
    ran: list[str] = []
    device.launch(compute, lambda: ran.append("compute"))
    device.record(event, compute)
    device.wait(transfer, event)
    device.launch(transfer, lambda: ran.append("transfer"))
    device.launch(compute, _raise(Planted()))
    device.synchronize()
    assert ran == ["compute", "transfer"]
    device.launch(compute, lambda: ran.append("the span is still open"))
    device.record(done, compute)
    device.synchronize()
    assert ran == ["compute", "transfer"]
    with pytest.raises(Planted):
        done.synchronize()


def test_a_lost_device_says_so_from_then_on(device: Device) -> None:
    compute, transfer = device.stream("compute"), device.stream("transfer")
    done, moved, other = device.event(), device.event(), device.event()
    lost, ran = DeviceLostError("gone"), list[str]()
    device.launch(compute, _raise(lost))
    with contextlib.suppress(DeviceLostError):  # where the operation has already run
        device.record(done, compute)
        device.wait(transfer, done)
        device.launch(transfer, lambda: ran.append("was queued on another stream"))
        device.record(moved, transfer)
    for event in (moved, done):
        with pytest.raises(DeviceLostError, match="gone"):
            event.synchronize()
    calls: list[Callable[[], object]] = [
        lambda: device.launch(transfer, lambda: ran.append("ran on a lost device")),
        lambda: device.copy(transfer, torch.zeros(1), torch.zeros(1)),
        lambda: device.record(other, transfer),
        lambda: device.wait(transfer, done),
        lambda: device.stream("third"),
        done.synchronize,
        other.synchronize,
        device.synchronize,
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match="gone") as raised:
            call()
        assert raised.value is lost
    device.close()
    assert ran == []


def test_close_finishes_what_is_queued_and_can_be_repeated(device: Device) -> None:
    compute, transfer = device.stream("compute"), device.stream("transfer")
    event, done = device.event(), device.event()
    ran: list[str] = []
    device.launch(compute, lambda: ran.append("compute"))
    device.record(event, compute)
    device.wait(transfer, event)
    device.launch(transfer, lambda: ran.append("transfer"))
    device.launch(transfer, _raise(Planted()))
    device.record(done, transfer)
    device.close()
    assert ran == ["compute", "transfer"]
    device.close()
    assert event.query()
    event.synchronize()
    device.synchronize()
    with pytest.raises(Planted):
        done.synchronize()
    calls: list[Callable[[], object]] = [
        lambda: device.launch(compute, lambda: None),
        lambda: device.copy(compute, torch.zeros(1), torch.zeros(1)),
        lambda: device.record(event, compute),
        lambda: device.wait(compute, event),
        lambda: device.wait(compute, device.event("never recorded")),
        lambda: device.stream("third"),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match="closed"):
            call()


def test_no_thread_is_left(device: Device) -> None:
    before = threading.active_count() - sum(t.name.startswith("cbengine-") for t in threading.enumerate())
    for name in ("compute", "transfer", "swap"):
        device.launch(device.stream(name), lambda: None)
    device.close()
    assert threading.active_count() == before
    assert [t.name for t in threading.enumerate() if t.name.startswith("cbengine-")] == []


def test_a_name_means_one_stream(device: Device) -> None:
    stream = device.stream("compute")
    assert stream.name == "compute"
    assert device.stream("compute") is stream
    assert device.stream("transfer") is not stream


def test_streams_and_events_of_another_device_are_refused(device: Device) -> None:
    others: list[Device] = [InlineDevice(), SimDevice(0)]
    own, stream = device.event(), device.stream("compute")
    for other in others:
        with pytest.raises(TypeError):
            device.launch(other.stream("compute"), lambda: None)
        with pytest.raises(TypeError):
            device.wait(other.stream("compute"), own)
        with pytest.raises(TypeError):
            device.record(own, other.stream("compute"))
        if type(other) is not type(device):
            with pytest.raises(TypeError):
                device.record(other.event(), stream)


def test_operations_run_in_inference_mode(device: Device) -> None:
    stream, done, modes = device.stream("compute"), device.event(), list[bool]()
    device.launch(stream, lambda: modes.append(torch.is_inference_mode_enabled()))
    device.record(done, stream)
    done.synchronize()
    assert modes == [True]
    assert not torch.is_inference_mode_enabled()


def test_buffers_are_zeros_that_everybody_may_write(device: Device) -> None:
    with torch.inference_mode():
        buffers = [device.host_buffer((2, 3), torch.int32), device.device_buffer((2, 3), torch.float32)]
    assert [(b.dtype, tuple(b.shape), b.abs().sum().item()) for b in buffers] == [
        (torch.int32, (2, 3), 0),
        (torch.float32, (2, 3), 0.0),
    ]
    stream, done = device.stream("compute"), device.event()
    for buffer in buffers:
        buffer.add_(1)  # outside of inference mode
        device.launch(stream, lambda buffer=buffer: buffer.add_(1), writes=(buffer,))
    device.record(done, stream)
    done.synchronize()
    assert all(torch.all(buffer == 2) for buffer in buffers)


def test_nothing_is_kept_of_an_operation_that_ran(device: Device) -> None:
    class Payload:
        def run(self) -> None:
            pass

        def fail(self) -> None:
            raise Planted

    stream, done = device.stream("compute"), device.event()
    payload = Payload()
    gone = weakref.ref(payload)
    device.launch(stream, payload.run)
    device.record(done, stream)
    done.synchronize()
    device.launch(stream, payload.fail)
    device.record(done, stream)
    try:
        done.synchronize()
    except Planted:
        pass
    del payload
    gc.collect()
    assert gone() is None


def test_capture_and_host_access_and_memory(device: Device) -> None:
    stream, done = device.stream("compute"), device.event()
    number, sums = device.device_buffer((1,), torch.int64), device.device_buffer((1,), torch.int64)
    replay = device.capture(("decode", 8), lambda: sums.add_(number))
    sums.zero_()
    for value in (3, 4):
        device.launch(stream, lambda value=value: number.fill_(value))
        device.launch(stream, replay)
    device.record(done, stream)
    done.synchronize()
    assert sums.tolist() == [7]
    device.host_access(reads=("tag", torch.zeros(2)), writes=(("page", 3), torch.zeros(0)))
    memory = device.memory_info()
    assert 0 < memory.free <= memory.total
    assert device.torch_device.type == device.name.split(":")[0].replace("sim", "cpu")


def test_what_each_device_says_of_itself() -> None:
    devices: list[Device] = [InlineDevice(), ThreadedDevice(), SimDevice(0)]
    facts = [(d.name, d.overlaps, d.checks) for d in devices]
    assert facts == [("cpu", False, False), ("cpu", True, False), ("sim", True, True)]
