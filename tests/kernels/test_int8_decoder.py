"""A whole decoder whose linear layers multiply small integers, against the same in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cbengine.attention import LayerKV
from cbengine.attention.eager import EagerBackend
from cbengine.kernels.matrix import PackedMatrix
from cbengine.kernels.native import NativeDecoder
from cbengine.kernels.reference import Int8Linear, TorchDecoder
from tests.attention.packing import Work, step
from tests.kernels.test_decoder import BLOCKS, KINDS, PAGE, make, steps
from tests.kernels.variants import NAMES, variant

CASES = ["plain", "biases", "norm of all heads, late norms", "four norms, caps", "odd sizes, partly rotated"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pages(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    attention = make(**KINDS[kind]).layers[0].attention
    pool = torch.zeros(BLOCKS, 2, 2, PAGE, attention.kv_heads, attention.dim)
    return [(pool[:, i, 0], pool[:, i, 1]) for i in range(2)]


def native(kind: str, name: str) -> NativeDecoder:
    decoder = NativeDecoder(variant(name), make(**KINDS[kind]), lambda *_: None, int8=True)
    decoder.bind(pages(kind), PAGE)
    return decoder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", CASES)
def test_the_same_as_in_torch(name: str, kind: str) -> None:
    """Where the two round differently, an activation may become the next integer: rarely, and it changes little."""
    torch.set_num_threads(2)
    attention = make(**KINDS[kind]).layers[0].attention
    layers, backend = [LayerKV.of(*pair) for pair in pages(kind)], EagerBackend()

    def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend.write(layers[index], key, value)
        return backend.attend(
            layers[index], query, scale=attention.scale, window=attention.window, softcap=attention.softcap
        )

    reference, found = TorchDecoder(make(**KINDS[kind]), Int8Linear), native(kind, name)
    with torch.inference_mode():
        for inputs in steps():
            backend.begin(inputs, PAGE)
            expected, logits = reference.forward(inputs, attend), found.forward(inputs)
            errors = (logits - expected).abs() / expected.abs().max()
            assert errors.max() < 0.05
            assert errors.median() < 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_token_does_not_depend_on_its_company(name: str) -> None:
    """Bit by bit: alone and in a crowd, in one chunk and in two, with any number of threads."""
    ids = torch.randint(90, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks, expected = list(range(2, 10)), None
    with torch.inference_mode():
        for threads, cut, company in [(1, 40, 0), (2, 40, 3), (3, 17, 0), (1, 39, 1), (2, 1, 2)]:
            torch.set_num_threads(threads)
            decoder = native("plain", name)
            others = [Work(15, 15, list(range(20 + 3 * i, 23 + 3 * i)), [i] * 15) for i in range(company)]
            if cut < 40:
                decoder.forward(step([], [Work(cut, cut, blocks[: -(-cut // PAGE)], ids[:cut], False), *others]))
            last = Work(40, 40 - cut % 40, blocks, ids[cut % 40 :])
            logits = decoder.forward(step([last], others) if last.count == 1 else step([], [last, *others]))[0]
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", ["plain", "biases"])
def test_embeddings_are_exact(kind: str) -> None:
    """Tied to the output matrix or not, what goes into the first layer is the checkpoint's."""
    decoder = make(**KINDS[kind])
    table = decoder.embedding
    packed = NativeDecoder(variant("native"), decoder, lambda *_: None, int8=True)
    kept = packed._embedding
    assert kept is not None and torch.equal(kept.unpack()[0], table)
    assert not isinstance(kept, PackedMatrix) or not kept.int8
    assert packed._head.int8 and packed._layers[0].gate_up.int8
