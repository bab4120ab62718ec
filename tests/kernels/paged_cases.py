"""Paged attention problems for the kernels alone, and the kernels with a fault planted in their source."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cbengine.kernels.triton import decode, launch, varlen, walk
from cbengine.kernels.triton.attention_reference import attend_pages_reference
from tests.attention.packing import Work, step

NAN_BLOCK = 2


@dataclass
class Pages:
    """One step over one layer's pages. Whatever is no token of a sequence is NaN, but for the block that padding reads."""

    step: launch.PagedStep
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: Sequence[tuple[int, int]]

    def expected(self, scores: launch.Scores) -> torch.Tensor:
        """By the reference."""
        s = self.step
        return attend_pages_reference(
            self.query, self.key, self.value, s.tables, s.context_lens, s.query_starts,
            scale=scores.scale, window=scores.window, softcap=scores.softcap, sinks=scores.sinks,
        )  # fmt: skip

    def with_foreign_blocks(self, window: int) -> Pages:
        """The same, with the entries of the tables that no query may look at naming a block of NaN."""
        tables = self.step.tables.clone()
        for seq, (context, count) in enumerate(self.sequences):
            low = max(0, context - count - window + 1)
            tables[seq, : low // self.step.page_size] = NAN_BLOCK
            tables[seq, -(-context // self.step.page_size) :] = NAN_BLOCK
        return replace(self, step=replace(self.step, tables=tables))


def paged(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int,
    page_size: int,
    padded_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Pages:
    """Sequences of (context, query tokens), in any order."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-context // page_size) for context, _ in sequences]
    order = (torch.randperm(sum(needed), generator=rng) + 3).tolist()
    works = [Work(c, n, [order.pop() for _ in range(blocks)]) for (c, n), blocks in zip(sequences, needed, strict=True)]
    inputs = step([], works, padded_tokens=padded_tokens)
    shape = (sum(needed) + 3, page_size, kv_heads, dim)
    key, value = torch.full((2, *shape), torch.nan, dtype=dtype)
    key[0], value[0] = 0, 0
    for work in works:
        for at in range(work.context):
            place = work.blocks[at // page_size], at % page_size
            key[place] = torch.randn(kv_heads, dim, generator=rng)
            value[place] = torch.randn(kv_heads, dim, generator=rng)
    query = torch.randn(inputs.num_tokens, heads, dim, generator=rng).to(dtype)
    paged_step = launch.PagedStep(
        inputs.block_tables, inputs.context_lens, inputs.query_starts, inputs.num_tokens, inputs.num_seqs,
        inputs.max_query_len, inputs.max_context_len, page_size,
    )  # fmt: skip
    return Pages(paged_step, query, key, value, sequences)


def run(kernels: dict[str, Any], pages: Pages, *, tolerance: float = 2e-5, **scores: Any) -> None:
    """Both kernels, over memory that was not clean, against the reference. `kernels`: of `SOUND`, or `planted`."""
    wanted = launch.Scores(0.3, **scores)
    expected = pages.expected(wanted)
    before = {name: getattr(launch, name) for name in kernels}
    empty = torch.empty
    try:
        for name, kernel in kernels.items():
            setattr(launch, name, kernel)
        torch.empty = lambda *args, **options: empty(*args, **options).fill_(torch.nan)  # type: ignore[assignment]
        kv_heads, dim = pages.key.shape[2:]
        workspace = launch.Workspace(pages.query.shape[1], kv_heads, dim, torch.device("cpu"))
        found = launch.attend_pages(pages.step, pages.query, pages.key, pages.value, workspace, wanted)
    finally:
        torch.empty = empty
        for name, kernel in before.items():
            setattr(launch, name, kernel)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


SOUND: dict[str, Any] = {}
_MODULES: dict[str, ModuleType] = {"walk": walk, "decode": decode, "varlen": varlen}


def planted(folder: Path, place: str, right: str, wrong: str) -> dict[str, Any]:
    """The kernels with `right` replaced by `wrong` in the source of one of their modules, which are copied to `folder`."""
    changed: dict[str, ModuleType] = {}
    package = f"planted_{abs(hash((place, right, wrong)))}"
    for name, module in _MODULES.items():
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        if name == place:
            assert right in source, f"{right!r} is not in {name}.py any more"
            source = source.replace(right, wrong)
        source = source.replace("cbengine.kernels.triton.walk", f"{package}_walk")
        path = folder / f"{package}_{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        changed[name] = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed[name])
    return {
        "decode_kernel": changed["decode"].decode_kernel,
        "merge_kernel": changed["decode"].merge_kernel,
        "varlen_kernel": changed["varlen"].varlen_kernel,
    }
