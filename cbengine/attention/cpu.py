"""Attention by our own C++ kernel, straight over the pages. The default on a CPU where the kernel can be had.

For float32 caches. A query token's result does not depend, bit by bit, on the other tokens and sequences of the step, on
how its prompt was cut into chunks, or on the number of threads.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from cbengine.attention.base import AttentionBackend, LayerKV
from cbengine.errors import UnsupportedFeatureError
from cbengine.kernels import library as lib
from cbengine.kernels.batch import StepBatch
from cbengine.kernels.library import get_library
from cbengine.kernels.pages import pages_of
from cbengine.kernels.team import address, check, pointer, team_of_thread

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs


class CpuBackend(AttentionBackend):
    """See the module's docstring.

    Raises (constructor):
        UnsupportedFeatureError: the kernels cannot be had on this machine.
    """

    name = "cpu"
    paged_decode = True
    paged_prefill = True
    devices = ("cpu",)
    dtypes = (torch.float32,)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None if get_library() is not None else "needs kernels that could not be built (the log says why)"

    def __init__(self) -> None:
        library = get_library()
        if library is None:
            raise UnsupportedFeatureError(
                'attention backend "cpu" needs kernels that could not be built (the log says why); use "sdpa"'
            )
        self._library = library
        self._batch = StepBatch()
        self._pages: dict[int, tuple[LayerKV, lib.Pages]] = {}

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        self._batch.fill(inputs, page_size)
        self._library.place(self._batch.pointer)

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        key, value = _dense_tokens(key), _dense_tokens(value)
        self._library.write_pages(
            pointer(self._pages_of(layer)),
            self._batch.pointer,
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            key.shape[1],
            key.shape[2],
        )

    def attend(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = _dense_tokens(query)
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        task = lib.Attend(
            query=query.data_ptr(),
            out=out.data_ptr(),
            query_stride=query.stride(0),
            out_stride=out.stride(0),
            heads=query.shape[1],
            kv_heads=layer.key.shape[2],
            dim=query.shape[2],
            window=window or 0,
            sinks=address(sinks),
            scale=scale,
            cap=softcap or 0.0,
            pages=self._pages_of(layer),
        )
        check(self._library.attend(team_of_thread(self._library), self._batch.pointer, ctypes.byref(task)))
        return out

    def _pages_of(self, layer: LayerKV) -> lib.Pages:
        kept = self._pages.get(id(layer))
        if kept is None or kept[0] is not layer:
            kept = self._pages[id(layer)] = (layer, pages_of(layer.key, layer.value))
        return kept[1]


def _dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, heads, dim] with a token's heads side by side, as the kernels read them; tokens may be apart."""
    assert x.dtype == torch.float32, x.dtype
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()
