"""`cbengine chat`: a conversation in the terminal.

The prompt is read while no event loop runs, and each answer is one run of the same loop. So Ctrl-C means what it means
in any Python program: while a line is read it ends the program; while an answer streams, `asyncio.Runner` cancels the
task that reads it, and cancelling the task is all it takes to end the request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

with contextlib.suppress(ImportError):
    import readline as readline  # gives input() line editing and history

from rich.console import Console

from cbengine.cli.failures import CommandError
from cbengine.cli.options import make_engine, sampling_options
from cbengine.engine import AsyncEngine
from cbengine.errors import CBEngineError, EngineError
from cbengine.stream import TokenStream

HELP = "Ctrl-C stops an answer, a second one leaves. /reset forgets the conversation, /exit leaves."


def run(args: argparse.Namespace) -> None:
    """Run the command until its user leaves. Raises `CommandError` if the engine cannot serve."""
    console = Console(highlight=False)
    engine, sampling = make_engine(args), sampling_options(args)
    with asyncio.Runner() as runner:
        try:
            console.print(f"Loading {args.model} ...", style="dim", markup=False)
            runner.run(engine.start())
            console.print(HELP, style="dim")
            Chat(engine, runner, console, args.system, sampling).loop()
        except (EngineError, OSError, ValueError) as error:
            raise CommandError(str(error)) from error
        finally:
            runner.run(engine.aclose())


@dataclass(slots=True)
class Chat:
    """One conversation."""

    engine: AsyncEngine
    runner: asyncio.Runner
    console: Console
    system: str | None
    sampling: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def loop(self) -> None:
        """Read and answer until /exit, the end of the input, or Ctrl-C where no answer is being made."""
        self._reset()
        while True:
            try:
                line = input("\nyou> ").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self._reset()
                self.console.print("The conversation is forgotten.", style="dim")
            elif line.startswith("/"):
                self.console.print(HELP, style="dim")
            elif line:
                self._turn(line)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _turn(self, line: str) -> None:
        """Ask, show the answer while it grows, and remember both. A turn without an answer is not remembered."""
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            self.runner.run(self._answer(pieces))
        except KeyboardInterrupt:
            self.console.print("\n(stopped)", style="dim")
        except EngineError:
            raise
        except CBEngineError as error:
            self.console.print(f"\n{type(error).__name__}: {error}", style="red", markup=False)
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()

    async def _answer(self, pieces: list[str]) -> None:
        async with self.engine.chat(self.messages, **self.sampling) as stream:
            async for piece in stream.chunks():
                pieces.append(piece)
                self.console.print(piece, end="", markup=False, soft_wrap=True)
        self.console.print()
        self.console.print(_footer(stream), style="dim", markup=False)


def _footer(stream: TokenStream) -> str:
    """For example "(stop, 34 tokens, first after 0.12 s, 21.3 tokens/s)"."""
    parts = [str(stream.finish_reason), f"{stream.usage.completion_tokens} tokens"]
    metrics = stream.metrics
    if metrics.ttft is not None:
        parts.append(f"first after {metrics.ttft:.2f} s")
    if metrics.mean_itl:
        parts.append(f"{1 / metrics.mean_itl:.1f} tokens/s")
    return f"({', '.join(parts)})"
