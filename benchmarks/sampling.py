"""Time to draw the tokens of one step, against transformers' processors with `torch.multinomial`, and against a forward.

    python benchmarks/sampling.py [--rows 1 32 128] [--vocab 49152 151936] [--threads 1] [--json FILE] [--model FOLDER]

Both sides see the same logits, in turns; the smallest of several times counts, since whatever else runs only adds. The
logits are those of a sharp language model: a few tokens stand out of a broad rest. With `--model` (a checkpoint, SmolLM2 for
the figures in the README) the engine also decodes as many streams at once as there are rows, greedily, and the table says
what part of such a step each kind of sampling would be, where the vocabulary is the model's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cbengine import AsyncEngine
from cbengine.devices.inline import InlineDevice
from cbengine.execution.inputs import SamplingInputs
from cbengine.execution.processors import PenaltyLoad, PenaltyTables, ProcessorInputs, process
from cbengine.execution.sampler import sample

KINDS = ("greedy", "temperature", "top-p 0.9", "top-k 50", "penalties")


def inputs(rows: int, kind: str) -> SamplingInputs:
    random, empty = kind not in ("greedy", "penalties"), torch.zeros(0, dtype=torch.int32)
    return SamplingInputs(
        temperature=torch.full((rows,), 0.8 if random else 0.0),
        top_k=torch.full((rows,), 50 if kind == "top-k 50" else 0, dtype=torch.int32),
        top_p=torch.full((rows,), 0.9 if kind == "top-p 0.9" else 1.0),
        min_p=torch.zeros(rows),
        uniform=torch.rand(rows),
        banned_rows=empty,
        banned_tokens=empty,
        any_random=random,
        any_top_k=kind == "top-k 50",
        any_top_p=kind == "top-p 0.9",
        any_min_p=False,
    )


def ours(logits: torch.Tensor, kind: str) -> Callable[[], object]:
    rows, vocab = logits.shape
    given = inputs(rows, kind)
    if kind != "penalties":
        return lambda: sample(logits, given)
    tables = PenaltyTables(InlineDevice(), vocab)
    said = np.arange(200, dtype=np.int32)
    tables.load([PenaltyLoad(place, said, said[:100]) for place in range(rows)])
    every, none = torch.arange(rows, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    changes = ProcessorInputs(
        bias_samples=none,
        bias_tokens=none,
        bias_values=torch.zeros(0),
        penalty_samples=every,
        penalty_places=every,
        penalty_lengths=torch.full((rows,), 300, dtype=torch.int32),
        longest=300,
        repetition=torch.full((rows,), 1.2),
        presence=torch.full((rows,), 0.5),
        frequency=torch.full((rows,), 0.5),
        mask_samples=none,
        masks=none.view(0, 0),
    )
    return lambda: sample(process(logits, changes, tables), given)


def theirs(logits: torch.Tensor, kind: str) -> Callable[[], object]:
    from transformers import RepetitionPenaltyLogitsProcessor

    if kind == "greedy":
        return lambda: logits.float().argmax(-1)
    said: Any = torch.arange(200).repeat(len(logits), 1)
    if kind == "penalties":
        penalty = RepetitionPenaltyLogitsProcessor(1.2)
        return lambda: penalty(said, logits.float().clone()).argmax(-1)
    warpers: list[Any] = [TemperatureLogitsWarper(0.8)]
    if kind == "top-p 0.9":
        warpers.append(TopPLogitsWarper(0.9))
    if kind == "top-k 50":
        warpers.append(TopKLogitsWarper(50))

    def run() -> torch.Tensor:
        scores = logits.float()
        for warper in warpers:
            scores = warper(said, scores)
        return torch.multinomial(scores.softmax(-1), 1)

    return run


def best_of(*fns: Callable[[], object], rounds: int = 7) -> list[float]:
    """The smallest time of each in milliseconds, taken in turns."""
    best = [float("inf")] * len(fns)
    for _ in range(rounds):
        for i, fn in enumerate(fns):
            start = time.perf_counter()
            fn()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
    return best


async def step_ms(model: str, rows: int, tokens: int = 20) -> float:
    """Milliseconds that a step takes in which `rows` streams decode, greedily."""
    settings: dict[str, Any] = {
        "max_requests_per_batch": rows,
        "num_blocks": 4 * rows,
        "page_size": 16,
        "safety_margin": 0.0,
    }
    async with AsyncEngine(model, **settings) as engine:
        streams = [engine.stream([i + 5], temperature=0, max_new_tokens=tokens, ignore_eos=True) for i in range(rows)]
        for stream in streams:
            await stream.__anext__()  # prompts are through
        start, before = time.perf_counter(), engine.stats().steps
        for stream in streams:
            await stream.result()
        return (time.perf_counter() - start) * 1e3 / max(1, engine.stats().steps - before)


def measure(args: argparse.Namespace, steps: dict[int, float], vocab_of_model: int) -> list[dict[str, object]]:
    """All the figures, printed as they come."""
    results: list[dict[str, object]] = []
    print(
        f"{'rows':>5} {'vocabulary':>10} {'kind':>12} {'ours, ms':>10} {'theirs, ms':>11} {'ratio':>6} {'of a step':>9}"
    )
    for vocab in args.vocab:
        for rows in args.rows:
            logits = torch.randn(rows, vocab) * 2
            logits[:, torch.randint(0, vocab, (20,))] += torch.linspace(2, 14, 20)
            for kind in KINDS:
                mine, other = best_of(ours(logits, kind), theirs(logits, kind))
                row: dict[str, object] = {
                    "rows": rows,
                    "vocab": vocab,
                    "kind": kind,
                    "ours_ms": mine,
                    "theirs_ms": other,
                }
                share = ""
                if vocab == vocab_of_model:
                    row["step_ms"] = steps[rows]
                    share = f"{mine / steps[rows]:.1%}"
                results.append(row)
                ratio = other / mine
                print(f"{rows:5} {vocab:10} {kind:>12} {mine:10.2f} {other:11.2f} {ratio:6.1f} {share:>9}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(0)
    steps: dict[int, float] = {}
    vocab_of_model = 0
    if args.model:
        from transformers import AutoConfig

        vocab_of_model = AutoConfig.from_pretrained(args.model).vocab_size
        for rows in args.rows:
            steps[rows] = asyncio.run(step_ms(args.model, rows))
            print(f"a step of the model with {rows} streams: {steps[rows]:.1f} ms", flush=True)
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        results = measure(args, steps, vocab_of_model)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
