"""What ends a CUDA device, or might: a lost device says so at every call and frees nothing; nobody is in a capture's way."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.weak import TensorWeakRef

from cbengine import AsyncEngine
from cbengine.devices import DeviceLostError, cuda
from cbengine.devices.cuda import CudaDevice, CudaRuntime
from cbengine.errors import EngineDeadError
from cbengine.testing import FakeModel
from tests.devices.fake_cuda import FakeCuda


def fault() -> Exception:
    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def _no_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have left open is not looked at."""
    monkeypatch.setattr(cuda, "_open", weakref.WeakSet())


def _made(index: int = 0) -> tuple[CudaDevice, FakeCuda]:
    runtime = FakeCuda(index=index)
    device = CudaDevice(index, runtime=runtime)
    device.attach()
    return device, runtime


# --- every call ----------------------------------------------------------------------------------------------------

LARGE = ((cuda._REGISTERED_BYTES,), torch.uint8)
REACHING: dict[str, Callable[[CudaDevice], object]] = {
    "attach": lambda device: device.attach(),
    "stream": lambda device: device.stream("new"),
    "host_buffer": lambda device: device.host_buffer((4,), torch.int32),
    "host_buffer, large": lambda device: device.host_buffer(*LARGE),
    "device_buffer": lambda device: device.device_buffer((4,), torch.int32),
    "memory_info": lambda device: device.memory_info(),
    "record": lambda device: device.record(device.event(), device.stream("compute")),
    "synchronize": lambda device: device.synchronize(),
    "capture": lambda device: device.capture("key", lambda: None),
}
"""Calls that CUDA hears of."""
QUEUED: dict[str, Callable[[CudaDevice], object]] = {
    "event": lambda device: device.event(),
    "launch": lambda device: device.launch(device.stream("compute"), lambda: None),
    "copy": lambda device: device.copy(device.stream("compute"), torch.zeros(1), torch.zeros(1)),
    "wait": lambda device: device.wait(device.stream("compute"), device.event()),
}


@pytest.mark.parametrize("name", REACHING)
def test_whatever_call_meets_the_fault_first_says_so(name: str) -> None:
    device, runtime = _made()
    device.stream("compute")
    runtime.fault = fault()
    with pytest.raises(DeviceLostError, match=r"cuda:0 failed: CUDA error.*start a new one"):
        REACHING[name](device)
    device.close()


def test_a_wait_that_meets_the_fault_says_so() -> None:
    device, runtime = _made()
    compute, done = device.stream("compute"), device.event()
    device.record(done, compute)
    runtime.fault = fault()
    with pytest.raises(DeviceLostError, match="cuda:0 failed"):
        device.wait(compute, done)
    device.close()


@pytest.mark.parametrize("name", [*REACHING, *QUEUED])
def test_every_later_call_says_so_too(name: str) -> None:
    device, runtime = _made()
    done = device.event()
    device.record(done, device.stream("compute"))
    runtime.fault = fault()
    with pytest.raises(DeviceLostError):
        device.synchronize()
    runtime.fault = None  # and nothing of it is asked of CUDA again
    with pytest.raises(DeviceLostError, match="cuda:0 failed"):
        {**REACHING, **QUEUED}[name](device)
    with pytest.raises(DeviceLostError):
        done.synchronize()
    device.close()


def test_what_is_no_fault_of_the_device_stays_what_it_is() -> None:
    """Memory that is not there is no lost device."""
    device, runtime = _made()
    runtime.zeros = lambda *_: _raise(torch.OutOfMemoryError("CUDA out of memory"))  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        device.device_buffer((4,), torch.int32)
    device.launch(device.stream("compute"), lambda: None)
    device.close()


def _raise(error: Exception) -> Any:
    raise error


# --- the end of a lost device --------------------------------------------------------------------------------------


def _lose(device: CudaDevice, runtime: FakeCuda) -> None:
    runtime.fault = fault()
    with pytest.raises(DeviceLostError):
        device.synchronize()


