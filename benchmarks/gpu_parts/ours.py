"""Our engine over one model: decoding at fixed batches, prompts, and requests that arrive by chance."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_parts import floor
from benchmarks.gpu_parts.machine import Machine, Rates
from benchmarks.gpu_parts.report import Row
from benchmarks.gpu_parts.shapes import random_prompts
from cbengine import AsyncEngine, Completion, EngineConfig
from cbengine.cli.measures import percentile
from cbengine.execution.build import Built

PROMPT = 128
_seeds = itertools.count()


@dataclass(slots=True)
class Step:
    """One step on the device: marks at its ends."""

    start: Any
    end: Any
    decodes: int
    chunks: int


class StepMeter:
    """Marks in the compute stream around every step of an engine (forward and sampling) from now on."""

    def __init__(self, engine: AsyncEngine, machine: Machine) -> None:
        self._machine = machine
        self.steps: list[Step] = []
        pipeline: Any = inside(engine).loop.parts.pipeline
        plain = pipeline._run

        def timed(slot: Any, inputs: Any, sampling: Any, filled: Any) -> None:
            start = machine.mark()
            plain(slot, inputs, sampling, filled)
            self.steps.append(Step(start, machine.mark(), filled.plan.num_decodes, len(filled.plan.chunks)))

        pipeline._run = timed

    def idle(self, batch: int) -> tuple[float, float] | None:
        """Of steps of `batch` decodes that follow each other: the share of the time between their ends that lies between a
        step and the next one, and that time in seconds. Clears what was recorded."""
        self._machine.synchronize()
        steps, self.steps = self.steps, []
        waited, periods = 0.0, []
        for one, other in itertools.pairwise(steps):
            if one.decodes == other.decodes == batch and not one.chunks and not other.chunks:
                waited += max(0.0, self._machine.between(one.end, other.start))
                periods.append(self._machine.between(one.end, other.end))
        return (waited / sum(periods), sum(periods) / len(periods)) if periods else None


def inside(engine: AsyncEngine) -> Built:
    worker = engine._worker
    assert worker is not None and worker.built is not None
    return worker.built


def engine_for(model: Any, machine: Machine, **settings: Any) -> AsyncEngine:
    """Not started."""
    sizes: dict[str, Any] = {
        "max_requests_per_batch": machine.size(256, 4),
        "max_model_len": machine.size(4096, 256),
        "max_memory_percent": machine.size(0.5, 0.01),
        "allow_block_sharing": False,
    }
    return AsyncEngine(model, config=EngineConfig(**{**sizes, **settings}))


async def ask(engine: AsyncEngine, prompts: Sequence[list[int]], new: int) -> tuple[float, list[Completion]]:
    """When the engine was let go with all of them, and the answers."""
    async with engine.paused():
        streams = [engine.stream(p, max_new_tokens=new, temperature=0.0, ignore_eos=True) for p in prompts]
        start = time.monotonic()
    return start, [await stream.result() for stream in streams]


async def decode(
    engine: AsyncEngine, model: Any, machine: Machine, rates: Rates, row: Row, meter: StepMeter | None
) -> Row:
    """`row.batch` requests that decode together; what counts is the time in which all of them do."""
    new = machine.size(max(96, min(256, 16384 // row.batch)), 8)
    length = machine.size(PROMPT, 8)
    await ask(engine, random_prompts(model, row.batch, length, next(_seeds)), 3)  # compiles what is not there yet
    if meter is not None:
        meter.steps.clear()
    before = engine.stats()
    _, done = await ask(engine, random_prompts(model, row.batch, length, next(_seeds)), new)
    after = engine.stats()
    times = [completion.metrics.token_times for completion in done]
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    counted = sum(1 for t in times for at in t if start < at <= end)
    if end > start:
        row.rate = counted / (end - start)
        row.step = row.batch / row.rate
    row.host = (after.host_seconds - before.host_seconds) / max(1, after.steps - before.steps)
    worker: Any = engine._worker
    row.floor = floor.decode_seconds(worker.loaded.runner.spec, rates, row.batch, length + new / 2)
    if meter is not None and (found := meter.idle(row.batch)) is not None:
        row.idle, row.step = found
    return row


async def prefill(engine: AsyncEngine, model: Any, machine: Machine, rates: Rates, row: Row) -> Row:
    """`row.batch` prompts at once, with one token of an answer each."""
    length = machine.size(2048, 32)
    start, done = await ask(engine, random_prompts(model, row.batch, length, next(_seeds)), 1)
    seconds = max(completion.metrics.token_times[-1] for completion in done) - start
    row.rate = row.batch * length / seconds
    worker: Any = engine._worker
    row.step, row.floor = seconds, floor.prefill_seconds(worker.loaded.runner.spec, rates, row.batch, length)
    return row


async def poisson(engine: AsyncEngine, model: Any, machine: Machine, row: Row, rate: float) -> Row:
    """`row.batch` requests, `rate` a second on average: prompts of 256 tokens, answers of 64."""
    rng = random.Random(0)
    prompts = random_prompts(model, row.batch, machine.size(256, 8), next(_seeds))
    at, done = 0.0, []

    async def one(prompt: list[int], arrival: float) -> Completion:
        await asyncio.sleep(arrival)
        return await engine.generate(prompt, max_new_tokens=machine.size(64, 4), temperature=0.0, ignore_eos=True)

    tasks = []
    for prompt in prompts:
        at += rng.expovariate(rate)
        tasks.append(asyncio.create_task(one(prompt, at)))
    start = time.monotonic()
    done = await asyncio.gather(*tasks)
    row.rate = sum(len(completion.token_ids) for completion in done) / (time.monotonic() - start)
    first = [completion.metrics.ttft or 0.0 for completion in done]
    gaps = [b - a for completion in done for a, b in itertools.pairwise(completion.metrics.token_times)]
    row.ttft = percentile(first, 50) or 0.0, percentile(first, 99) or 0.0
    row.itl = percentile(gaps, 50) or 0.0, percentile(gaps, 99) or 0.0
    row.note = f"{rate:g} requests/s,"
    return row
