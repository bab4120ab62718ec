"""The masks that torch's attention is given on a GPU lie where its kernels can read them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cbengine.attention import LayerKV
from cbengine.attention.sdpa import SdpaBackend
from cbengine.execution.inputs import StepInputs
from tests.attention.packing import Work, step

PAGE = 16


def _on_meta(inputs: StepInputs) -> StepInputs:
    """As if on a GPU: the device's tensors cannot be read."""
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return replace(inputs, **{k: v.to("meta") for k, v in tensors.items() if isinstance(v, torch.Tensor)})


def _misread(mask: torch.Tensor) -> bool:
    """Whether the memory-efficient kernel is let at an address that it cannot read 16 bytes from. torch asks the strides alone:
    where each but the last is a multiple of 8 it takes the mask as it is, else it makes a padded copy."""
    as_it_is = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    return as_it_is and mask.storage_offset() * mask.element_size() % 16 != 0


def _masks(monkeypatch: pytest.MonkeyPatch, inputs: StepInputs, dtype: torch.dtype, window: int | None) -> list[Any]:
    given: list[Any] = []
    real = F.scaled_dot_product_attention

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs["attn_mask"] is not None:
            given.append(kwargs["attn_mask"])
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    backend = SdpaBackend()
    pages = torch.empty(2, 64, PAGE, 2, 16, dtype=dtype, device="meta")
    backend.begin(_on_meta(inputs), PAGE)
    query = torch.empty(inputs.num_tokens, 4, 16, dtype=dtype, device="meta")
    out = backend.attend(LayerKV.of(*pages), query, scale=0.25, window=window)
    assert out.shape == query.shape
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_masks_are_aligned_wherever_a_chunk_begins(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None
) -> None:
    """A chunk's mask is cut out of a kept one, at a column that depends on its position."""
    blocks = list(range(2, 40))
    for past in (1, 2, 3, 4, 5, 8, 33):
        chunks = [Work(past + count, count, blocks[: -(-(past + count) // PAGE)]) for count in (7, 8, 300)]
        given = _masks(monkeypatch, step([], chunks), dtype, window)
        assert len(given) >= 4
        assert not any(_misread(mask) for mask in given), past


def test_masks_of_decoding_sequences_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = [Work(context, 1, list(range(2, 10))) for context in (61, 17, 33, 64)]
    (mask,) = _masks(monkeypatch, step(decodes), torch.bfloat16, None)
    assert mask.shape[-1] == 64 and not _misread(mask)


def test_what_is_misread() -> None:
    """A cut that begins in the middle of 16 bytes, with strides that look as if it did not; torch copies the other ones."""
    kept = torch.zeros(256, 1024 + 256)
    assert _misread(kept[:8, 3:40]) and not _misread(kept[:8, 4:40])
    assert not _misread(torch.zeros(256, 1027)[:8, 3:40]) and not _misread(kept[:8, 3:40].contiguous())
