"""What the cache costs: the block manager's share of a step, finding a long prefix, and swapping against recomputing.

    python benchmarks/cache.py [MODEL] [--json FILE] [--plot FILE]

MODEL: a folder or hub id for the last part; without it that part is left out. Figures are medians. Swapping and recomputing
are measured in turns, and what counts is their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cbengine import AsyncEngine
from cbengine.cache.geometry import CacheGeometry, block_views
from cbengine.cache.manager import CacheManager
from cbengine.cache.prefix import Chain
from cbengine.cache.swap import SwapCosts
from cbengine.devices import ThreadedDevice
from cbengine.execution.swapping import BlockMover
from cbengine.models.base import LayerSpec, ModelSpec
from cbengine.models.load import load

PAGE = 256


def spec(window: int | None = None) -> ModelSpec:
    """A small Llama's shape, optionally with three of four layers sliding."""
    full = LayerSpec("full_attention", 3, 64)
    slides = full if window is None else LayerSpec("sliding_attention", 3, 64, window)
    layers = (slides, slides, slides, full) * 8
    return ModelSpec("bench", layers, 9, 576, 1536, 49_152, 1 << 18, torch.float32, 0, (), {})


def median_us(work: Callable[[], object], repeats: int = 200) -> float:
    """Microseconds that `work` takes."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def step_cost(rows: int, window: int | None) -> float:
    """Microseconds for one decode step of `rows` sequences: a page for those that need one, the commit's look at all."""
    cache = CacheManager(CacheGeometry.of(spec(window), PAGE), 40 * rows, rows, 1 << 13, sharing=window is None)
    tokens = np.random.default_rng(0).integers(0, 40_000, (rows, 1 << 13), np.int32)
    every, computed = np.arange(rows), np.zeros(rows, np.int64)
    for row in range(rows):
        computed[row] = 200 + row % PAGE
        cache.admit(row, int(computed[row]) + 1, chain=Chain())

    def step() -> None:
        computed[:] += 1
        short = computed >= cache.ready
        for row in every[short].tolist():
            cache.reserve(row, int(computed[row]) + 1)
        cache.advance(every, computed, tokens)

    return median_us(step, 300)


def match_cost(length: int) -> tuple[float, float]:
    """Milliseconds to find a prompt of `length` tokens whose pages are all there: the first time, and when looked at again."""
    cache = CacheManager(CacheGeometry.of(spec(), PAGE), length // PAGE + 2, 2, 2 * length, sharing=True)
    tokens = np.random.default_rng(0).integers(0, 40_000, (2, 2 * length), np.int32)
    cache.admit(0, length + 1, chain=Chain())
    cache.advance(np.array([0]), np.array([length]), tokens)
    known = tokens[0, :length]
    assert len(cache.match(Chain(), known).nodes) == (length - 1) // PAGE
    chain = Chain()
    cache.match(chain, known)
    return median_us(lambda: cache.match(Chain(), known), 20) / 1e3, median_us(
        lambda: cache.match(chain, known), 20
    ) / 1e3


def swap_seconds(geometry: CacheGeometry, tokens: int) -> float:
    """Seconds to copy the pages of `tokens` tokens to the CPU pool and back."""
    device, blocks = ThreadedDevice(), geometry.blocks_for(tokens)
    device.attach()
    pool = device.device_buffer(((blocks + 2) * geometry.chunk_bytes,), torch.uint8)
    host = device.host_buffer((blocks * geometry.chunk_bytes,), torch.uint8)
    mover = BlockMover(device, geometry, pool, host, SwapCosts())
    pairs = [(range(2, blocks + 2), range(blocks)) for _ in block_views(pool, geometry)]

    def there_and_back() -> None:
        mover.to_host(pairs).wait()
        mover.to_device(pairs).wait()

    seconds = median_us(there_and_back, 5) / 1e6
    device.close()
    return seconds


async def prefill_seconds(engine: AsyncEngine, tokens: int) -> float:
    """Seconds until the first token of a prompt of `tokens` tokens."""
    prompt = np.random.default_rng(tokens).integers(100, 40_000, tokens).tolist()
    start = time.perf_counter()
    await engine.generate(prompt, max_new_tokens=1, temperature=0.0)
    return time.perf_counter() - start


async def swap_or_recompute(model: str, lengths: list[int]) -> list[dict[str, float]]:
    """For prompts of these lengths (the model has to take them): seconds for the pages there and back, and for computing
    them. The better of two, in turns."""
    runner = load(model, with_tokenizer=False).runner
    geometry = CacheGeometry.of(runner.spec, PAGE)
    blocks = geometry.blocks_for(max(lengths) + 1) + 1
    rows: list[dict[str, float]] = []
    async with AsyncEngine(runner, page_size=PAGE, num_blocks=blocks, allow_block_sharing=False) as engine:
        await prefill_seconds(engine, 64)
        for tokens in lengths:
            pairs = [(swap_seconds(geometry, tokens), await prefill_seconds(engine, tokens)) for _ in range(2)]
            swap, compute = min(s for s, _ in pairs), min(c for _, c in pairs)
            size = geometry.blocks_for(tokens) * geometry.block_bytes / 2**20
            rows.append({"tokens": tokens, "mib": size, "swap": swap, "recompute": compute, "ratio": compute / swap})
            print(
                f"  {tokens:>5} tokens ({size:4.0f} MiB): swap {swap * 1e3:7.1f} ms, recompute {compute * 1e3:9.1f} ms, "
                f"1 : {compute / swap:.0f}",
                flush=True,
            )
    return rows


def plot(path: str, rows: list[dict[str, float]]) -> None:
    """Seconds over tokens, both ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for name in ("recompute", "swap"):
        axes.loglog([row["tokens"] for row in rows], [row[name] for row in rows], marker="o", label=name)
    axes.set(xlabel="tokens of the preempted request", ylabel="seconds", title="Going on after a preemption")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 8000])
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--plot", help="draw swapping and recomputing into this file (needs MODEL and matplotlib)")
    args = parser.parse_args()
    figures: dict[str, Any] = {"block_manager_us": {}, "prefix_ms": {}, "preemption": []}
    print("block manager, one decode step")
    for name, window in (("full attention, prefix cache", None), ("hybrid, window 1024", 1024)):
        costs = {rows: step_cost(rows, window) for rows in (100, 1000)}
        figures["block_manager_us"][name] = costs
        print(f"  {name}: {costs[100]:.0f} us for 100 sequences, {costs[1000]:.0f} us for 1,000")
    first, again = match_cost(100_000)
    figures["prefix_ms"] = {"first": first, "again": again}
    print(f"prefix of 100,000 tokens found in {first:.2f} ms (looked at again: {again:.2f} ms)")
    if args.model:
        print("a preempted request, swapped out and in against computed again")
        figures["preemption"] = asyncio.run(swap_or_recompute(args.model, args.lengths))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)
    if args.plot:
        plot(args.plot, figures["preemption"])


if __name__ == "__main__":
    main()
