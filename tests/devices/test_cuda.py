"""`CudaDevice` over a stand-in for torch.cuda: which stream is current, what waits for what, whose memory is whose."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from cbengine.config import EngineConfig
from cbengine.devices import DeviceLostError, InlineDevice, ThreadedDevice, choose, cuda
from cbengine.devices.base import Device
from cbengine.devices.cuda import CudaDevice, CudaRuntime
from cbengine.errors import UnsupportedFeatureError
from tests.devices.fake_cuda import Entry, FakeCuda, in_order
from tests.execution.hazards import HAZARDS
from tests.execution.workload import Workload, make_driver
from tests.support.driver import Driver


def _made(index: int = 0) -> tuple[CudaDevice, FakeCuda]:
    runtime = FakeCuda(index=index)
    device = CudaDevice(index, runtime=runtime)
    device.attach()
    return device, runtime


def _at(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_what_it_says_of_itself() -> None:
    device, _ = _made(1)
    assert (device.name, device.torch_device, device.overlaps, device.checks, device.graphs) == (
        "cuda:1",
        torch.device("cuda", 1),
        True,
        False,
        True,
    )
    memory = device.memory_info()
    assert (memory.free, memory.total) == (1 << 30, 2 << 30)


def test_the_engine_thread_gets_the_models_gpu() -> None:
    """Capture on another than the first GPU, from a thread: the device has to be set there (transformers #48312)."""
    device, runtime = _made(1)
    assert runtime.current_device == 1
    device.capture("key", lambda: None)
    assert runtime.captures[0].stream.owner is runtime


def test_operations_run_under_their_stream() -> None:
    device, runtime = _made()
    compute, transfer = device.stream("compute"), device.stream("transfer")
    seen: list[str] = []
    for stream in (compute, transfer, compute):
        device.launch(stream, lambda: seen.append(runtime.current.name))
    assert seen == [compute.raw.name, transfer.raw.name, compute.raw.name]
    assert runtime.current is runtime.default
    device.launch(compute, lambda: 1 // 0)
    assert runtime.current is runtime.default


def test_an_event_is_recorded_and_waited_for_where_it_was_asked() -> None:
    device, runtime = _made()
    compute, transfer = device.stream("compute"), device.stream("transfer")
    ready, never = device.event("ready"), device.event("never")
    assert ready.raw.blocking and not CudaDevice(runtime=runtime, blocking=False).event().raw.blocking
    device.wait(compute, never)  # never recorded: holds nothing back
    device.record(ready, transfer)
    device.wait(compute, ready)
    ready.synchronize()
    never.synchronize()
    calls = [entry for entry in runtime.log if entry[0] in ("record", "wait", "host waits")]
    name = ready.raw.name
    assert calls == [("record", transfer.raw.name, name), ("wait", compute.raw.name, name), ("host waits", name)]


# --- memory --------------------------------------------------------------------------------------------------------


def test_host_buffers_are_pinned() -> None:
    device, runtime = _made()
    small = device.host_buffer((8,), torch.int32)
    large = device.host_buffer((cuda._REGISTERED_BYTES,), torch.uint8)
    assert {_at(small), _at(large)} <= runtime.pinned_at
    assert runtime.registered == {_at(large)}  # and not rounded up to a power of two by torch's allocator
    device.free_buffer(large)
    assert not runtime.registered and large.untyped_storage().nbytes() == 0


def test_what_is_pinned_is_let_go_at_the_end() -> None:
    device, runtime = _made()
    buffer = device.host_buffer((cuda._REGISTERED_BYTES,), torch.uint8)
    device.close()
    assert not runtime.registered
    device.free_buffer(buffer)


def test_a_buffer_is_handed_out_when_it_is_zero() -> None:
    """It is zeroed on the default stream, which side streams do not wait for."""
    device, runtime = _made()
    device.stream("compute")
    device.device_buffer((4,), torch.int32)
    assert runtime.log[-2:] == [("zeros", "default"), ("synchronize", "default")]


def test_a_buffer_made_by_an_operation_makes_nobody_wait() -> None:
    device, runtime = _made()
    compute = device.stream("compute")
    device.launch(compute, lambda: device.device_buffer((4,), torch.int32))
    assert runtime.log[-1] == ("zeros", compute.raw.name)
    device.device_buffer((4,), torch.int32)
    assert runtime.log[-1] == ("synchronize", "default")


def test_the_allocator_knows_every_stream_that_uses_a_buffer() -> None:
    """Else memory that Python lets go while a stream still reads it would be given to somebody else: made on one stream, used
    on another."""
    device, runtime = _made()
    early = device.device_buffer((4,), torch.int32)
    streams = {device.stream("compute").raw.name, device.stream("transfer").raw.name}
    late = device.device_buffer((4,), torch.int32)
    assert runtime.users[_at(early)] == runtime.users[_at(late)] == streams


def test_a_buffer_that_was_dropped_is_not_kept() -> None:
    device, _ = _made()
    kept = device.device_buffer((4,), torch.int32)
    device.device_buffer((4,), torch.int32)
    assert [buffer is kept for buffer in device._living()] == [True]


def test_close_gives_all_memory_back() -> None:
    device, runtime = _made()
    device.capture("key", lambda: None)
    buffer = device.device_buffer((1024,), torch.float32)
    view = buffer[3:]
    before = runtime.cached
    device.close()
    assert buffer.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    assert not runtime.graphs[0].alive and runtime.cached == before + 1
    assert in_order(runtime.log, lambda entry: entry == ("synchronize",))


# --- faults --------------------------------------------------------------------------------------------------------


def test_an_error_of_the_host_is_the_spans_own() -> None:
    device, runtime = _made()
    compute, done = device.stream("compute"), device.event()
    device.launch(compute, lambda: 1 // 0)
    assert runtime.log[-1] == ("synchronize",)  # it was looked whether the device still works
    device.record(done, compute)
    with pytest.raises(ZeroDivisionError):
        done.synchronize()
    device.launch(compute, lambda: None)


@pytest.mark.parametrize("shown_by", ["event", "query", "synchronize", "operation", "capture"])
def test_a_fault_of_a_kernel_loses_the_device(shown_by: str) -> None:
    device, runtime = _made()
    compute, done = device.stream("compute"), device.event()
    device.launch(compute, lambda: None)
    device.record(done, compute)
    runtime.fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def look() -> None:
        if shown_by == "event":
            done.synchronize()
        elif shown_by == "query":
            done.query()
        elif shown_by == "synchronize":
            device.synchronize()
        elif shown_by == "capture":
            device.capture("key", lambda: None)
        else:
            device.launch(compute, lambda: runtime.report())
            device.record(done, compute)

    with pytest.raises(DeviceLostError, match="cuda:0 failed: CUDA error: an illegal memory access") as raised:
        look()
    assert raised.value.__cause__ is runtime.fault
    with pytest.raises(DeviceLostError, match="start a new one"):
        device.launch(compute, lambda: None)
    with pytest.raises(DeviceLostError):
        done.synchronize()
    assert done.query()
    device.close()


def test_a_fault_ends_the_engine_and_no_request_alone() -> None:
    device, runtime = _made()
    driver = make_driver(device, 1)
    driver.submit([2, 3, 4], max_new_tokens=5)
    driver.turn()
    runtime.fault = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(DeviceLostError, match="device-side assert"):
        driver.run()


# --- graphs --------------------------------------------------------------------------------------------------------


def test_captures_share_one_pool_and_one_stream_and_do_not_mind_other_threads() -> None:
    """With the default mode an allocation of any thread breaks a capture (vLLM #48053, pytorch #175425); captures on several
    streams do not share their pool."""
    device, runtime = _made()
    for key in ("first", "second"):
        device.capture(key, lambda: None)
    first, second = runtime.captures
    assert first.mode == second.mode == "thread_local"
    assert first.pool is second.pool and first.pool is not None
    assert first.stream is second.stream is device.stream("compute").raw


def test_a_replay_computes_what_was_captured_from_memory_as_it_is_now() -> None:
    device, runtime = _made()
    compute, done = device.stream("compute"), device.event()
    numbers, out = device.device_buffer((4,), torch.float32), device.device_buffer((4,), torch.float32)
    factor = 2.0
    replay = device.capture("key", lambda: out.copy_(numbers * factor))
    numbers.fill_(3.0)
    factor = 5.0  # frozen at capture: this changes nothing
    device.launch(compute, replay)
    device.record(done, compute)
    done.synchronize()
    assert out.tolist() == [6.0] * 4 and runtime.graphs[0].replays == 1


def test_a_capture_that_breaks_leaves_the_device_as_it_was() -> None:
    device, runtime = _made()
    runtime.break_capture = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="key cannot be captured: operation not permitted"):
        device.capture("key", lambda: None)
    assert runtime.current is runtime.default
    with pytest.raises(RuntimeError, match=r"aten.*makes the host wait"):
        device.capture("key", lambda: torch.ones(1).item())
    runtime.break_capture = None
    ran: list[int] = []
    device.launch(device.stream("compute"), lambda: ran.append(1))
    assert ran == [1]


# --- the whole loop over it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [None, False])
def test_the_loop_gives_the_right_tokens(graphs: bool | None) -> None:
    """With graphs, replays run the operations of the capture: whatever was frozen by mistake makes a wrong token."""
    replayed = 0
    for seed in range(6):
        device, runtime = _made()
        driver = make_driver(device, seed, use_cuda_graph=graphs)
        Workload(driver, seed, stop=("", "hard", "drain")[seed % 3]).run()
        replayed += sum(graph.replays for graph in runtime.graphs)
        assert runtime.current is runtime.default
        assert len(driver.parts.pipeline.graphs) == len(runtime.graphs)
        device.close()
    assert (replayed > 10) is (graphs is None)


def _one_step() -> tuple[Driver, FakeCuda, list[Entry], dict[str, str]]:
    device, runtime = _made()
    driver = make_driver(device, 1, use_cuda_graph=False)
    streams = {device.stream(name).raw.name: name for name in ("compute", "transfer")}
    driver.submit([2, 3, 4], max_new_tokens=4, ignore_eos=True)
    start = len(runtime.log)
    driver.turn()
    return driver, runtime, runtime.log[start:], streams


def test_the_order_of_a_step() -> None:
    """Inputs on `transfer`; the step and its tokens on `compute`, after the inputs; `done` behind all of it. A copy of tokens
    on `transfer` would hold back the next inputs; a `done` that is recorded earlier would let them be read too early, and the
    slot be filled again."""
    driver, _, log, streams = _one_step()
    slot: Any = driver.parts.pipeline.oldest().slot
    named = [tuple(streams.get(part, part) for part in entry) for entry in log]
    ready, done = slot.inputs_ready.raw.name, slot.done.raw.name
    assert named == [
        ("op", "transfer"),
        ("copy", "transfer"),
        ("record", "transfer", ready),
        ("wait", "compute", ready),
        ("op", "compute"),
        ("op", "compute"),
        ("copy", "compute"),
        ("record", "compute", done),
    ]


def test_a_step_waits_for_nothing() -> None:
    """The host queues the next step while this one computes: it waits for a step's own events only."""
    driver, runtime, log, _ = _one_step()
    assert not [entry for entry in log if entry[0] in ("host waits", "synchronize", "zeros")]
    start = len(runtime.log)
    driver.turn()
    later = runtime.log[start:]
    assert in_order(later, lambda e: e[0] == "record", lambda e: e[0] == "host waits")
    assert not [entry for entry in later if entry[0] in ("synchronize", "zeros")]


PLANTED = {
    "a slot is refilled while it is in flight": "pinned memory was written while it was being copied",
    "done is recorded before the tokens are copied": "-77|said|vocabulary|index",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_hazard_shows_on_the_stand_in(name: str) -> None:
    """Copies take until the host waits for them, so what touches their memory before is found in the whole loop too."""
    found: list[str] = []
    for seed in range(1, 9):
        driver = make_driver(_made()[0], seed, use_async_batching=True, use_cuda_graph=False)
        HAZARDS[name].plant(driver, set())
        try:
            Workload(driver, seed, requests=6).run()
        except Exception as error:  # whatever follows from it
            found.append(repr(error))
        if len(found) == 3:
            break
    assert len(found) == 3 and any(re.search(PLANTED[name], error) for error in found), found


# --- which device --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wanted", "found"), [(None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), ("cpu:0", "cpu")]
)
def test_a_device_is_found(wanted: str | None, found: str) -> None:
    assert str(choose.resolve(wanted)) == found


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda:2", r"device 'cuda:2' is not here: there is cuda:0 and cuda:1"),
        ("mps", "float64"),
        ("xpu", "supported are 'cpu', 'cuda' and 'cuda:N'"),
        ("gpu", "'gpu' is not one"),
    ],
)
def test_a_device_that_is_not_there_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=message):
        choose.resolve(wanted)


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "count", lambda: 0)
    assert choose.resolve(None) == torch.device("cpu")
    with pytest.raises(UnsupportedFeatureError, match="no GPU that this torch can use"):
        choose.resolve("cuda")


