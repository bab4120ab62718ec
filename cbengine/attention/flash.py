"""FlashAttention 3 and 2, over pages. The only file that names their packages.

A decoding step goes through `flash_attn_with_kvcache`, which appends each sequence's new key and value to its pages
itself, in place, and needs no lengths on the host (the *fast path*, where the tables are no wider than
`DecodeWidth` allows). Everything else is written by us first, and then attended to as packed queries: by
`flash_attn_varlen_func` with a block table in FlashAttention 2, and in 3, whose function of that name knows no pages, by
`flash_attn_with_kvcache` with `cu_seqlens_q`. Sliding layers go the same ways, with a window.

What the kernels take without a word and compute nonsense from, so that it is seen to here: see `PackedStep` for lengths
and bounds. Appending happens at `cache_seqlens`, the length *before* the step, which the kernels do not advance; a
padded sequence appends to the reserved block for writes. `softcap` 0.0 means none.
"""

from __future__ import annotations

import importlib
import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from cbengine.attention.base import AttentionBackend, LayerKV, compute_capability
from cbengine.attention.packed import PackedStep, window_of
from cbengine.attention.settings import AttentionSettings, DecodeWidth
from cbengine.cache.geometry import WRITE_BLOCK

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs
    from cbengine.models.base import ModelSpec


class FlashBackend(AttentionBackend):
    """What the two versions share: the layout of a step, the fast path, and when they can be used."""

    supports_sinks = False
    paged_decode = True
    paged_prefill = True
    decode_fast_path = True
    capturable = True
    devices = ("cuda",)
    dtypes = (torch.float16, torch.bfloat16)
    max_head_dim = 256
    head_dim_multiple = 8

    modules: ClassVar[tuple[str, ...]]
    """Where the functions may be found; the first that is there is used."""
    package: ClassVar[str]
    paged_function: ClassVar[str]
    """The function for packed queries, and the parameter by which it takes block tables."""
    tables_parameter: ClassVar[str]
    min_capability: ClassVar[tuple[int, int]] = (8, 0)
    max_capability: ClassVar[tuple[int, int] | None] = None

    def __init__(self, settings: AttentionSettings | None = None) -> None:
        module = self._module()
        self._packed: Callable[..., Any] = getattr(module, self.paged_function)
        self._decode: Callable[..., Any] = module.flash_attn_with_kvcache
        self._settings = settings or AttentionSettings()
        self.width: DecodeWidth | None = None
        """Set by the first step, which brings the page size."""
        self._fast = False
        self._new: tuple[LayerKV, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def create(cls, settings: AttentionSettings) -> Self:
        return cls(settings)

    @classmethod
    def _module(cls) -> Any:
        """Raises `ImportError`, or whatever else a package that was built for another torch raises."""
        missing: ImportError | None = None
        for name in cls.modules:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                missing = error
        raise missing or ImportError(cls.package)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        capability = compute_capability(device)
        if capability is not None and not (cls.min_capability <= capability <= (cls.max_capability or capability)):
            return f"is not for devices of compute capability {capability[0]}.{capability[1]}"
        try:
            module = cls._module()
        except ModuleNotFoundError:
            return f"needs the package {cls.package}, which is not installed"
        except Exception as error:  # built for another torch, or CUDA
            return f"needs the package {cls.package}, which cannot be imported ({type(error).__name__}: {error})"
        for function in ("flash_attn_with_kvcache", cls.paged_function):
            found = getattr(module, function, None)
            if found is None or not {cls.tables_parameter, "softcap"} <= set(inspect.signature(found).parameters):
                return f"needs a newer {cls.package}: {function} takes no {cls.tables_parameter} or no softcap"
        return None

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        assert self._new is None, "a layer was written and not attended to"
        if self.width is None:
            self.width = DecodeWidth.of(self._settings, page_size)
        self._longest = inputs.block_tables.shape[1] * page_size
        decoding = inputs.num_decodes == inputs.num_seqs == inputs.num_tokens
        self._fast = decoding and self.width.admits(inputs.block_tables.shape[1])
        if self._fast:
            self._lens = inputs.context_lens
            self._before = (self._lens - 1).clamp_(min=0)
            # A padded sequence has a table of zeros: it must not append to the block that padding reads.
            self._tables = inputs.block_tables.clamp(min=WRITE_BLOCK)
        else:
            self._step = PackedStep(inputs, page_size)

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._fast:
            self._new = (layer, key, value)  # the kernel does it
        else:
            self._step.write(layer, key, value)

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
        assert sinks is None
        shared = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": window_of(window, self._longest),
            "softcap": 0.0 if softcap is None else softcap,
        }
        if not self._fast:
            step = self._step
            shared |= {"cu_seqlens_q": step.query_starts, "max_seqlen_q": step.max_query_len, **self._keys_of(step)}
            shared[self.tables_parameter] = step.tables
            return step.clean(self._packed(query, layer.key, layer.value, **shared))
        new, self._new = self._new, None
        if new is not None:
            assert new[0] is layer, "another layer was written last"
            shared |= {"k": new[1].unsqueeze(1), "v": new[2].unsqueeze(1), "cache_seqlens": self._before}
        else:  # somebody has written the tokens into their pages already
            shared["cache_seqlens"] = self._lens
        shared[self.tables_parameter] = self._tables
        return self._decode(query.unsqueeze(1), layer.key, layer.value, **shared).squeeze(1)

    @abstractmethod
    def _keys_of(self, step: PackedStep) -> dict[str, Any]:
        """How the function for packed queries is told of the keys' lengths."""


class Flash2Backend(FlashBackend):
    """FlashAttention 2, from 2.6 on (soft cap), for devices of compute capability 8.0 and newer."""

    name = "flash2"
    page_size_multiple = 256
    modules = ("flash_attn",)
    package = "flash-attn"
    paged_function = "flash_attn_varlen_func"
    tables_parameter = "block_table"

    def _keys_of(self, step: PackedStep) -> dict[str, Any]:
        return {"cu_seqlens_k": step.key_starts, "max_seqlen_k": step.max_context_len}


class Flash3Backend(FlashBackend):
    """FlashAttention 3, for devices of compute capability 9.x. Any page size."""

    name = "flash3"
    modules = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
    package = "flash-attn-3"
    paged_function = "flash_attn_with_kvcache"
    tables_parameter = "page_table"
    min_capability = (9, 0)
    max_capability = (9, 9)

    @classmethod
    def shortcomings(cls, spec: ModelSpec, device: torch.device) -> list[str]:
        """A package may be built without parts of it."""
        found = super().shortcomings(spec, device)
        needed = {"PAGEDKV": True, "VARLEN": True}
        needed["LOCAL"] = any(layer.window is not None for layer in spec.layers)
        needed["SOFTCAP"] = spec.softcap is not None
        needed["FP16"] = spec.kv_dtype == torch.float16
        try:
            flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
        except (ImportError, KeyError, AttributeError):
            return found
        without = [part for part, wanted in needed.items() if wanted and flags.get(f"FLASHATTENTION_DISABLE_{part}")]
        return found + ([f"was built without {', '.join(without)}"] if without else [])

    def _keys_of(self, step: PackedStep) -> dict[str, Any]:
        return {"cache_seqlens": step.context_lens}
