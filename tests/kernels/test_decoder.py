"""A whole decoder in the kernels, against the same in plain torch, and against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cbengine.attention import LayerKV
from cbengine.attention.eager import EagerBackend
from cbengine.execution.inputs import StepInputs
from cbengine.kernels.decoder import Activation, Attention, Decoder, Layer, Linear, Norm, NormKind
from cbengine.kernels.native import NativeDecoder
from cbengine.kernels.reference import TorchDecoder
from tests.attention.packing import Work, step
from tests.kernels.variants import NAMES, variant

PAGE = 5
BLOCKS = 60
VOCAB = 90


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Maker:
    """Random parts of a decoder, the same at every call."""

    kind: NormKind
    biases: bool
    exact: bool
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=self.generator) * 0.3
        return x.bfloat16().float() if self.exact else x

    def norm(self, width: int, own: NormKind | None = None) -> Norm:
        own = own or self.kind
        return Norm(1 + self.normal(width), 1e-5, own, self.normal(width) if own is NormKind.LAYER else None)

    def linear(self, depth: int, *sizes: int) -> Linear:
        weights = [self.normal(n, depth) for n in sizes]
        return Linear(weights, [self.normal(n) if self.biases and i != 1 else None for i, n in enumerate(sizes)])


def rotary_of(base: float, rotary: int) -> Any:
    def tables(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(n)[:, None] * base ** (-torch.arange(0, rotary, 2) / rotary)
        return angles.cos(), angles.sin()

    return tables


def make_layer(
    maker: Maker, attention: Attention, hidden: int, wide: int, own_norm: str, norms: str, activation: Activation
) -> Layer:
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.dim
    widths = {"": None, "heads": (dim, dim), "whole": (heads * dim, kv_heads * dim)}[own_norm]
    if widths:
        attention.query_norm, attention.key_norm = (maker.norm(w, NormKind.RMS) for w in widths)
    before, after = "before" in norms, "after" in norms
    return Layer(
        qkv=maker.linear(hidden, heads * dim, kv_heads * dim, kv_heads * dim),
        attention=attention,
        out=maker.linear(heads * dim, hidden),
        gate_up=maker.linear(hidden, wide, wide),
        activation=activation,
        down=maker.linear(wide, hidden),
        before_attention=maker.norm(hidden) if before else None,
        after_attention=maker.norm(hidden) if after else None,
        before_mlp=maker.norm(hidden) if before else None,
        after_mlp=maker.norm(hidden) if after else None,
    )


def make(
    *,
    hidden: int = 48,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 8,
    rotary: int = 8,
    wide: int = 40,
    own_norm: str = "",
    norms: str = "before",
    kind: NormKind = NormKind.RMS,
    activation: Activation = Activation.SILU,
    biases: bool = False,
    tied: bool = True,
    exact: bool = True,
    cap: float | None = None,
    **attention: Any,
) -> Decoder:
    """Two layers of random weights, the same at every call."""
    maker = Maker(kind, biases, exact)
    embedding = maker.normal(VOCAB, hidden)
    layers = [
        make_layer(
            maker,
            Attention(heads, kv_heads, dim, rotary, table, 0, 0.3, **attention),
            *(hidden, wide, own_norm, norms, activation),
        )
        for table in (0, 1)
    ]
    return Decoder(
        embedding=embedding,
        embedding_scale=1.5,
        layers=layers,
        norm=maker.norm(hidden),
        head=Linear([embedding if tied else maker.normal(VOCAB, hidden)], [None]),
        head_cap=cap,
        rotaries=[rotary_of(1e4, rotary), rotary_of(100.0, rotary)],
        max_positions=2000,
    )


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biases": True, "tied": False},
    "norm of each head": {"own_norm": "heads"},
    "norm of all heads, late norms": {"own_norm": "whole", "norms": "after"},
    "four norms, caps": {"norms": "before after", "softcap": 3.0, "cap": 2.0, "activation": Activation.GELU_TANH},
    "clip, layer norm": {"clip": 0.4, "kind": NormKind.LAYER, "activation": Activation.RELU},
    "odd sizes, partly rotated": {"hidden": 50, "wide": 33, "dim": 6, "rotary": 4, "tied": False, "exact": False},
    "window": {"window": 6},
    "one head for each": {"kv_heads": 6, "dim": 16, "rotary": 16},
}


class Run:
    """A decoder over pages of its own."""

    def __init__(self, kind: str, name: str | None) -> None:
        decoder = make(**KINDS[kind])
        attention = decoder.layers[0].attention
        self.pool = torch.zeros(BLOCKS, 2, 2, PAGE, attention.kv_heads, attention.dim)
        self.window, self.softcap = attention.window, attention.softcap
        kv = [(self.pool[:, i, 0], self.pool[:, i, 1]) for i in range(2)]
        if name is None:
            self.layers = [LayerKV.of(*pair) for pair in kv]
            self.backend = EagerBackend()
            self.torch = TorchDecoder(decoder)
            self.native = None
        else:
            self.native = NativeDecoder(variant(name), decoder, lambda *_: None)
            self.native.bind(kv, PAGE)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        with torch.inference_mode():
            if self.native is not None:
                return self.native.forward(inputs)
            self.backend.begin(inputs, PAGE)
            return self.torch.forward(inputs, self._attend)

    def _attend(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.backend.write(self.layers[index], key, value)
        return self.backend.attend(self.layers[index], query, scale=0.3, window=self.window, softcap=self.softcap)


def steps(seed: int = 0) -> list[StepInputs]:
    """Chunks, then decoding beside chunks, with padding, over shuffled pages."""
    rng = np.random.default_rng(seed)
    blocks = (rng.permutation(BLOCKS - 2) + 2).tolist()
    a, b, c = blocks[:10], blocks[10:20], blocks[20:40]

    def work(table: list[int], context: int, count: int, samples: bool = True) -> Work:
        return Work(context, count, table[: -(-context // PAGE)], rng.integers(0, VOCAB, count).tolist(), samples)

    return [
        step([], [work(a, 7, 7), work(b, 23, 23, samples=False)]),
        step([work(a, 8, 1)], [work(b, 31, 8), work(c, 90, 90), Work(0, 1, [])], padded_tokens=2),
        step([work(a, 9, 1), work(b, 32, 1), work(c, 91, 1), Work(0, 1, [])]),
        step([work(a, 10, 1)], [work(b, 33, 1, samples=False)]),
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_same_as_in_torch(name: str, kind: str, size: int) -> None:
    torch.set_num_threads(size)
    native, reference = Run(kind, name), Run(kind, None)
    for inputs in steps():
        expected = reference(inputs)
        found = native(inputs)
        assert found.shape == expected.shape == (inputs.num_samples, VOCAB)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=5e-5)
    torch.testing.assert_close(native.pool[2:], reference.pool[2:], rtol=2e-5, atol=5e-5)
    assert not native.pool[0].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["plain", "four norms, caps", "window"])
def test_a_token_does_not_depend_on_its_company(name: str, kind: str) -> None:
    """Bit by bit: the same logits alone and in a crowd, in one chunk and in many, with any number of threads."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, 60)
    expected = None
    for threads, cuts, company in [
        (1, [0, 60], 0),
        (2, [0, 60], 3),
        (3, [0, 13, 59, 60], 0),
        (2, [0, 5, 58, 59, 60], 2),
    ]:
        torch.set_num_threads(threads)
        run = Run(kind, name)
        blocks = (rng.permutation(BLOCKS - 2) + 2).tolist()
        for begin, end in pairwise(cuts):
            mine = Work(end, end - begin, blocks[: -(-end // PAGE)], ids[begin:end].tolist())
            others = []
            for i in range(company):
                others.append(Work(15, 15, blocks[12 + 3 * i : 15 + 3 * i], rng.integers(0, VOCAB, 15).tolist()))
            logits = run(step([mine], others) if mine.count == 1 else step([], [mine, *others]))
            if end == 60:
                expected = logits[0] if expected is None else expected
                assert torch.equal(logits[0], expected)


def test_steps_of_every_size() -> None:
    """Buffers and rotary tables grow when they have to, and nothing of a larger step is left in a smaller one."""
    run, reference = Run("plain", "native"), Run("plain", None)
    for count, context in [(1, 1), (200, 250), (3, 3), (60, 280), (1, 281)]:
        blocks = list(range(2, 2 + -(-context // PAGE)))
        inputs = step([], [Work(context, count, blocks, [7] * count)])
        torch.testing.assert_close(run(inputs), reference(inputs), rtol=2e-5, atol=5e-5)


def test_more_rows_are_sampled_than_tokens_computed() -> None:
    """Prompt tokens that are scored may be asked for beside the token that is sampled."""
    run = Run("plain", "native")
    inputs = step([], [Work(70, 70, list(range(2, 16)), [5] * 70)])
    index = torch.cat([torch.arange(70, dtype=torch.int32)] * 2)
    out = run(replace(inputs, sample_index=index))
    assert out.shape == (140, VOCAB)
    assert torch.equal(out[:70], out[70:])


def test_positions_are_asked_for_as_far_as_the_model_goes() -> None:
    """Rotary embeddings that change with the longest sequence are not asked about longer ones."""
    decoder = make()
    asked: list[int] = []
    tables = decoder.rotaries[0]
    decoder.rotaries[0] = lambda n: (asked.append(n), tables(n))[1]
    decoder.max_positions = 100
    native = NativeDecoder(variant("native"), decoder, lambda *_: None)
    pool = torch.zeros(BLOCKS, 2, 2, PAGE, 2, 8)
    native.bind([(pool[:, i, 0], pool[:, i, 1]) for i in range(2)], PAGE)
    with torch.inference_mode():
        for context in (3, 100, 2):
            native.forward(step([], [Work(context, context, list(range(2, 2 + -(-context // PAGE))), [1] * context)]))
    assert asked == [100]


def test_a_step_in_parts() -> None:
    """For benchmarks: the last step again, kind by kind. Pages and results stay as they are."""
    run = Run("plain", "native")
    assert run.native is not None
    first, second = steps()[:2]
    expected = run(first)
    before = run.pool.clone()
    whole, parts = run.native.profile()
    assert whole > 0 and {name for name, seconds in parts.items() if seconds > 0} == {
        *("embedding", "norms", "products", "attention", "head", "picking samples", "rotary, writing pages")
    }
    assert torch.equal(run.pool, before) and torch.equal(run(first), expected)
    other = Run("plain", "native")
    other(first)
    assert torch.equal(run(second), other(second))
