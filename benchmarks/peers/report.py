"""Tables, ratios and the plot, from the JSON of `python -m benchmarks.peers`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

METRICS: dict[str, tuple[str, float, int, bool]] = {
    # name in the JSON: title, scale, digits, whether more is better
    "output_rate": ("output tok/s", 1.0, 1, True),
    "ttft_p50": ("TTFT p50, s", 1.0, 2, False),
    "ttft_p99": ("TTFT p99, s", 1.0, 2, False),
    "itl_p50": ("ITL p50, ms", 1e3, 1, False),
    "itl_p99": ("ITL p99, ms", 1e3, 1, False),
    "quiet_itl_p50": ("quiet ITL p50, ms", 1e3, 1, False),
    "beside_itl_p99": ("ITL p99 beside the long prompt, ms", 1e3, 1, False),
    "peak_bytes": ("peak MiB", 2.0**-20, 0, False),
}

OURS = {"fp32": "cbengine", "int8": "cbengine-int8"}
"""What peers of each precision are compared with."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure over the rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        return Spread(statistics.median(known), min(known), max(known)) if known else None

    def text(self, scale: float, digits: int) -> str:
        """For example "170.8 (159.2 to 171.3)"."""
        median, low, high = (f"{value * scale:,.{digits}f}" for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low} to {high})"


def ratios(rows: Sequence[Row], workload: str, peer: str, metric: str) -> Spread | None:
    """How many times better than `peer` we are in `metric`, round by round: above 1 is better, whatever the metric."""
    theirs = {row["round"]: row for row in rows if row["engine"] == peer and row["workload"] == workload}
    found = []
    for row in rows:
        other = theirs.get(row["round"])
        if other is None or row["workload"] != workload or row["engine"] != OURS[other["precision"]]:
            continue
        mine, its = row[metric], other[metric]
        if mine and its:
            found.append(mine / its if METRICS[metric][3] else its / mine)
    return Spread.of(found)


def show(result: dict[str, Any], console: Console) -> None:
    """Print, for each workload, the figures of every engine and our ratios to it: median (lowest to highest round)."""
    rows: list[Row] = result["runs"]
    console.print(f"{result['model']}, {result['threads']} threads", markup=False)
    for workload in _unique(row["workload"] for row in rows):
        here = [row for row in rows if row["workload"] == workload]
        metrics = [name for name in METRICS if any(row[name] is not None for row in here)]
        engines = _unique(row["engine"] for row in here)
        console.print(_figures(workload, here, engines, metrics))
        ahead = _ratios(workload, here, engines, metrics)
        if ahead.row_count:
            console.print(ahead)


def _figures(workload: str, rows: Sequence[Row], engines: Sequence[str], metrics: Sequence[str]) -> Table:
    table = Table(title=workload, title_justify="left", box=None, pad_edge=False)
    for title in ("", *engines):
        table.add_column(title, justify="right" if title else "left", no_wrap=not title)
    of = {engine: [row for row in rows if row["engine"] == engine] for engine in engines}

    def line(title: str, cell: Callable[[list[Row]], str]) -> None:
        table.add_row(title, *(cell(of[engine]) for engine in engines))

    for name in metrics:
        title, scale, digits, _ = METRICS[name]
        line(title, lambda found, n=name, s=scale, d=digits: _text(Spread.of(row[n] for row in found), s, d))
    line("start, s", lambda found: _text(Spread.of(row["start_seconds"] for row in found), 1.0, 0))
    line("other cores, most", lambda found: f"{max(row['other_cores'] for row in found):.2f}")
    line("rounds: all / disturbed", lambda found: f"{len(found)} / {sum(row['disturbed'] for row in found)}")
    line("requests with other tokens", lambda found: _counts(row["differing"] for row in found))
    line("answers of a wrong length", lambda found: str(max(row["wrong_length"] for row in found)))
    return table


def _ratios(workload: str, rows: Sequence[Row], engines: Sequence[str], metrics: Sequence[str]) -> Table:
    table = Table(title="times better than", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    peers = [engine for engine in engines if engine not in OURS.values()]
    for peer in peers:
        table.add_column(peer, justify="right")
    for name in metrics:
        cells = [_text(ratios(rows, workload, peer, name), 1.0, 2) for peer in peers]
        if any(cells):
            table.add_row(METRICS[name][0], *cells)
    return table


def _text(spread: Spread | None, scale: float, digits: int) -> str:
    return "" if spread is None else spread.text(scale, digits)


def _counts(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(max(known)) if known else "?"


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


_TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


def plot(result: dict[str, Any], path: Path) -> None:
    """A picture of the ratios: a panel for each workload, a point for each metric and peer, from lowest to highest round.

    Raises:
        OSError, ValueError: the file cannot be written, or is of an unknown kind.
    """
    from matplotlib.figure import Figure

    rows: list[Row] = result["runs"]
    workloads = _unique(row["workload"] for row in rows)
    peers = _unique(row["engine"] for row in rows if row["engine"] not in OURS.values())
    figure = Figure(figsize=(4.2 * len(workloads), 4.2), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        names = [n for n in METRICS if any(ratios(rows, workload, peer, n) for peer in peers)]
        for number, peer in enumerate(peers):
            for at, name in enumerate(names):
                if (spread := ratios(rows, workload, peer, name)) is None:
                    continue
                error = [[spread.median - spread.low], [spread.high - spread.median]]
                height = at + (number - (len(peers) - 1) / 2) * 0.2
                label = peer if at == 0 else None
                axes.errorbar(spread.median, height, xerr=error, fmt="o", capsize=3, color=f"C{number}", label=label)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(names)), [METRICS[name][0] for name in names])
        axes.invert_yaxis()
        axes.set_title(workload)
        axes.set_xlabel("times better (right of the line: cbengine)")
        axes.grid(axis="x", alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(peers)))
    title = f"{Path(result['model']).name}, {result['threads']} threads\nmedian, lowest and highest round"
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
