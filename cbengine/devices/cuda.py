"""The CUDA device: real streams, events, pinned buffers and graphs. The only file that names `torch.cuda`.

What it keeps to, and why:

* The engine thread is given the device as its current one (`attach`), so that kernels which ask for "the current device"
  (Triton's, cuBLAS handles) get the model's, on `cuda:1` too.
* Streams are side streams, which the default stream does not order. Buffers are zeroed on the default stream, so
  `device_buffer` waits for that before it hands them out; and the allocator is told of every stream that may use them, so that
  memory which Python lets go while a stream still reads it is not given to somebody else.
* Copies are `non_blocking` between pinned and device memory. A copy to or from memory that is not pinned would block the host.
* Graphs are captured on `compute`, out of one pool of memory, with `capture_error_mode="thread_local"`: with the default one,
  an allocation by any other thread of the process would break the capture.
* What a kernel does wrong is reported by CUDA later, by some other call, and the context is lost with it. So an exception
  from an operation is the operation's own only if the device still works afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils.weak import TensorWeakRef

from cbengine.devices.base import Device, DeviceLostError, Event, MemoryInfo, Stream
from cbengine.devices.host import Health, run_operation

P = ParamSpec("P")
R = TypeVar("R")

_alone = threading.RLock()
"""torch's allocator is captured from by one thread at a time, and gives nothing back meanwhile."""
_open: weakref.WeakSet[CudaDevice] = weakref.WeakSet()
"""Devices of this process."""
_REGISTERED_BYTES = 64 << 20
"""From this size on, pinned memory is ordinary memory that is registered: torch's pinned allocator rounds up to the next power
of two, which may be twice of a pool for swapping, and keeps what it gets."""


class CudaRuntime:
    """The parts of torch.cuda that the device uses, for one GPU. Tests have a stand-in."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)

    def set_device(self) -> None:
        torch.cuda.set_device(self.index)

    def make_stream(self) -> Any:
        return torch.cuda.Stream(self.index)

    def make_event(self, blocking: bool) -> Any:
        return torch.cuda.Event(blocking=blocking)

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Makes it the calling thread's current stream."""
        return torch.cuda.stream(stream)

    def settle(self) -> None:
        """Wait for the calling thread's current stream."""
        torch.cuda.current_stream(self.index).synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def register(self, tensor: torch.Tensor) -> None:
        """Pin the memory of an ordinary tensor."""
        cudart: Any = torch.cuda.cudart()
        _succeed(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))

    def unregister(self, tensor: torch.Tensor) -> None:
        cudart: Any = torch.cuda.cudart()
        _succeed(cudart.cudaHostUnregister(tensor.data_ptr()))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """On the current stream."""
        dst.copy_(src, non_blocking=True)

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses the memory."""
        tensor.record_stream(stream)

    def make_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def make_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capturing(self, graph: Any, *, pool: Any, stream: Any, mode: str) -> AbstractContextManager[object]:
        return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode)

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total). What torch's allocator holds and nobody uses is free."""
        free, total = torch.cuda.mem_get_info(self.index)
        unused = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return free + unused, total

    def empty_cache(self) -> None:
        """Give what nobody uses back to the driver."""
        torch.cuda.empty_cache()

    def forget_workspaces(self) -> None:
        """Drop what cuBLAS keeps for every stream that it has run on. Graphs that ran matrix products hold its addresses."""
        clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    def end_capture(self, pool: Any) -> None:
        """Where CUDA broke a capture off, torch leaves its allocator in it."""
        with contextlib.suppress(Exception):  # it had ended
            torch._C._cuda_endAllocateToPool(self.index, pool)  # type: ignore[attr-defined]


def _succeed(code: Any) -> None:
    if int(code):
        raise RuntimeError(f"CUDA error {int(code)} while memory of the host was pinned or let go")


