"""What was measured: one table, one JSON file, and plots where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.machine import Machine, Rates

AIM_OF_FLOOR, AIM_IDLE, AIM_PEER, AIM_ASYNC = 0.85, 0.03, 2.0, 1.15


@dataclass(slots=True)
class Row:
    """One measurement. Seconds, and tokens a second; None where it was not looked at."""

    shape: str
    how: str
    """"default" (graphs, two steps in flight), or what was changed; or "transformers"."""
    what: str
    """"decode", "prefill" or "poisson"."""
    batch: int
    rate: float | None = None
    step: float | None = None
    floor: float | None = None
    idle: float | None = None
    """Share of a step in which the device waits between two steps."""
    host: float | None = None
    """Of the engine thread, to prepare and launch a step."""
    ttft: tuple[float, float] | None = None
    """Median, 99th percentile."""
    itl: tuple[float, float] | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        return self.floor / self.step if self.floor and self.step else None


def table(rows: Sequence[Row]) -> str:
    """All rows, in columns."""
    head = ["model", "how", "what", "batch", "tok/s", "step ms", "floor ms", "of floor", "idle", "host us", "note"]
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cells(row: Row) -> list[str]:
    def show(value: float | None, scale: float, form: str) -> str:
        return "" if value is None else format(value * scale, form)

    note = row.note
    for name, pair in (("TTFT", row.ttft), ("ITL", row.itl)):
        if pair is not None:
            note += f" {name} {pair[0] * 1e3:.1f} / {pair[1] * 1e3:.1f} ms (median / p99)"
    cells = [row.shape, row.how, row.what, str(row.batch), show(row.rate, 1, ",.0f"), show(row.step, 1e3, ".3f")]
    cells += [
        show(row.floor, 1e3, ".3f"),
        show(row.share, 1, ".0%"),
        show(row.idle, 1, ".1%"),
        show(row.host, 1e6, ".0f"),
    ]
    return [*cells, note.strip()]


def aims(rows: Sequence[Row]) -> list[str]:
    """What the design wants, beside what was measured."""

    def find(shape: str, how: str, batch: int) -> Row | None:
        found = [r for r in rows if (r.shape, r.what, r.batch) == (shape, "decode", batch) and r.how.startswith(how)]
        return max(found, key=lambda row: row.rate or 0.0, default=None)

    lines = []
    eight = find("llama3-8b", "default", 64)
    if eight is not None and eight.share is not None:
        lines.append(f"decode at 64, 8B: {eight.share:.0%} of the floor (aim: {AIM_OF_FLOOR:.0%})")
    for shape in sorted({row.shape for row in rows}):
        ours, peer, plain = (find(shape, how, 64) for how in ("default", "transformers", "async off"))
        if ours is None or ours.rate is None:
            continue
        if ours.idle is not None:
            lines.append(f"device idle at 64, {shape}: {ours.idle:.1%} of a step (aim: under {AIM_IDLE:.0%})")
        if peer is not None and peer.rate:
            lines.append(f"decode at 64, {shape}: {ours.rate / peer.rate:.1f} x transformers (aim: {AIM_PEER:.0f})")
        if plain is not None and plain.rate:
            lines.append(f"async on / off at 64, {shape}: {ours.rate / plain.rate:.2f} (aim: {AIM_ASYNC})")
    return lines


def write(folder: Path, machine: Machine, rates: Rates, rows: Sequence[Row], left_out: Sequence[str]) -> list[Path]:
    """The files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "device": machine.name,
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "rates": asdict(rates),
        "rows": [{**asdict(row), "share": row.share} for row in rows],
        "left_out": list(left_out),
    }
    path = folder / "gpu.json"
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    written = [path]
    if importlib.util.find_spec("matplotlib") is not None and any(row.rate for row in rows):
        written.append(_draw(folder / "gpu.png", rows))
    return written


def _draw(path: Path, rows: Sequence[Row]) -> Path:
    from matplotlib.figure import Figure  # late: it is not everywhere

    shapes = sorted({row.shape for row in rows if row.what == "decode" and row.rate})
    figure = Figure(figsize=(5 * max(1, len(shapes)), 4), layout="constrained")
    for number, shape in enumerate(shapes):
        axes = figure.add_subplot(1, len(shapes), number + 1)
        decodes = [row for row in rows if row.shape == shape and row.what == "decode" and row.rate]
        for how in dict.fromkeys(row.how for row in decodes):
            points = sorted((row.batch, row.rate or 0.0) for row in decodes if row.how == how)
            axes.plot(*zip(*points, strict=True), marker="o", label=how)
        floors = sorted({(row.batch, row.batch / row.floor) for row in decodes if row.floor and row.how == "default"})
        if floors:
            axes.plot(*zip(*floors, strict=True), linestyle="--", color="grey", label="floor")
        axes.set(xscale="log", yscale="log", title=shape, xlabel="batch", ylabel="decoded tokens / s")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    return path
