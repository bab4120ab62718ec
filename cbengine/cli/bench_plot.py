"""The plot of `cbengine bench`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbengine.cli.bench_run import Run
from cbengine.cli.failures import CommandError


def require_matplotlib() -> None:
    """Raises `CommandError`, saying what to install, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            "plots are drawn with the package matplotlib, which is missing: pip install 'cbengine[bench]'"
        )


def require_kind(path: Path) -> None:
    """Raises `CommandError` if matplotlib writes no such kind of file. Needs matplotlib."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in kinds:  # without a suffix it becomes a PNG
        raise CommandError(f"--plot {path}: no kind of picture that can be written; use one of {', '.join(kinds)}")


def draw(runs: Sequence[Run], path: Path, title: str) -> None:
    """Write a picture (its kind goes by the name of the file): rates, and how the two waits of a client are distributed.

    Raises:
        CommandError: matplotlib knows no such kind of file.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # late: it is an extra, and takes a moment

    figure = Figure(figsize=(12, 4), layout="constrained")
    rates, first, between = figure.subplots(1, 3)
    figure.suptitle(title)
    names = [run.workload.name for run in runs]
    bars = rates.barh(names, [run.figures.output_rate for run in runs], color=[f"C{i}" for i in range(len(runs))])
    rates.bar_label(bars, fmt="{:,.0f}", padding=3)
    rates.invert_yaxis()
    rates.set_xlabel("output tokens/s")
    for run in runs:
        _distribution(first, [r.times[0] - r.submit for r in run.records], run.workload.name)
        gaps = [later - sooner for r in run.records for sooner, later in r.gaps]
        _distribution(between, [1e3 * gap for gap in gaps], run.workload.name)
    first.set_xlabel("first token after, s")
    between.set_xlabel("between tokens, ms")
    between.set_xscale("log")
    first.set_ylabel("share of requests")
    between.set_ylabel("share of tokens")
    first.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _distribution(axes: Any, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=label)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
