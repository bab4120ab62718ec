"""Finds operations for which the host waits for the device: what a step must not have (I13), and a graph cannot capture."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = {
    "_local_scalar_dense",  # item(), tolist(), bool(tensor), int(tensor)
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "allclose",
    "is_nonzero",
    "item",
}
"""The size of their result, or the result itself, is a value that only the device knows."""


class HostReadError(RuntimeError):
    """An operation would have made the host wait for the device."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} makes the host wait for the device")


class NoHostReads(TorchDispatchMode):
    """While it is open, in its own thread: raise `HostReadError` where an operation makes the host wait.

    Every tensor counts as the device's, also on a CPU, where such an operation costs nothing. Kernels that are called past
    torch's dispatcher are not seen.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _ALWAYS or _reads(name, args, kwargs or {}):
            raise HostReadError(str(func))
        return func(*args, **(kwargs or {}))


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("index", "index_put", "index_put_"):
        indices = args[1]
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name == "where":
        return len(args) == 1
    if name == "repeat_interleave":
        counts = args[-1]
        return isinstance(counts, torch.Tensor) and kwargs.get("output_size") is None
    if name in ("_to_copy", "to"):
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"
    if name in ("copy_", "_copy_from"):
        to, source = args[0], args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return waits and to.device.type == "cpu" and source.device.type != "cpu"
    return False