def test_the_device_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "count", lambda: 2)
    monkeypatch.setattr(cuda, "CudaRuntime", FakeCuda)
    kinds: list[tuple[EngineConfig, type[Device]]] = [
        (EngineConfig(device="cuda:1"), CudaDevice),
        (EngineConfig(), CudaDevice),
        (EngineConfig(device="cpu"), ThreadedDevice),
        (EngineConfig(device="cpu", use_async_batching=False), InlineDevice),
    ]
    for config, kind in kinds:
        device = choose.make_device(config)
        assert type(device) is kind
        device.close()
    spinning = choose.make_device(EngineConfig(device="cuda", use_async_batching=False)).event()
    assert isinstance(spinning, cuda.CudaEvent) and not spinning.raw.blocking


def test_every_call_that_is_made_of_torch_cuda_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """The stand-in has the methods of the real thing and no other, and the real thing only names what torch.cuda has."""
    real = {name for name in vars(CudaRuntime) if not name.startswith("_")}
    assert real <= set(vars(FakeCuda))
    caplog.set_level(logging.ERROR)
    named = {name for name in _names(CudaRuntime) if hasattr(torch.cuda, name)}
    assert named >= {
        "CUDAGraph",
        "Event",
        "Stream",
        "graph",
        "graph_pool_handle",
        "mem_get_info",
        "set_device",
        "stream",
    }


def _names(owner: Any) -> set[str]:
    return {name for method in vars(owner).values() if hasattr(method, "__code__") for name in method.__code__.co_names}
