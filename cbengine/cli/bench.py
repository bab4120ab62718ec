"""`cbengine bench`: what an engine does for many clients at once on this machine.

Runs workloads through the public streams, one coroutine for each request, and tells what the clients saw, what it cost, and how
far that is from what the machine could do at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cbengine.cli.bench_report import comparison, derivations, settings_line, table
from cbengine.cli.bench_run import Run, serve
from cbengine.cli.clients import steps_to_free, warm_up
from cbengine.cli.failures import CommandError, require_writable
from cbengine.cli.floor import Rates, floor, measure_rates
from cbengine.cli.monitor import Monitor
from cbengine.cli.options import make_engine
from cbengine.cli.workload import NAMES, Workload, load, make, text
from cbengine.config import EngineConfig
from cbengine.engine import AsyncEngine
from cbengine.errors import CBEngineError
from cbengine.loading import inspect

FORMAT = 1
"""Of the JSON file."""


def run(args: argparse.Namespace) -> None:
    """Run the command. Raises `CommandError` if the engine cannot serve, or a file cannot be read or written."""
    draw = None
    check(args)
    if args.plot:
        from cbengine.cli.bench_plot import draw, require_kind, require_matplotlib

        require_matplotlib()
        require_kind(Path(args.plot))
    earlier = None if args.compare is None else read(Path(args.compare))
    if args.num_threads is not None:
        args.settings = [*args.settings, f"num_threads={args.num_threads}"]
    console = Console(highlight=False)
    try:
        result = asyncio.run(_bench(args, console))
    except* (CBEngineError, OSError, ValueError) as errors:
        raise CommandError(str(_first(errors))) from errors
    show(result, console, earlier)
    try:
        if args.json:
            Path(args.json).write_text(json.dumps(as_json(result), indent=1), encoding="utf-8")
        if draw is not None:
            draw(result.runs, Path(args.plot), args.model)
    except OSError as error:
        raise CommandError(str(error)) from error


def check(args: argparse.Namespace) -> None:
    """Find what is wrong with files before minutes have gone into loading and measuring. Raises `CommandError`."""
    for option in ("json", "plot", "trace"):
        if getattr(args, option):
            require_writable(f"--{option}", Path(getattr(args, option)))
    for name in args.workload:
        if name not in NAMES:
            load(Path(name))


class Result:
    """Everything that one call of the command has measured."""

    def __init__(self, model: str, config: EngineConfig, runs: list[Run], rates: Rates | None = None) -> None:
        self.model = model
        self.config = config
        self.runs = runs
        self.rates = rates


async def _bench(args: argparse.Namespace, console: Console) -> Result:
    engine, trace = make_engine(args), None if args.trace is None else Path(args.trace)
    spec_options: dict[str, Any] = {}
    with Monitor(sample_seconds=1.0) as monitor:
        console.print(f"Loading {args.model} ...", style="dim", markup=False)
        async with engine:
            workloads = make_workloads(args, engine)
            result = Result(args.model, engine.config, await measure(engine, workloads, monitor, console, trace))
        console.print("Measuring the machine ...", style="dim")
        result.rates = await asyncio.to_thread(measure_rates, monitor)
    spec = inspect(args.model, result.config, spec_options)
    size = bytes_per_weight(result.config)
    for one in result.runs:
        if one.workload.at_once:
            one.floor = floor(
                one.workload, spec, result.rates, steps=one.steps, computed=one.computed, bytes_per_weight=size
            )
    return result


def make_workloads(args: argparse.Namespace, engine: AsyncEngine) -> list[Workload]:
    """The workloads that the options ask for, cut out of the text that comes with Python, in the model's tokens."""
    longest = min(engine.memory_plan.max_model_len, engine.memory_plan.capacity_tokens)
    ids: list[int] = []
    workloads: list[Workload] = []
    for name in args.workload:
        if name not in NAMES:
            workloads.append(load(Path(name)))
            continue
        ids = ids or engine.tokenizer.encode(text(), add_special_tokens=False)
        for rate in args.rate if name == "poisson" else [1.0]:
            options = {"requests": args.requests, "rate": rate, "seed": args.seed, "max_len": longest}
            workloads.append(make(name, ids, **options))
    for workload in workloads:
        if workload.longest > longest:
            raise CommandError(
                f"{workload.name} has sequences of {workload.longest} tokens; this engine takes {longest}"
            )
    return workloads


async def measure(
    engine: AsyncEngine,
    workloads: Sequence[Workload],
    monitor: Monitor,
    console: Console | None = None,
    trace: Path | None = None,
) -> list[Run]:
    """Run the workloads one after the other on a started engine.

    `trace`: where to write the steps; with several workloads, their names are added to the file's.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    runs: list[Run] = []
    await warm_up(engine, workloads[0])
    with Progress(*columns, console=console or Console(quiet=True), disable=not sys.stderr.isatty()) as progress:
        for workload in workloads:
            bar = progress.add_task(workload.name, total=workload.output_tokens)
            one = await serve(engine, workload, monitor, lambda count, bar=bar: progress.advance(bar, count))
            runs.append(one)
            if trace is not None:
                path = trace if len(workloads) == 1 else trace.with_stem(f"{trace.stem}-{workload.name}")
                await asyncio.to_thread(one.timeline.write, path)
    freed = await steps_to_free(engine, workloads[0])
    for one in runs:
        one.steps_to_free = freed
    return runs


def bytes_per_weight(config: EngineConfig) -> float:
    """As small as the weights can be kept without a change: fp16 holds what a checkpoint in 16 bits says."""
    return 1.0 if getattr(config, "quantization", None) == "int8" else 2.0


def _first(error: BaseException) -> BaseException:
    """The first error of a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def show(result: Result, console: Console, earlier: dict[str, Any] | None = None) -> None:
    """Print the tables."""
    for one in result.runs:
        console.print(str(one.workload), style="dim", markup=False)
    console.print(table(result.runs))
    for line in derivations(result.runs):
        console.print(line, markup=False, soft_wrap=True)
    console.print(settings_line(result.config), style="dim", markup=False, soft_wrap=True)
    if earlier is not None:
        console.print(comparison(result.runs, earlier))


def as_json(result: Result) -> dict[str, Any]:
    """What the JSON file holds."""
    config = {field.name: getattr(result.config, field.name) for field in fields(result.config)}
    rates = None if result.rates is None else asdict(result.rates)
    return {
        "format": FORMAT,
        "model": result.model,
        "settings": config,
        "rates": rates,
        "runs": [one.values() for one in result.runs],
    }


def read(path: Path) -> dict[str, Any]:
    """An earlier JSON file. Raises `CommandError` if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise CommandError(f"{path} has format {value['format']!r}, this version reads {FORMAT}")
        return {one["name"]: one for one in value["runs"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is no JSON of `cbengine bench`: {error}") from error
