"""The tables of `cbengine bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table

from cbengine.cli.bench_run import Run
from cbengine.config import EngineConfig
from cbengine.observe.timeline import Shares

ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("output tokens/s", lambda run: f"{run.figures.output_rate:,.1f}"),
    ("prompt and output tokens/s", lambda run: f"{run.figures.total_rate:,.1f}"),
    ("first token, p50 / p99, s", lambda run: pair(run.figures.ttft_p50, run.figures.ttft_p99, 1, 2)),
    ("between tokens, p50 / p99, ms", lambda run: pair(run.figures.itl_p50, run.figures.itl_p99, 1e3, 1)),
    (
        "  before a long prompt, p50 / p99, ms",
        lambda run: pair(run.figures.quiet_itl_p50, run.figures.quiet_itl_p99, 1e3, 1),
    ),
    ("  beside it, p99, ms", lambda run: number(run.figures.beside_itl_p99, 1e3, 1)),
    ("share of the floor", lambda run: percent(run.floor_share)),
    ("peak memory, MiB", lambda run: f"{run.peak_bytes / 2**20:,.0f}"),
    ("event loop lag, p99, ms", lambda run: number(run.lag_p99, 1e3, 2)),
    ("host time, µs a token", lambda run: f"{run.host_us_per_token:,.1f}"),
    ("a decode step waits for the host", lambda run: percent(run.shares.waited_share, 2)),
    ("steps from cancel to pages free", lambda run: number(run.steps_to_free, 1, 0)),
    ("cores in use: own / others", lambda run: pair(run.load.own_cores, run.load.other_cores, 1, 2)),
    ("", lambda run: "disturbed" if run.load.disturbed else ""),
)

COMPARED = {
    "output tokens/s": "output_rate",
    "first token, p50": "ttft_p50",
    "first token, p99": "ttft_p99",
    "between tokens, p50": "itl_p50",
    "between tokens, p99": "itl_p99",
    "peak memory": "peak_bytes",
    "host time a token": "host_us_per_token",
}


def number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value * scale:,.{digits}f}"


def pair(one: float | None, other: float | None, scale: float, digits: int) -> str:
    return "" if one is None else f"{number(one, scale, digits)} / {number(other, scale, digits)}"


def percent(share: float | None, digits: int = 0) -> str:
    return "" if share is None else f"{share:.{digits}%}"


def table(runs: Sequence[Run]) -> Table:
    """A column for each run, a row for each figure that at least one of them has."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column("", no_wrap=True)
    for run in runs:
        grid.add_column(run.workload.name, justify="right")
    for title, value in ROWS:
        cells = [value(run) for run in runs]
        if any(cells):
            grid.add_row(title, *cells)
    return grid


def derivations(runs: Sequence[Run]) -> list[str]:
    """How the shares of the floor come about, and what the steps that only decode consist of."""
    lines: list[str] = []
    for run in runs:
        found = run.floor.derivation(run.figures.wall) if run.floor is not None else []
        if run.shares.steps:
            found.append(_decode_steps(run.shares))
        lines += [f"{run.workload.name}: {line}" for line in found]
    return lines


def _decode_steps(shares: Shares) -> str:
    each = 1e3 / shares.steps
    return (
        f"{shares.steps:,} steps that only decode, {shares.period * each:.2f} ms each; in each the device waits "
        f"{shares.waited * each:.3f} ms for its start, and {shares.prepared * each:.3f} ms go by in it outside of forward and "
        f"sampling; meanwhile the host works {shares.host * each:.2f} ms"
    )


def settings_line(config: EngineConfig) -> str:
    """Every setting that has a value, for example "page_size=32, num_blocks=1456"."""
    values = ((field.name, getattr(config, field.name)) for field in fields(config))
    return "settings: " + ", ".join(f"{name}={value}" for name, value in values if value is not None)


def comparison(runs: Sequence[Run], earlier: Mapping[str, Mapping[str, Any]]) -> Table:
    """Ratios, now to then, of the runs that both have."""
    grid = Table(box=None, pad_edge=False, title="now / then", title_justify="left")
    both = [run.values() for run in runs if run.workload.name in earlier]
    grid.add_column("")
    for run in both:
        grid.add_column(run["name"], justify="right")
    for title, name in COMPARED.items():
        grid.add_row(title, *(ratio(run[name], earlier[run["name"]].get(name)) for run in both))
    return grid


def ratio(now: float | None, then: float | None) -> str:
    return f"{now / then:.2f}" if now is not None and then else ""
