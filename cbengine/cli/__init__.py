"""The command `cbengine`: `chat` and `demo`. Uses the public API only, and imports each command when it is called."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from cbengine.cli.failures import CommandError, require_rich
from cbengine.cli.options import add_bench_options, add_engine_options, add_model_options

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own). Returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except CommandError as error:
        print(f"cbengine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.command == "chat":
        require_rich("cbengine chat")
        from cbengine.cli.chat import run
    elif args.command == "bench":
        require_rich("cbengine bench")
        from cbengine.cli.bench import run
    elif args.command == "plan":
        from cbengine.cli.plan import run
    else:
        from cbengine.cli.demo import run
    run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cbengine", description="Continuous batching of language models for asyncio.")
    parser.add_argument("--version", action="version", version=f"cbengine {importlib.metadata.version('cbengine')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    chat = commands.add_parser("chat", help="talk with a model in the terminal", description=_CHAT)
    add_model_options(chat, max_new_tokens=1024)
    chat.add_argument("--system", metavar="TEXT", help="system message that every conversation starts with")

    demo = commands.add_parser("demo", help="watch several prompts being answered at once", description=_DEMO)
    add_model_options(demo, max_new_tokens=160)
    demo.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; give it several times")
    demo.add_argument("--raw", action="store_true", help="continue the prompts as they are, without a chat template")
    demo.add_argument("--plain", action="store_true", help="lines of text, as when the output is not a terminal")

    plan = commands.add_parser("plan", help="see what memory a model would take", description=_PLAN)
    add_engine_options(plan)

    bench = commands.add_parser("bench", help="measure what an engine does on this machine", description=_BENCH)
    add_engine_options(bench)
    add_bench_options(bench)
    return parser


_BENCH = """Measure an engine with many clients at once: rates, waits, memory, and how near it comes to what this machine
can do."""

_CHAT = """Talk with a model. Ctrl-C stops an answer, and leaves where there is none to stop. /reset forgets the
conversation, /exit leaves."""

_PLAN = """Show what an engine would allocate for a model on this machine. Loads no weights."""

_DEMO = """Answer several prompts at once on one engine, streaming side by side."""
