"""A device whose memory has shapes and dtypes and no contents: torch's meta device.

What runs over it is checked for what a GPU would refuse or wait for: tensors of host and device in one operation, shapes and
dtypes that do not fit, and every look of the host at a value. (Fake tensors that claim to be on "cuda" would do as well, but a
torch without CUDA cannot index them.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from cbengine.devices.base import MemoryInfo, Stream
from cbengine.devices.inline import InlineDevice
from cbengine.execution.host_reads import NoHostReads


class FakeGpu(InlineDevice):
    """Runs everything at once. Copies between host and device only look at both sides. `ran` has the names of what ran."""

    name = "meta"
    torch_device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def launch(
        self,
        stream: Stream,
        fn: Callable[[], Any],
        *,
        name: str = "",
        reads: Iterable[Hashable | torch.Tensor] = (),
        writes: Iterable[Hashable | torch.Tensor] = (),
    ) -> None:
        def checked() -> None:
            with NoHostReads():
                fn()

        self.ran.append(name)
        super().launch(stream, checked, name=name)

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert dst.shape == src.shape and dst.dtype == src.dtype
        assert {dst.device.type, src.device.type} == {"cpu", "meta"}, "between the host and the device"

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(total=64 << 30, free=64 << 30)
