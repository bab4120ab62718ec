"""The device under test, and the parts of `torch.cuda` that tests ask; on a dry run the CPU stands in for both."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import pytest
import torch

from cbengine.attention import AttentionBackend, available, choose
from cbengine.attention.triton import TritonBackend
from cbengine.devices.host import HostDevice
from cbengine.errors import UnsupportedFeatureError
from cbengine.execution.inputs import StepInputs
from cbengine.models import adapter, fuse
from cbengine.models.base import LayerSpec, ModelSpec

T = TypeVar("T")
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Card:
    """A GPU; or, where `dry`, the CPU with Triton's interpreter."""

    device: torch.device
    dry: bool

    @classmethod
    def dry_run(cls, patch: pytest.MonkeyPatch) -> Card:
        patch.setattr(TritonBackend, "devices", ())
        patch.setattr(adapter, "fuse", lambda *_, **__: None)  # transformers' own forward, which graphs may capture
        # Without its check of what is frozen, which takes the interpreter's own operations for the model's.
        patch.setattr(HostDevice, "capture", lambda self, key, fn: fn)
        return cls(torch.device("cpu"), dry=True)

    def size(self, real: T, dry: T) -> T:
        """A size for the GPU, and one that the interpreter can bear."""
        return dry if self.dry else real

    @contextmanager
    def fusing(self) -> Generator[None]:
        """Models are run by our kernels inside, as they always are on a GPU. (The interpreter takes its time.)"""
        if not self.dry:
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "fuse", fuse.fuse)
            patch.setattr(fuse, "_on_gpu", lambda model: model.device.type == "cpu")
            patch.setattr(fuse, "_PROBE_TOKENS", 3)
            yield

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16)

    @property
    def last(self) -> torch.device:
        """The last of the GPUs: cuda:1 where there are two."""
        return self.device if self.dry else torch.device("cuda", torch.cuda.device_count() - 1)

    @property
    def graphs(self) -> dict[str, object]:
        """Settings by which graphs are used, or stood in for, with a backend that can be captured."""
        return {"use_cuda_graph": True, "attention_backend": "triton" if self.dry else None}

    def backends(self, spec: ModelSpec, page_size: int) -> dict[str, AttentionBackend]:
        """A new one of every attention backend that can serve `spec` here, but for those of other devices."""
        found = {}
        for name in available():
            try:
                backend = choose(name, self.device, spec)
            except UnsupportedFeatureError:
                continue
            if page_size % backend.page_size_multiple == 0 and name != "cpu":
                found[name] = backend
        assert {"sdpa", "eager", "triton"} <= set(found), f"missing of {available()}: there are {sorted(found)}"
        return found

    def settle(self) -> None:
        """Wait for the device, and give back what nobody uses."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            # Workspaces that torch keeps for each stream that cuBLAS has ever run on: nobody's leak.
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Bytes in living tensors."""
        return 0 if self.dry else torch.cuda.memory_allocated(self.device)

    def peak(self, *, reset: bool = False) -> int:
        """The most of `allocated` since the last reset."""
        if self.dry:
            return 0
        if reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    @contextmanager
    def no_waiting(self) -> Generator[None]:
        """An operation for which the host would wait for the device is an error inside."""
        if self.dry:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def move(self, inputs: Inputs) -> Inputs:
        """A dataclass of tensors (`StepInputs`, `SamplingInputs`) with all of them on the device."""
        changes = {}
        for field in fields(inputs):  # type: ignore[arg-type]
            value = getattr(inputs, field.name)
            if isinstance(value, torch.Tensor):
                changes[field.name] = value.to(self.device)
        if isinstance(inputs, StepInputs):
            changes["sampling"] = self.move(inputs.sampling)
            changes["group_tables"] = tuple(table.to(self.device) for table in inputs.group_tables)
        return replace(inputs, **changes)  # type: ignore[type-var]


def attention_spec(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, sinks: bool
) -> ModelSpec:
    """Of a model with one layer, for the choice of a backend."""
    kind = "full_attention" if window is None else "sliding_attention"
    return ModelSpec(
        name="a layer",
        layers=(LayerSpec(kind, kv_heads, dim, window),),
        num_heads=heads,
        hidden_size=heads * dim,
        intermediate_size=heads * dim,
        vocab_size=128,
        max_model_len=1 << 14,
        kv_dtype=dtype,
        weight_bytes=0,
        eos_token_ids=(),
        generation_defaults={},
        softcap=softcap,
        has_sinks=sinks,
    )


def share_equal(found: Sequence[object], expected: Sequence[object]) -> float:
    """How many of them are the same, from 0 to 1."""
    assert len(found) == len(expected)
    return sum(a == b for a, b in zip(found, expected, strict=True)) / max(1, len(expected))
