"""Attention by our own Triton kernels, straight over the pages: any page size of 16 and more, everything a layer can ask for.

Nothing on the host depends on the lengths of a step, only on the bounds `max_query_len` and `max_context_len`, so that what
is launched between `begin` and the last `attend` can be captured once and replayed with other lengths.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

from cbengine.attention.base import AttentionBackend, LayerKV, compute_capability

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs
    from cbengine.kernels.triton.launch import PagedStep, Workspace


class TritonBackend(AttentionBackend):
    """See the module's docstring. For float32, float16 and bfloat16, and heads of up to 256.

    The first `attend` of a kind (there is one in the trial of a model at `bind`, before anything is captured) makes the
    workspace and launches every kernel of that kind once, so that nothing is compiled later under load.

    Raises (constructor):
        ImportError: triton cannot be imported.
    """

    name = "triton"
    page_size_multiple = 16
    paged_decode = True
    paged_prefill = True
    capturable = True
    devices = ("cuda",)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    max_head_dim = 256

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        try:
            importlib.import_module("triton")
        except ImportError as error:
            return f"needs the package triton, which cannot be imported ({error})"
        capability = compute_capability(device)
        if capability is not None and capability < (8, 0):
            return f"needs a GPU of compute capability 8.0 or newer, not {'.'.join(map(str, capability))}"
        return None

    def __init__(self) -> None:
        from cbengine.kernels.triton import launch
        from cbengine.kernels.triton.rope import kv_slots

        self._launch = launch
        self._workspaces: dict[tuple[int, int, int], Workspace] = {}
        self._compiled: set[tuple[object, ...]] = set()
        self._step: PagedStep | None = None
        self._kv_slots = kv_slots
        self.slots: tuple[torch.Tensor, torch.Tensor] | None = None
        """Of the step: block and offset, int32 [T] each, that the keys and values of its tokens are written to."""

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        self._step = self._launch.PagedStep(
            tables=inputs.block_tables,
            context_lens=inputs.context_lens,
            query_starts=inputs.query_starts,
            num_tokens=inputs.num_tokens,
            num_seqs=inputs.num_seqs,
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
            page_size=page_size,
        )
        self.slots = self._kv_slots(inputs, page_size)

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        assert self.slots is not None, "write before begin"
        self._launch.write_pages(key, value, layer.key, layer.value, *self.slots)

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
        assert self._step is not None, "attend before begin"
        if sinks is not None:
            sinks = sinks.detach().contiguous()
        scores = self._launch.Scores(scale, window, softcap, sinks)
        shape = (query.shape[1], layer.key.shape[2], query.shape[2])
        workspace = self._workspaces.get(shape)
        if workspace is None:
            workspace = self._workspaces[shape] = self._launch.Workspace(*shape, query.device)
        kind = (shape, query.dtype, self._step.page_size, window is None, softcap is None, sinks is None)
        if kind not in self._compiled and not self._launch.INTERPRETED:
            self._launch.compile_kinds(self._step, query, layer.key, layer.value, workspace, scores)
            self._compiled.add(kind)
        return self._launch.attend_pages(self._step, query, layer.key, layer.value, workspace, scores)
