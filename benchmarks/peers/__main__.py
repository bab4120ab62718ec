"""cbengine beside other engines, in turns, on the same workloads.

    python -m benchmarks.peers --model DIR --rounds 3 --json out.json --plot out.png
    python -m benchmarks.peers --show out.json [--plot out.png]

Virtual environments and exported models go to ~/.cache/cbengine-peers ($CBENGINE_PEERS_CACHE). A run during which others used
more than 0.05 cores is marked as disturbed: on two cores that can halve any figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.engines import ENGINES, prepare
from benchmarks.peers.models import RANDOM, random_llama
from benchmarks.peers.report import plot, show
from benchmarks.peers.rounds import Outcome, Plan, run_rounds
from cbengine.cli.bench_plot import require_kind, require_matplotlib
from cbengine.cli.failures import CommandError, require_writable
from cbengine.cli.options import count, rate
from cbengine.cli.workload import NAMES, Workload, load, make, text

FORMAT = 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="FILE", help="run nothing: show what an earlier run has written")
    parser.add_argument(
        "--model", metavar="DIR", help=f"a folder, or {RANDOM}: the shape of a 1B Llama, made on the spot"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help=f"for {RANDOM}: the folder of the model that lends its tokenizer"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["cbengine", "openvino", "vllm", "transformers"],
        metavar="NAME",
        help=f"of {', '.join(ENGINES)} (default: those in fp32); tokens are compared with the first one's",
    )
    parser.add_argument("--int8", action="store_true", help="also cbengine-int8 and openvino-int8")
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(NAMES),
        metavar="NAME",
        help=f"{', '.join(NAMES)}, or files (default: all)",
    )
    parser.add_argument(
        "--rate", nargs="+", type=rate, default=[1.0, 2.0], metavar="R", help="arrivals a second, poisson"
    )
    _add_run_options(parser)
    args = parser.parse_args()
    if (args.model is None) == (args.show is None):
        parser.error("give either --model or --show")
    if unknown := [name for name in args.engines if name not in ENGINES]:
        parser.error(f"unknown engine {', '.join(unknown)}; known are {', '.join(ENGINES)}")
    if args.quiet_only < 0:
        parser.error(f"--quiet-only must be at least 0, got {args.quiet_only}")
    return args


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=count, default=64, metavar="N", help="of each workload (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--threads", type=count, metavar="N", help="default: one for each core")
    parser.add_argument("--venv", nargs="+", default=[], metavar="NAME=DIR", help="environments of openvino and vllm")
    parser.add_argument(
        "--option",
        nargs="+",
        default=[],
        metavar="ENGINE.NAME=VALUE",
        help="of a runner: openvino.max_batch_tokens=256",
    )
    parser.add_argument(
        "--quiet-only",
        type=int,
        default=0,
        metavar="K",
        help="wait for a quiet machine; repeat disturbed runs up to K times",
    )
    parser.add_argument("--json", metavar="FILE", help="written after every run")
    parser.add_argument("--plot", metavar="FILE.png", help="ratios; needs matplotlib")


def check(args: argparse.Namespace) -> None:
    """Find what is wrong with files before hours have gone into measuring. Raises `CommandError`."""
    for option in ("json", "plot"):
        if getattr(args, option):
            require_writable(f"--{option}", Path(getattr(args, option)))
    if args.plot:
        require_matplotlib()
        require_kind(Path(args.plot))
    for name in args.workload:
        if name not in NAMES:
            load(Path(name))


def read(path: Path) -> dict[str, Any]:
    """What an earlier run has written. Raises `CommandError` if it is not that."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
        if result["format"] != FORMAT or not isinstance(result["runs"], list):
            raise ValueError(f"its format is {result['format']!r}, this version reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--show {path}: no JSON of `python -m benchmarks.peers`: {error}") from error
    return result