def test_memory_of_a_lost_device_is_never_freed() -> None:
    """torch records an event where memory goes that a side stream was told of; on a lost device that raises in a destructor,
    which ends the process. (A pinned buffer too: its copies were on side streams.)"""
    device, runtime = _made()
    device.stream("compute")
    device.capture("key", lambda: None)
    buffers = [device.device_buffer((4,), torch.int32), device.host_buffer((4,), torch.int32)]
    references: list[Callable[[], object]] = [TensorWeakRef(buffer) for buffer in buffers]
    references.append(weakref.ref(runtime.graphs[0]))
    sizes = [buffer.untyped_storage().nbytes() for buffer in buffers]
    _lose(device, runtime)
    before = len(runtime.log)
    device.close()
    device.close()
    for buffer in buffers:
        device.free_buffer(buffer)
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == sizes
    assert len(runtime.log) == before and runtime.cached == 1 and runtime.forgotten == 0  # only by `attach`
    runtime.graphs.clear()
    del device, buffers, buffer
    gc.collect()
    assert all(reference() is not None for reference in references)


def test_memory_of_a_closed_device_is_freed() -> None:
    """The other side of the test above: nothing is kept where there is no need."""
    device, _ = _made()
    buffers = [device.device_buffer((4,), torch.int32), device.host_buffer((4,), torch.int32)]
    references = [TensorWeakRef(buffer) for buffer in buffers]
    device.close()
    del device, buffers
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_device_that_turns_out_to_be_lost_as_it_is_closed() -> None:
    device, runtime = _made()
    buffer = device.device_buffer((4,), torch.int32)
    reference = TensorWeakRef(buffer)
    runtime.fault = fault()
    with pytest.raises(DeviceLostError):
        device.close()
    device.close()
    del buffer
    gc.collect()
    assert reference() is not None


def test_a_device_that_is_lost_while_it_gives_back_frees_nothing_more() -> None:
    device, runtime = _made()
    large = device.host_buffer(*LARGE)
    device.device_buffer((4,), torch.int32)
    unregister = runtime.unregister
    runtime.unregister = lambda tensor: (setattr(runtime, "fault", fault()), unregister(tensor))  # type: ignore[method-assign]
    with pytest.raises(DeviceLostError):
        device.close()
    assert runtime.forgotten == 0 and runtime.cached == 1
    with pytest.raises(DeviceLostError):
        device.synchronize()
    assert large.numel()


def test_a_device_that_was_not_used_is_closed_without_a_call() -> None:
    """Waiting for a GPU that nobody has used yet would set it up first, which takes memory and a second."""
    runtime = FakeCuda()
    CudaDevice(runtime=runtime).close()
    assert runtime.log == [] and runtime.cached == 0


def test_an_engine_whose_device_is_lost_gives_everything_else_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes: list[FakeCuda] = []
    monkeypatch.setattr(cuda, "count", lambda: 1)
    monkeypatch.setattr(cuda, "CudaRuntime", lambda index: runtimes.append(FakeCuda(index=index)) or runtimes[-1])
    asyncio.run(_lose_under_an_engine(runtimes))


async def _lose_under_an_engine(runtimes: list[FakeCuda]) -> None:
    model = FakeModel(max_model_len=64)
    released: list[bool] = []
    before: list[int] = []
    model.release = lambda: released.append(True)  # type: ignore[method-assign]
    settings: dict[str, Any] = {"page_size": 4, "num_blocks": 40, "max_batch_tokens": 16, "safety_margin": 0.0}
    engine = AsyncEngine(model, device="cuda", max_requests_per_batch=4, use_cuda_graph=False, **settings)
    await engine.start()
    engine_bytes = engine.memory_plan.kv_bytes
    stream = engine.stream([2, 3, 4], max_new_tokens=40, ignore_eos=True)
    with pytest.raises(EngineDeadError) as raised:
        async for _ in stream:
            runtimes[0].fault = fault()
            before = _stored(runtimes[0])
    assert isinstance(raised.value.__cause__, DeviceLostError)
    await engine.aclose()
    assert released == [True]
    assert _stored(runtimes[0])[: len(before)] == before and sum(before) > engine_bytes  # nothing was freed