def count() -> int:
    """How many GPUs there are; 0 without a driver, or with a torch that was built without CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def give_back_unused() -> None:
    """Give memory that no tensor uses back to the driver, if this process has used a GPU at all."""
    if torch.cuda.is_initialized():
        with _alone, contextlib.suppress(RuntimeError):  # a device that is lost gives nothing back
            torch.cuda.empty_cache()


class CudaStream(Stream):
    """A side stream, and what its open span raised on the host."""

    def __init__(self, name: str, raw: Any) -> None:
        self.name = name
        self.raw = raw
        self.error: BaseException | None = None


class CudaEvent(Event):
    """A CUDA event. Waiting for one lets other threads run."""

    def __init__(self, name: str, device: CudaDevice, raw: Any) -> None:
        self.name = name
        self.raw = raw
        self.recorded = False
        self.error: BaseException | None = None
        self._device = weakref.ref(device)
        self._health = device.health

    def owned_by(self, device: CudaDevice) -> bool:
        return self._device() is device

    def synchronize(self) -> None:
        if self.recorded and self._health.fault is None:
            try:
                self.raw.synchronize()
            except Exception as error:
                raise self._lost(error) from error
        error, self.error = self.error, None
        if error is not None:
            raise error
        self._health.check()

    def query(self) -> bool:
        if not self.recorded or self._health.fault is not None:
            return True  # `synchronize` would not block
        try:
            return self.raw.query()
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> DeviceLostError:
        device = self._device()
        return lost(self._health, "the CUDA device" if device is None else device.name, error)


def _watched(
    method: Callable[Concatenate[CudaDevice, P], R],
) -> Callable[Concatenate[CudaDevice, P], R]:
    """The same, raising `DeviceLostError` where CUDA raised because the device is gone."""

    @functools.wraps(method)
    def watched(self: CudaDevice, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            if self._inside is None:  # else whoever began the operation looks; and a capture must not be waited for
                self._probe()
                self.health.check()
            raise

    return watched


class CudaDevice(Device):
    """One GPU.

    Args:
        index: which.
        blocking: events let the host sleep until they are reached. False: it spins, which wakes it some microseconds
            earlier and takes a core; for steps that are waited for one by one.
        runtime: what does the work; a stand-in in tests.

    Host code in an operation that raises ends its span; the rest of the device's contract is in `cbengine.devices.base`.
    """

    overlaps = True
    graphs = True

    def __init__(self, index: int = 0, *, blocking: bool = True, runtime: CudaRuntime | None = None) -> None:
        self._runtime = CudaRuntime(index) if runtime is None else runtime
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.health = Health()
        self._blocking = blocking
        self._streams: dict[str, CudaStream] = {}
        self._inside: CudaStream | None = None  # the stream whose operation is being queued
        self._buffers: list[TensorWeakRef] = []  # device memory that was handed out
        self._registered: list[torch.Tensor] = []
        self._captured: list[Any] = []
        self._pool: Any = None
        self._pinned: list[TensorWeakRef] = []
        _open.add(self)

    @_watched
    def attach(self) -> None:
        self.health.check_open()
        self._runtime.set_device()
        with _alone:
            self._runtime.empty_cache()

    @_watched
    def stream(self, name: str) -> CudaStream:
        """The stream of this name, made by the first call."""
        self.health.check_open()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = CudaStream(name, self._runtime.make_stream())
            for buffer in self._living():
                self._runtime.used_by(buffer, stream.raw)
        return stream

    @_watched
    def event(self, name: str = "") -> CudaEvent:
        self.health.check_open()
        return CudaEvent(name, self, self._runtime.make_event(self._blocking))

    # --- memory ----------------------------------------------------------------------------------------------------

    @_watched
    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.health.check_open()
        # A tensor made in inference mode could not be written outside of it; a normal one can be written everywhere.
        with torch.inference_mode(False):
            if torch.Size(shape).numel() * dtype.itemsize < _REGISTERED_BYTES:
                pinned = self._runtime.pinned(shape, dtype)
                self._pinned = [ref for ref in self._pinned if ref() is not None]
                self._pinned.append(TensorWeakRef(pinned))
                return pinned
            buffer = torch.zeros(shape, dtype=dtype)
        self._runtime.register(buffer)
        self._registered.append(buffer)
        return buffer

    @_watched
    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.health.check_open()
        with torch.inference_mode(False):
            tensor = self._runtime.zeros(shape, dtype)
        if self._inside is None:
            self._runtime.settle()  # zeroed on a stream that ours do not wait for
        self._buffers = [TensorWeakRef(buffer) for buffer in self._living()]
        if tensor.numel():
            self._buffers.append(TensorWeakRef(tensor))
            for stream in self._streams.values():
                self._runtime.used_by(tensor, stream.raw)
        return tensor

    def _living(self) -> list[torch.Tensor]:
        """Device buffers that somebody still has."""
        return [buffer for buffer in (ref() for ref in self._buffers) if buffer is not None]

    @_watched
    def free_buffer(self, buffer: torch.Tensor) -> None:
        if self.health.fault is not None:
            return  # see `_keep`
        for index, registered in enumerate(self._registered):
            if registered.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                self._runtime.unregister(registered)
                del self._registered[index]
                break
        super().free_buffer(buffer)

    @_watched
    def memory_info(self) -> MemoryInfo:
        """The GPU's memory, other processes' use taken off."""
        self.health.check_open()
        free, total = self._runtime.memory()
        return MemoryInfo(total=total, free=free)

    # --- streams ---------------------------------------------------------------------------------------------------

    def launch(
        self,
        stream: Stream,
        fn: Callable[[], Any],
        *,
        name: str = "",
        reads: Iterable[Hashable | torch.Tensor] = (),
        writes: Iterable[Hashable | torch.Tensor] = (),
    ) -> None:
        """See `Device.launch`. `fn` queues its kernels on `stream` and returns; it must not wait for them."""
        own = self._own(stream)
        if own.error is not None:
            return
        self._inside = own
        try:
            with torch.inference_mode(), self._runtime.on_stream(own.raw):
                error = run_operation(fn, self.health)
        finally:
            self._inside = None
        if error is not None and self.health.fault is None:
            self._probe()
        own.error = error if self.health.fault is None else self.health.fault

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.launch(stream, lambda: self._runtime.copy(dst, src), name="copy")

    @_watched
    def record(self, event: Event, stream: Stream) -> None:
        own, own_event = self._own(stream), self._own_event(event)
        own_event.error, own.error = own.error, None
        own_event.recorded = True
        own_event.raw.record(own.raw)

    @_watched
    def wait(self, stream: Stream, event: Event) -> None:
        own, own_event = self._own(stream), self._own_event(event)
        if own_event.recorded:
            own.raw.wait_event(own_event.raw)

    def synchronize(self) -> None:
        self.health.check()
        if self.health.closed:
            return
        try:
            self._runtime.synchronize()
        except Exception as error:
            raise lost(self.health, self.name, error) from error

    # --- graphs ----------------------------------------------------------------------------------------------------

    def capture(self, key: Hashable, fn: Callable[[], Any]) -> Callable[[], Any]:
        """See `Device.capture`. `fn` has run before, on `compute`, so that whatever it sets up is there."""
        self.health.check_open()
        compute = self.stream("compute")
        if self._pool is None:
            self._pool = self._runtime.make_pool()
        graph = self._runtime.make_graph()
        self._inside = compute
        try:
            # The outer context puts the current stream back where a broken capture does not.
            with _alone, torch.inference_mode(), self._runtime.on_stream(compute.raw):
                with self._runtime.capturing(graph, pool=self._pool, stream=compute.raw, mode="thread_local"):
                    fn()
        except Exception as error:
            self._runtime.end_capture(self._pool)
            self._probe()
            self.health.check()
            raise RuntimeError(f"{key} cannot be captured: {error}") from error
        finally:
            self._inside = None
        self._captured.append(graph)
        return graph.replay

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Device.close`. All memory that was handed out is given back: nobody may use it any more."""
        if self.health.closed:
            return
        try:
            if self.health.fault is None and (self._streams or self._buffers or self._registered):
                self.synchronize()
                self._give_back()
        finally:
            if self.health.fault is not None:
                self._keep()
            self.health.closed = True
            self._captured.clear()
            self._registered.clear()

    @_watched
    def _give_back(self) -> None:
        for graph in self._captured:
            graph.reset()
        for buffer in self._registered:
            self._runtime.unregister(buffer)
        for buffer in self._living():
            super().free_buffer(buffer)
        self._buffers.clear()
        with _alone:
            # Each start makes new streams, and cuBLAS a workspace for each.
            if all(device is self or device.health.closed for device in list(_open)):
                self._runtime.forget_workspaces()
            self._runtime.empty_cache()

    def _keep(self) -> None:
        """The device is lost: its memory and graphs are never freed again. torch records an event where memory goes that a
        stream was told of; that fails now, in a destructor, and would end the process."""
        pinned = (tensor for tensor in (ref() for ref in self._pinned) if tensor is not None)
        kept = [*self._living(), *pinned, *self._captured]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # not even at exit

    def _probe(self) -> None:
        """Something has raised: find out whether the device can still be used."""
        if self.health.fault is not None or self.health.closed:
            return
        try:
            self._runtime.synchronize()
        except Exception as error:
            lost(self.health, self.name, error)

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or self._streams.get(stream.name) is not stream:
            raise TypeError(f"a stream of another device was used: {stream!r}")
        self.health.check_open()
        return stream

    def _own_event(self, event: Event) -> CudaEvent:
        if not isinstance(event, CudaEvent) or not event.owned_by(self):
            raise TypeError(f"an event of another device was used: {event!r}")
        return event


def lost(health: Health, name: str, cause: Exception) -> DeviceLostError:
    """Note that the device is gone, because of `cause`."""
    if health.fault is None:
        health.fault = DeviceLostError(
            f"{name} failed: {cause}. CUDA cannot be used any more in this process; start a new one. (What a kernel did wrong "
            "is reported late; with CUDA_LAUNCH_BLOCKING=1 in the environment the traceback shows where.)"
        )
        health.fault.__cause__ = cause
    return health.fault
