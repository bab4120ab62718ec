"""Finds every look of the host into device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cbengine.testing import SimDevice

# What takes a view of a buffer or asks for its shape or address, and so does not wait for the device.
_HARMLESS = {"__getitem__", "__len__", "__get__", "dim", "narrow", "size", "untyped_storage", "view"}


class HostReads(TorchFunctionMode):
    """While it is open: every torch call on a tensor in device memory that is made outside of an operation. `found`
    has their names. Made before anything is allocated on the device."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self.found: list[str] = []
        self._device = device
        self._addresses: set[int] = set()
        allocate = device.device_buffer

        def device_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            buffer = allocate(shape, dtype)
            self._addresses.add(buffer.untyped_storage().data_ptr())
            return buffer

        device.device_buffer = device_buffer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if not self._device._running and name not in _HARMLESS:
            tensors = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
            if any(tensor.untyped_storage().data_ptr() in self._addresses for tensor in tensors):
                self.found.append(name)
        return func(*args, **(kwargs or {}))
