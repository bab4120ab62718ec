"""Every attention backend that is here, over random block tables, against plain torch in float32 and against SDPA."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cbengine.attention import LayerKV
from cbengine.execution.inputs import StepInputs
from cbengine.kernels.triton.attention_reference import attend_pages_reference
from tests.attention.packing import Work, step
from tests.gpu.card import Card, attention_spec

pytestmark = pytest.mark.gpu

# (context, query tokens), as a GPU gets them and as the interpreter does. Without context: padding, as of a captured shape.
DECODE = (
    [(1, 1), (700, 1), (256, 1), (257, 1), (255, 1), (1300, 1), (17, 1), (0, 1)],
    [(1, 1), (20, 1), (16, 1), (0, 1)],
)
PREFILL = ([(300, 300), (1, 1), (64, 64), (600, 130), (257, 2)], [(20, 20), (18, 3)])
MIXED = ([(400, 1), (33, 1), (500, 200), (300, 300), (1100, 77)], [(17, 1), (20, 6)])
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 100},
    "soft cap": {"softcap": 20.0},
    "window and soft cap": {"window": 33, "softcap": 5.0},
    "sinks": {"sinks": True},
}
SHAPES = {"grouped": (8, 2, 128), "wide": (4, 1, 256), "plain": (4, 4, 64)}
BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the largest difference, as a share of the largest value: rounding of the result, and of the weights in bfloat16."""


@dataclass
class Problem:
    """One layer's step: pages, and what is to be written to them first."""

    inputs: StepInputs
    page_size: int
    pages: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def problem(card: Card, work: list[tuple[int, int]], page: int, shape: tuple[int, int, int], dtype: Any) -> Problem:
    heads, kv_heads, dim = shape
    rng = random.Random(len(work) * page)
    needed = [-(-context // page) for context, _ in work]
    order = rng.sample(range(3, 3 + sum(needed)), sum(needed))
    works = [Work(c, n, [order.pop() for _ in range(count)]) for (c, n), count in zip(work, needed, strict=True)]
    decodes = next((i for i, w in enumerate(works) if w.count > 1), len(works))
    inputs = card.move(step(works[:decodes], works[decodes:], padded_tokens=3 if works[decodes:] else 0))
    generator = torch.Generator().manual_seed(page)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype).to(card.device)

    pages = noise(2, 3 + sum(needed), page, kv_heads, dim)
    tokens = inputs.num_tokens
    return Problem(
        inputs, page, pages, noise(tokens, heads, dim), noise(tokens, kv_heads, dim), noise(tokens, kv_heads, dim)
    )


def outcome(backend: Any, p: Problem, window: Any, softcap: Any, sinks: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What it attends to, and the pages that it has written."""
    pages = p.pages.clone()
    layer = LayerKV.of(pages[0], pages[1])
    with torch.inference_mode():
        backend.begin(p.inputs, p.page_size)
        backend.write(layer, p.key, p.value)
        out = backend.attend(
            layer, p.query, scale=p.query.shape[2] ** -0.5, window=window, softcap=softcap, sinks=sinks
        )
    return out, pages


# Each form, shape and page size is a set of kernels to be compiled, which takes seconds: not all of them with each other.
VARIANTS = [("full", shape, page) for shape in SHAPES for page in (16, 256)]
VARIANTS += [(form, "grouped", 256 if form == "window" else 16) for form in FORMS if form != "full"]


@pytest.mark.parametrize(("form", "shape", "page"), VARIANTS)
@pytest.mark.parametrize("work", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_backends_agree(card: Card, work: Any, form: str, shape: str, page: int) -> None:
    sizes = card.size(SHAPES[shape], (4, 2, 16))
    given, page, given_work = FORMS[form], card.size(page, 16), card.size(*work)
    window, softcap, has_sinks = given.get("window"), given.get("softcap"), given.get("sinks", False)
    for dtype in card.dtypes:
        p = problem(card, given_work, page, sizes, dtype)
        sinks = torch.linspace(-2, 2, sizes[0], device=card.device).to(dtype) if has_sinks else None
        backends = card.backends(attention_spec(dtype, *sizes, window, softcap, has_sinks), page)
        found = {name: outcome(backend, p, window, softcap, sinks) for name, backend in backends.items()}
        pages = found["sdpa"][1]
        expected = attend_pages_reference(
            p.query.float(), pages[0].float(), pages[1].float(), p.inputs.block_tables, p.inputs.context_lens,
            p.inputs.query_starts, scale=sizes[2] ** -0.5, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        real = torch.tensor([context > 0 for context, count in given_work for _ in range(count)], device=card.device)
        real = real.nonzero()[:, 0]
        bound = BOUND[dtype] * float(expected.abs().max())
        for name, (out, written) in found.items():
            for other, reference in (("the reference", expected), ("sdpa", found["sdpa"][0])):
                error = float((out[real].float() - reference[real].float()).abs().max())
                assert error <= bound, f"{name} in {dtype} is {error:.1e} from {other}, {bound:.1e} are allowed"
            assert torch.isfinite(out).all(), name
            # Flash attention appends the new tokens itself, in the same places; block 1 is where padding is written.
            assert torch.equal(written[:, 2:], pages[:, 2:]), f"{name} has written other pages"


def test_a_full_table_of_one_sequence_is_split(card: Card) -> None:
    """One decoding sequence over a long context: the programs that share it are merged."""
    sizes, context = card.size((32, 8, 128), (4, 2, 16)), card.size(9000, 40)
    for dtype in card.dtypes:
        page = card.size(256, 16)
        p = problem(card, [(context, 1)], page, sizes, dtype)
        backends = card.backends(attention_spec(dtype, *sizes, None, None, False), page)
        found = {name: outcome(backend, p, None, None, None)[0].float() for name, backend in backends.items()}
        bound = BOUND[dtype] * float(found["sdpa"].abs().max())
        for name, out in found.items():
            assert float((out - found["sdpa"]).abs().max()) <= bound, name


def test_blocks_that_are_not_the_steps_are_never_read(card: Card) -> None:
    """Everything but the sequences' own pages is NaN, and so are the tails of those."""
    page, sizes = card.size(256, 16), card.size((8, 2, 128), (4, 2, 16))
    p = problem(card, card.size(*DECODE), page, sizes, torch.float32)
    mine = torch.zeros(p.pages.shape[1], page, dtype=torch.bool)
    tables, lens = p.inputs.block_tables.tolist(), p.inputs.context_lens.tolist()
    for table, length in zip(tables, lens, strict=True):
        for at in range(length):
            mine[table[at // page], at % page] = True
    mine[0] = mine[1] = True  # the reserved blocks are there to be read and written
    p.pages[:, ~mine.to(card.device)] = torch.nan
    spec = attention_spec(torch.float32, *sizes, None, None, False)
    for name in ("triton",):
        out, _ = outcome(card.backends(spec, page)[name], p, None, None, None)
        assert torch.isfinite(out).all(), name
