"""What a graph would freeze is found where it varies: each value that can be frozen is varied once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cbengine.devices import InlineDevice
from cbengine.devices.baked import BakedValueError
from cbengine.execution.host_reads import HostReadError, NoHostReads


class Host:
    """What the host changes between two replays."""

    def __init__(self) -> None:
        self.number = 3
        self.factor = 0.5
        self.tensor = torch.arange(8.0)
        self.other = torch.arange(8.0)
        self.array = np.arange(4, dtype=np.float32)
        self.extra = False
        self.lengths = torch.tensor([2, 3])


VARIED: dict[str, tuple[Callable[[Host], object], Callable[[Host], None], str]] = {
    "a length": (lambda h: h.tensor[: h.number].sum(), lambda h: setattr(h, "number", 4), "3.*was|was 3"),
    "a factor": (lambda h: h.tensor * h.factor, lambda h: setattr(h, "factor", 0.25), "0.25, which was 0.5"),
    "a scale": (lambda h: h.tensor.add(1, alpha=h.number), lambda h: setattr(h, "number", 4), "4, which was 3"),
    "memory": (lambda h: h.tensor + 1, lambda h: setattr(h, "tensor", h.other), "memory at"),
    "a view": (lambda h: h.tensor[h.number] + 1, lambda h: setattr(h, "number", 4), "4, which was 3"),
    "a shape": (lambda h: torch.zeros(h.number), lambda h: setattr(h, "number", 4), "4, which was 3"),
    "a host array": (
        lambda h: h.tensor[:4] * torch.from_numpy(h.array.copy()),
        lambda h: setattr(h, "array", h.array + 1),
        "memory at",
    ),
    "one operation more": (
        lambda h: h.tensor.sum() if h.extra else None,
        lambda h: setattr(h, "extra", True),
        "has 1 operations, and had 0",
    ),
    "another operation": (
        lambda h: h.tensor.sum() if h.extra else h.tensor.amax(),
        lambda h: setattr(h, "extra", True),
        "aten.sum.*which was aten.amax",
    ),
    "the longest of what is on the device": (
        lambda h: torch.arange(int(h.lengths.max())),
        lambda h: h.lengths.fill_(5).__class__,  # type: ignore[arg-type,return-value]
        "5, which was 3",
    ),
}


@pytest.mark.parametrize("name", list(VARIED))
def test_a_frozen_value_is_found(name: str) -> None:
    compute, vary, message = VARIED[name]
    host, device = Host(), InlineDevice()
    replay = device.capture(("decode", 8), lambda: compute(host))
    replay()
    vary(host)
    with pytest.raises(BakedValueError, match=rf"\('decode', 8\).*({message})"):
        replay()


def test_values_in_memory_may_vary() -> None:
    host, device = Host(), InlineDevice()
    out = torch.zeros(4)

    def compute() -> None:
        made = torch.arange(4) * 2  # memory of its own, elsewhere each time
        out.copy_(host.tensor[made] + host.lengths.sum())

    replay = device.capture("key", compute)
    host.tensor.add_(1)
    host.lengths.add_(1)
    replay()
    assert out.tolist() == [1 + 7, 3 + 7, 5 + 7, 7 + 7]


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "int": lambda t: int(t.max()),
    "if": lambda t: 1 if (t > 0).any() else 0,
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "a mask as an index": lambda t: t[t > 1],
    "writing through a mask": lambda t: t.index_put((t > 1,), torch.zeros(())),
    "argwhere": lambda t: torch.argwhere(t > 0),
    "comparing": lambda t: torch.equal(t, t),
    "unique": lambda t: t.unique(),
    "bincount": lambda t: torch.bincount(t),
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "repeat_interleave": lambda t: torch.repeat_interleave(t),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", list(READS))
def test_what_makes_the_host_wait_is_found(name: str, inference: bool) -> None:
    tensor = torch.arange(4)
    with pytest.raises(HostReadError, match="makes the host wait"), torch.inference_mode(inference), NoHostReads():
        READS[name](tensor)


def test_what_does_not_is_let_through() -> None:
    tensor = torch.arange(4)
    with torch.inference_mode(), NoHostReads():
        tensor[tensor.flip(0)] = tensor * 2
        torch.where(tensor > 1, tensor, 0).cumsum(0)
        tensor.masked_fill_(tensor > 3, 0)
        tensor.clone().copy_(tensor)
        torch.repeat_interleave(tensor, 2, output_size=8)