def _stored(runtime: FakeCuda) -> list[int]:
    """Bytes of every buffer that was ever made."""
    return [tensor.untyped_storage().nbytes() for tensor in runtime._keep]


# --- captures ------------------------------------------------------------------------------------------------------


def test_a_capture_that_breaks_gives_the_allocator_back() -> None:
    """torch leaves it in the pool of the graph: whatever anybody allocated next would be memory that graphs write to."""
    device, runtime = _made()
    runtime.break_capture = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="cannot be captured"):
        device.capture("key", lambda: None)
    assert runtime.broken_off == [device._pool] and runtime.allocates_to is None
    runtime.break_capture = None
    device.device_buffer((4,), torch.int32)
    replay = device.capture("another", lambda: None)
    device.launch(device.stream("compute"), replay)
    assert runtime.graphs[-1].replays == 1 and device._captured == [runtime.graphs[-1]]


def test_a_capture_that_ended_well_is_not_ended_again() -> None:
    """`CudaRuntime.end_capture` is for the others; where there is nothing to end it says nothing."""
    CudaRuntime.end_capture(FakeCuda(), object())
    device, runtime = _made()
    device.capture("key", lambda: None)
    assert runtime.broken_off == []


OTHERS: dict[str, Callable[[CudaDevice], object]] = {
    "another engine starts": lambda device: device.attach(),
    "another engine ends": lambda device: device.close(),
    "another engine captures": lambda device: device.capture("other", lambda: None),
    "what is unused is given back": lambda device: cuda.give_back_unused(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nobody_else_captures_or_gives_memory_back_during_a_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator serves one capture at a time, and `empty_cache` waits for the device, which breaks any."""
    device, runtime = _made()
    other, other_runtime = _made(1)
    other.device_buffer((4,), torch.int32)
    others: list[tuple[str, bool]] = []

    def watching(what: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            others.append((what, runtime.capturing_now))
            return inner(*args, **kwargs)

        return call

    for method in ("empty_cache", "forget_workspaces", "capturing"):
        monkeypatch.setattr(other_runtime, method, watching(method, getattr(other_runtime, method)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", watching("torch's empty_cache", lambda: None))
    thread = threading.Thread(target=OTHERS[name], args=(other,))

    def meanwhile() -> None:
        thread.start()
        thread.join(0.1)  # it has to wait until this capture is through

    device.capture("key", meanwhile)
    thread.join()
    assert others and not any(during for _, during in others)
    device.close()


def test_an_allocator_that_a_lost_device_has_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(calls))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied") or _raise(fault()))
    cuda.give_back_unused()
    assert calls == []  # a process that has not used a GPU does not begin to
    calls.append("used")
    cuda.give_back_unused()
    assert calls == ["used", "emptied"]


def test_workspaces_are_forgotten_with_the_last_device() -> None:
    """cuBLAS has a workspace for every stream that it has run on, and graphs that multiply hold its address: as long as an
    engine has graphs, another that ends leaves the workspaces alone."""
    first, first_runtime = _made()
    second, second_runtime = _made(1)
    for device in (first, second):
        device.capture("key", lambda: None)
    first.close()
    assert (first_runtime.forgotten, second_runtime.forgotten) == (0, 0)
    assert first_runtime.cached == 2  # by `attach` and by `close`
    assert second_runtime.graphs[0].alive
    second.close()
    assert (first_runtime.forgotten, second_runtime.forgotten) == (0, 1)


def test_what_is_called_of_torchs_inside_is_there() -> None:
    """Of a torch that was built for CUDA, with or without a GPU."""
    called = {name for method in vars(CudaRuntime).values() if hasattr(method, "__code__") for name in _texts(method)}
    assert {"_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool"} <= called
    if torch.backends.cuda.is_built():
        assert all(hasattr(torch._C, name) for name in called if name.startswith("_cuda_"))


def _texts(method: Any) -> set[str]:
    constants = {constant for constant in method.__code__.co_consts if isinstance(constant, str)}
    return constants | set(method.__code__.co_names)
