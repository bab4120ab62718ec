"""What the devices share whose memory is the host's own: plain buffers, free RAM, the fault that ended the device."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import psutil
import torch

from cbengine.devices.baked import Baked
from cbengine.devices.base import Device, DeviceLostError, MemoryInfo

_LAZY_BYTES = 1 << 20
"""From this size on a buffer is taken from the kernel, page by page as it is used."""


class Health:
    """Whether a device can still be used. Shared with worker threads; set at most once, so it needs no lock."""

    __slots__ = ("closed", "fault")

    def __init__(self) -> None:
        self.fault: DeviceLostError | None = None
        self.closed = False

    def check(self) -> None:
        """Raise the fault, if there was one."""
        if self.fault is not None:
            raise self.fault

    def check_open(self) -> None:
        """Raise the fault, if there was one, or that the device was closed."""
        self.check()
        if self.closed:
            raise DeviceLostError("the device was closed: nothing can be queued on it any more; make a new one")


class HostDevice(Device):
    """Memory and health of a device that computes in host memory."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._health = Health()
        self._lazy: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside of it; a normal one can be written everywhere.
        with torch.inference_mode(False):
            size = math.prod(shape) * dtype.itemsize
            if size < _LAZY_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
                return torch.zeros(shape, dtype=dtype)
            pages = _Pages(size)
            tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
            self._lazy[tensor.data_ptr()] = pages
            return tensor

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.host_buffer(shape, dtype)

    def free_buffer(self, buffer: torch.Tensor) -> None:
        pages = self._lazy.get(buffer.data_ptr())
        if pages is None:
            super().free_buffer(buffer)
        else:
            pages.give_back()

    def capture(self, key: Hashable, fn: Callable[[], Any]) -> Callable[[], Any]:
        """`fn` with a check that nothing varies which a graph would freeze: for tests of what is captured."""
        return Baked(key, fn)

    def memory_info(self) -> MemoryInfo:
        """Total and available RAM of the machine, from psutil. Limits of a container are not seen."""
        memory = psutil.virtual_memory()
        return MemoryInfo(total=memory.total, free=memory.available)


class _Pages(mmap.mmap):
    """Zeros that take memory only where they were written: a cache costs what is in it, not what could be.

    Taken in large pages where the kernel has them, which spares the walks over a table of small ones.
    """

    def __new__(cls, size: int) -> _Pages:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self.madvise(mmap.MADV_HUGEPAGE)

    def give_back(self) -> None:
        """The memory goes back to the kernel; whoever still reads it reads zeros."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.madvise(mmap.MADV_DONTNEED)


def run_operation(fn: Callable[[], Any], health: Health) -> BaseException | None:
    """Run `fn` and return what it raised, with a traceback that starts in `fn`.

    Everything is caught, `KeyboardInterrupt` included: an error is reported by the event that closes the span and must
    not end a worker thread. A `DeviceLostError` ends the device.
    """
    try:
        fn()
    except BaseException as error:
        if isinstance(error, DeviceLostError) and health.fault is None:
            health.fault = error
        # Without this frame, so that the exception keeps no reference to `fn` for longer than `fn` itself does.
        traceback = error.__traceback__
        return error.with_traceback(traceback.tb_next if traceback is not None else None)
    return None
