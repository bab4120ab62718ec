"""What an attention kernel has to offer, and the paged memory that it reads and writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from cbengine.cache.geometry import WRITE_BLOCK

if TYPE_CHECKING:
    from cbengine.attention.settings import AttentionSettings
    from cbengine.execution.inputs import StepInputs
    from cbengine.models.base import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The paged keys and values of one layer, and the same memory seen as rows of one token each.

    `key` and `value`: [num_blocks, page_size, num_kv_heads, head_dim]. Token `offset` of block `block` is row
    `block * block_rows + offset` of `key_rows` and `value_rows` ([rows, num_kv_heads * head_dim]). The rows between
    two blocks may belong to other layers of the same pool. `block_rows` is 0, and the row views are None, where the
    strides do not allow that view.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_rows: torch.Tensor | None
    value_rows: torch.Tensor | None
    block_rows: int

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        """Wrap two views into the pool. The innermost two dimensions must be contiguous; other strides are free."""
        assert key.shape == value.shape and key.ndim == 4, (key.shape, value.shape)
        assert key.stride() == value.stride(), (key.stride(), value.stride())
        blocks, page_size, heads, dim = key.shape
        assert key.stride(3) == 1 and (heads == 1 or key.stride(2) == dim), key.stride()
        width = heads * dim
        if key.stride(1) != width or key.stride(0) % width:
            return cls(key, value, None, None, 0)
        block_rows = key.stride(0) // width
        shape = ((blocks - 1) * block_rows + page_size, width)
        key_rows = key.as_strided(shape, (width, 1), key.storage_offset())
        value_rows = value.as_strided(shape, (width, 1), value.storage_offset())
        return cls(key, value, key_rows, value_rows, block_rows)


class AttentionBackend(ABC):
    """Writes keys and values into pages and attends over them: one object for each model, used on the compute stream.

    For every step `begin` is called once, then `write` and `attend` once for each layer in turn. Sequences whose
    context length is 0 and tokens past the last sequence are padding: they are written to a reserved block, and what
    `attend` returns for them is finite and means nothing.
    """

    name: ClassVar[str]
    page_size_multiple: ClassVar[int] = 1
    """The cache's page size has to be a multiple of this. Known before the cache is made."""
    supports_window: ClassVar[bool] = True
    supports_softcap: ClassVar[bool] = True
    supports_sinks: ClassVar[bool] = True
    paged_decode: ClassVar[bool] = False
    """The kernel reads one query token's keys through the block table; else they are gathered first."""
    paged_prefill: ClassVar[bool] = False
    """Likewise for the chunks of prompts."""
    decode_fast_path: ClassVar[bool] = False
    """Whether steps that only decode take another way than the rest, as far as `max_blocks_per_request` allows."""
    capturable: ClassVar[bool] = False
    """A CUDA graph may capture `begin`, `write` and `attend`: they read device tensors and, of numbers, only the sizes of
    the step (`num_*`, `max_*`, shapes), which of a captured step are its bucket's; no host array, no synchronisation."""
    devices: ClassVar[tuple[str, ...]] = ()
    """Types of torch devices that it runs on; empty = any."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """Of queries, keys and values alike; empty = any."""
    max_head_dim: ClassVar[int | None] = None
    head_dim_multiple: ClassVar[int] = 1

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Why it cannot run on this machine (a package that is missing, a device that is too old), or None if it can."""
        return None

    @classmethod
    def shortcomings(cls, spec: ModelSpec, device: torch.device) -> list[str]:
        """What `spec` needs on `device` and this backend does not have, in words; empty if it serves the model."""
        found = []
        if cls.devices and device.type not in cls.devices:
            found.append(f"runs on {' and '.join(cls.devices)}, not on {device.type}")
        if cls.dtypes and spec.kv_dtype not in cls.dtypes:
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            found.append(f"computes in {names}, not in {str(spec.kv_dtype).removeprefix('torch.')}")
        if not cls.supports_window and any(layer.window is not None for layer in spec.layers):
            found.append("has no sliding window")
        if not cls.supports_softcap and spec.softcap is not None:
            found.append("has no soft cap")
        if not cls.supports_sinks and spec.has_sinks:
            found.append("has no attention sinks")
        for dim in sorted({layer.head_dim for layer in spec.layers}):
            if dim % cls.head_dim_multiple or (cls.max_head_dim is not None and dim > cls.max_head_dim):
                most = "" if cls.max_head_dim is None else f" up to {cls.max_head_dim}"
                found.append(f"needs a head size that is a multiple of {cls.head_dim_multiple}{most}, not {dim}")
        return found

    @classmethod
    def create(cls, settings: AttentionSettings) -> Self:
        """A new backend object for one attention type of a model."""
        return cls()

    @abstractmethod
    def begin(self, inputs: StepInputs, page_size: int) -> None:
        """Compute once what all layers of this step share (indices, groups of similar length, masks)."""

    @abstractmethod
    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the keys and values of the step's tokens, each [T, num_kv_heads, head_dim], into their pages."""

    @abstractmethod
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
        """Causal attention of `query` [T, num_heads, head_dim] over each sequence's pages: [T, num_heads, head_dim].

        Reads what `write` has put there in this step and before, and with a window only the pages inside it: the others
        may be somebody else's by now. Query head h reads KV head
        h // (num_heads // num_kv_heads). `scale` multiplies the scores; `window` is the number of tokens that a token
        sees, itself included; `softcap` bounds the scaled scores to (-softcap, softcap) by tanh, before masking;
        `sinks` [num_heads] adds one score for each head to the softmax that no value belongs to.
        """


def write_index(inputs: StepInputs, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset, int64 [T] each, that every token of the step is written to. Reads no device tensor on the host.

    Padded tokens (past the last sequence, or with a block table of zeros) go to `WRITE_BLOCK`.
    """
    tokens = torch.arange(inputs.num_tokens, device=inputs.token_ids.device)
    ends = inputs.query_starts[1 : inputs.num_seqs + 1].contiguous()
    # right=True: skips sequences without tokens, and gives num_seqs for tokens past the last sequence.
    seqs = torch.searchsorted(ends, tokens.to(ends.dtype), right=True)
    in_step = seqs < inputs.num_seqs
    seqs.clamp_(max=inputs.num_seqs - 1)
    positions = inputs.positions[: inputs.num_tokens].long()
    pages = (positions // page_size).clamp_(max=inputs.block_tables.shape[1] - 1)
    blocks = inputs.block_tables[seqs, pages].long() * in_step
    return blocks.clamp_(min=WRITE_BLOCK), positions % page_size


class TokenWriter:
    """Writes the tokens of one step into the pages of any layer. Made once for a step; reads no device tensor."""

    def __init__(self, inputs: StepInputs, page_size: int) -> None:
        self._index = write_index(inputs, page_size)
        self._rows: dict[int, torch.Tensor] = {}

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        if layer.key_rows is None or layer.value_rows is None:
            layer.key[self._index] = key
            layer.value[self._index] = value
            return
        rows = self._rows.get(layer.block_rows)
        if rows is None:
            rows = self._rows[layer.block_rows] = self._index[0] * layer.block_rows + self._index[1]
        layer.key_rows.index_copy_(0, rows, key.flatten(1))
        layer.value_rows.index_copy_(0, rows, value.flatten(1))


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """(9, 0) for an H200; None where the device has no such thing."""
    get = getattr(torch.get_device_module(device), "get_device_capability", None)
    return None if get is None or device.type == "cpu" else get(device)
