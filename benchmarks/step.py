"""Where the time of a step goes on a CPU: products, attention, norms, and what is lost between them.

    python -m benchmarks.step MODEL [--workload offline] [--every 8] [--json FILE] [--plot FILE.png]

Serves a workload of `cbengine bench` on default settings and runs every eighth step a second time by its parts. Reported by
the number of tokens in a step, beside the rate that torch's own matrix product reaches on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from cbengine import AsyncEngine
from cbengine.cli.clients import ask, warm_up
from cbengine.cli.floor import measure_rates, parameters
from cbengine.cli.monitor import Monitor
from cbengine.cli.workload import NAMES, make, text
from cbengine.kernels.native import NativeDecoder
from cbengine.models.load import inspect

BINS = (8, 32, 64, 128, 512)


@dataclass(slots=True)
class Profiled:
    """One step: its tokens, how many were sampled, and seconds."""

    tokens: int
    samples: int
    whole: float
    parts: dict[str, float]


class Profiler:
    """While it is entered, every so many steps are run again by their parts."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, 0
        self.steps: list[Profiled] = []
        self._forward: Any = NativeDecoder.forward

    def __enter__(self) -> Profiler:
        profiler = self

        def forward(decoder: NativeDecoder, inputs: Any) -> torch.Tensor:
            logits = profiler._forward(decoder, inputs)
            profiler.seen += 1
            if profiler.seen % profiler.every == 0:
                whole, parts = decoder.profile()
                profiler.steps.append(Profiled(inputs.num_tokens, inputs.num_samples, whole, parts))
            return logits

        NativeDecoder.forward = forward  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        NativeDecoder.forward = self._forward  # type: ignore[method-assign]


async def run(model: str, name: str, every: int) -> tuple[list[Profiled], tuple[int, int]]:
    """The steps of a workload, and the weights that a token is multiplied with (of the layers, of the head)."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text(), add_special_tokens=False, verbose=False)["input_ids"]
    async with AsyncEngine.from_pretrained(model) as engine:
        plan = await engine.plan()
        workload = make(name, ids, requests=64, rate=1.0, seed=0, max_len=plan.max_model_len)
        await warm_up(engine, workload)
        with Profiler(every) as profiler:
            await ask(engine, workload)
    if not profiler.steps:
        raise SystemExit(f"{model} is not run as a whole by the CPU kernels, so there is nothing to look into")
    return profiler.steps, parameters(inspect(model))


@dataclass(slots=True)
class Row:
    """Steps with about as many tokens: means, in ms."""

    tokens: str
    steps: int
    mean_tokens: float
    whole: float
    parts: dict[str, float]
    """By kind. "between": the rest, in which one thread waits for another."""
    products_gflops: float
    """Rate of the layers' products by themselves, in 10⁹ operations a second."""


def rows(steps: Sequence[Profiled], weights: tuple[int, int]) -> list[Row]:
    found: list[Row] = []
    for low, high in zip((0, *BINS[:-1]), BINS, strict=True):
        chosen = [step for step in steps if low < step.tokens <= high]
        if not chosen:
            continue
        count = len(chosen)
        tokens, whole = sum(s.tokens for s in chosen) / count, sum(s.whole for s in chosen) / count * 1e3
        parts = {name: sum(s.parts[name] for s in chosen) / count * 1e3 for name in chosen[0].parts}
        rate = 2 * weights[0] * tokens / parts["products"] / 1e6
        parts["between"] = whole - sum(parts.values())
        found.append(Row(f"{low + 1} to {high}", count, tokens, whole, parts, rate))
    return found


def show(found: list[Row], rate: float) -> None:
    table = Table(title=f"ms a step; torch's own product reaches {rate / 1e9:.0f} GFLOP/s here")
    table.add_column("tokens in the step")
    for row in found:
        table.add_column(row.tokens, justify="right")
    table.add_row("steps looked at", *(str(row.steps) for row in found))
    table.add_row("tokens, mean", *(f"{row.mean_tokens:.0f}" for row in found))
    table.add_row("the whole step", *(f"{row.whole:.1f}" for row in found))
    for name in found[0].parts:
        table.add_row(name, *(f"{row.parts[name]:.2f} ({row.parts[name] / row.whole:.0%})" for row in found))
    table.add_row("products, GFLOP/s", *(f"{row.products_gflops:.0f}" for row in found))
    Console().print(table)


def plot(found: list[Row], path: Path) -> None:
    """A bar for each row, cut into its parts as shares of the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, left = figure.subplots(), [0.0] * len(found)
    labels = [f"{row.tokens} tokens\n{row.whole:.0f} ms" for row in found]
    for name in found[0].parts:
        shares = [max(0.0, row.parts[name]) / row.whole for row in found]
        if max(shares) > 0.002:
            axes.barh(labels, shares, left=left, label=name)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlabel("share of the step")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--workload", default="offline", choices=NAMES)
    parser.add_argument("--every", type=int, default=8, metavar="N", help="profile every Nth step")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    if args.every < 1:
        parser.error("--every must be at least 1")
    with Monitor() as monitor:
        rates = measure_rates(monitor)
    found = rows(*asyncio.run(run(args.model, args.workload, args.every)))
    show(found, rates.gemm)
    if args.json:
        values = {"torch_gflops": rates.gemm / 1e9, "rows": [asdict(row) for row in found]}
        args.json.write_text(json.dumps(values, indent=1), encoding="utf-8")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