def model_folder(args: argparse.Namespace) -> Path:
    if args.model != RANDOM:
        if not Path(args.model, "config.json").is_file():
            raise CommandError(
                f"--model {args.model}: no folder with a model (one with a config.json); or use {RANDOM}"
            )
        return Path(args.model)
    if args.tokenizer is None:
        raise CommandError(f"--model {RANDOM} needs --tokenizer")
    if not Path(args.tokenizer).is_dir():
        raise CommandError(f"--tokenizer {args.tokenizer}: there is no such folder")
    return random_llama(Path(args.tokenizer))


def make_workloads(args: argparse.Namespace, folder: Path) -> list[Workload]:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(text(), add_special_tokens=False, verbose=False)["input_ids"]
    longest = AutoConfig.from_pretrained(folder).max_position_embeddings
    workloads: list[Workload] = []
    for name in args.workload:
        if name not in NAMES:
            workloads.append(load(Path(name)).first(args.requests))
            continue
        for arrivals in args.rate if name == "poisson" else [1.0]:
            workloads.append(make(name, ids, requests=args.requests, rate=arrivals, seed=args.seed, max_len=longest))
    return workloads


def runner_options(texts: list[str]) -> dict[str, dict[str, str]]:
    """{"openvino": {"max_batch_tokens": "256"}} of ["openvino.max_batch_tokens=256"]."""
    found: dict[str, dict[str, str]] = {}
    for given in texts:
        where, equals, value = given.partition("=")
        engine, dot, name = where.partition(".")
        if not (equals and dot and name) or engine not in ENGINES:
            raise CommandError(f"--option needs ENGINE.NAME=VALUE with one of {', '.join(ENGINES)}, got {given!r}")
        found.setdefault(engine, {})[name] = value
    return found


def venvs(texts: list[str]) -> dict[str, Path]:
    """{"vllm": Path("v")} of ["vllm=v"]."""
    pairs = [given.partition("=") for given in texts]
    if wrong := [name for name, _, folder in pairs if name not in ("openvino", "vllm") or not folder]:
        raise CommandError(f"--venv needs openvino=DIR or vllm=DIR, got {', '.join(wrong)}")
    return {name: Path(folder).resolve() for name, _, folder in pairs}


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    names = [*args.engines, *(("cbengine-int8", "openvino-int8") if args.int8 else ())]
    engines = [ENGINES[name] for name in dict.fromkeys(names)]
    options, given = runner_options(args.option), venvs(args.venv)
    folder = model_folder(args)
    workloads, folders = make_workloads(args, folder), prepare(engines, given)
    for engine in engines:
        engine.model(folder, folders)  # exports it, before anything is measured
    threads = args.threads or os.cpu_count() or 1
    result: dict[str, Any] = {
        "format": FORMAT,
        "model": str(folder),
        "threads": threads,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "workloads": [str(workload) for workload in workloads],
        "runs": [],
    }
    outcomes: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        result["runs"] = [one.values() for one in outcomes]
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
        mark = ", disturbed" if outcome.load.disturbed else ""
        console.print(
            f"  {outcome.workload.name}: {outcome.figures.output_rate:.1f} tok/s, "
            f"{outcome.load.other_cores:.2f} other cores{mark}, {outcome.differing} requests with other tokens"
        )

    for workload in workloads:
        console.print(str(workload), markup=False)
    with tempfile.TemporaryDirectory(prefix="cbengine-peers-") as scratch:
        run_rounds(
            Plan(
                engines=engines,
                workloads=workloads,
                model=folder,
                folders=folders,
                threads=threads,
                threads_given=args.threads is not None,
                options=options,
                rounds=args.rounds,
                retries=args.quiet_only,
                scratch=Path(scratch),
                report=report,
                log=lambda line: console.print(line, markup=False),
            )
        )
    return result


def main() -> None:
    args, console = parse(), Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runner in progress is ended too
    try:
        check(args)
        result = run(args, console) if args.show is None else read(Path(args.show))
    except CommandError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:  # what has been measured is in the file of --json
        raise SystemExit(130) from None
    if not result["runs"]:
        raise SystemExit("nothing was measured: every run failed, for the reasons above")
    show(result, console)
    if args.plot:
        plot(result, Path(args.plot))


if __name__ == "__main__":
    main()
