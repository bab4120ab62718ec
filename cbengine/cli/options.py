"""Options that every command with a model has, and what they turn into."""

from __future__ import annotations

import argparse
import ast
import math
from typing import Any

from cbengine.cli.failures import CommandError
from cbengine.cli.workload import NAMES
from cbengine.config import EngineConfig
from cbengine.engine import AsyncEngine
from cbengine.sampling import SamplingParams

_SAMPLING = {
    "max_new_tokens": (int, "N", "most tokens of an answer (default %(default)s)"),
    "temperature": (float, "T", "0 = always the most likely token (default: the model's own)"),
    "top_k": (int, "K", "sample from the K most likely tokens"),
    "top_p": (float, "P", "sample from the most likely tokens that together reach probability P"),
    "min_p": (float, "P", "drop tokens less likely than P times the most likely one"),
    "seed": (int, "N", "same seed, same answer"),
}


def add_model_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the model, its engine's settings and the sampling parameters to a command."""
    add_engine_options(parser)
    for name, (kind, metavar, text) in _SAMPLING.items():
        default = max_new_tokens if name == "max_new_tokens" else None
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and its engine's settings to a command."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or the name of a model on the hub")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="a setting of EngineConfig, such as max_batch_tokens=256 or quantization=int8; may be given several times",
    )


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench` beside the model and its engine's settings."""
    known = ", ".join(NAMES)
    parser.add_argument(
        "--workload", nargs="+", default=["offline"], metavar="NAME", help=f"{known}, or a file (default offline)"
    )
    parser.add_argument(
        "--rate", nargs="+", type=rate, default=[1.0], metavar="R", help="arrivals a second, for poisson; several runs"
    )
    parser.add_argument(
        "--requests", type=count, default=64, metavar="N", help="of each workload (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="same seed, same workload (default %(default)s)"
    )
    parser.add_argument("--num-threads", type=int, metavar="N", help="threads that compute (default: the engine's)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it; needs cbengine[bench]")
    parser.add_argument("--trace", metavar="FILE.json", help="write what every step did, for ui.perfetto.dev")
    parser.add_argument("--compare", metavar="FILE", help="ratios to the JSON of an earlier run")


def count(text: str) -> int:
    """A command line's number of things, at least 1."""
    number = int(text) if text.strip().lstrip("+-").isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def rate(text: str) -> float:
    """A command line's number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return number


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, as keyword arguments of `engine.stream`.

    Raises `CommandError` for values that are not allowed.
    """
    given = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    try:
        SamplingParams(**given)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return given


def make_engine(args: argparse.Namespace) -> AsyncEngine:
    """The engine that the options describe, not started. Raises `CommandError` for settings that do not fit."""
    try:
        config = EngineConfig().merged(dict(_setting(text) for text in args.settings))
        return AsyncEngine.from_pretrained(args.model, config=config)
    except (TypeError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"--set needs NAME=VALUE, got {text!r}")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):  # not a number, True, None, …: a string without quotes
        return name.strip(), value.strip()
