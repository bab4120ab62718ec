"""Which device a config asks for."""

from __future__ import annotations

import ctypes
import sys

import torch

from cbengine.config import EngineConfig
from cbengine.devices import cuda
from cbengine.devices.base import Device
from cbengine.devices.inline import InlineDevice
from cbengine.devices.threaded import ThreadedDevice
from cbengine.errors import UnsupportedFeatureError


def resolve(wanted: str | None) -> torch.device:
    """The torch device that is meant: "cpu", "cuda" (the first GPU) or "cuda:N". None: the first GPU, else the CPU.

    Raises:
        UnsupportedFeatureError: there is no such device here, or it is not served.
    """
    if wanted is None:
        return torch.device("cuda", 0) if cuda.count() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UnsupportedFeatureError(f'device {wanted!r} is not one; use "cpu", "cuda" or "cuda:N"') from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "mps":
        raise UnsupportedFeatureError(
            f"device {wanted!r} is not served: sampling is exact in float64, which Apple's GPUs do not have; use 'cpu'"
        )
    if device.type != "cuda":
        raise UnsupportedFeatureError(f"device {wanted!r} is not served; supported are 'cpu', 'cuda' and 'cuda:N'")
    index, gpus = device.index or 0, cuda.count()
    if index >= gpus:
        there = " and ".join(f"cuda:{number}" for number in range(gpus)) or "no GPU that this torch can use"
        built = "" if torch.version.cuda else f" (torch {torch.__version__} was built without CUDA)"
        raise UnsupportedFeatureError(
            f"device {wanted!r} is not here: there is {there}{built}; use one of these, or 'cpu'"
        )
    return torch.device("cuda", index)


def make_device(config: EngineConfig) -> Device:
    """The device for `config`. On a CPU: worker threads as streams, or everything at once without async batching.

    Raises:
        UnsupportedFeatureError: a device that is not here, or not served.
    """
    device = resolve(config.device)
    if device.type == "cuda":
        # Where every step is waited for at once, waking up early is worth a core.
        return cuda.CudaDevice(device.index, blocking=config.use_async_batching is not False)
    if config.use_async_batching is False:
        return InlineDevice()
    return ThreadedDevice(num_threads=config.num_threads)


def give_back_unused() -> None:
    """Give memory that nobody uses back to the system: that of GPUs, and what glibc's allocator keeps for later, which is
    hundreds of MB once some models have come and gone. Takes up to a tenth of a second."""
    cuda.give_back_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # not every libc has it
        trim(0)
