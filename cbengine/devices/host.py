"""What the devices share whose memory is the host's own: plain buffers, free RAM, the fault that ended the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch

from cbengine.devices.base import Device, DeviceLostError, MemoryInfo


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

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside of it; a normal one can be written everywhere.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.host_buffer(shape, dtype)

    def memory_info(self) -> MemoryInfo:
        """Total and available RAM of the machine, from psutil. Limits of a container are not seen."""
        memory = psutil.virtual_memory()
        return MemoryInfo(total=memory.total, free=memory.available)


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
