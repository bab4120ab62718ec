"""`cbengine demo`: several prompts answered at once on one engine."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from cbengine.cli.answers import Answer, View, totals
from cbengine.cli.failures import CommandError, require_rich
from cbengine.cli.lines import Lines
from cbengine.cli.options import make_engine, sampling_options
from cbengine.engine import AsyncEngine
from cbengine.errors import CBEngineError

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain what rain is to a child.",
    "Give me three tips for a good night's sleep.",
)

REFRESH_SECONDS = 0.1
"""Time between two drawings. Tokens arrive more often; drawing each would cost more than it shows."""


def run(args: argparse.Namespace) -> None:
    """Run the command. Raises `CommandError` if the engine cannot start, or if every prompt failed."""
    plain = args.plain or not sys.stdout.isatty()
    if not plain:
        require_rich("cbengine demo")
    asyncio.run(_run(args, plain))


async def _run(args: argparse.Namespace, plain: bool) -> None:
    engine, sampling = make_engine(args), sampling_options(args)
    print(f"Loading {args.model} ...", file=sys.stderr, flush=True)
    try:
        async with engine:
            answers = await watch(engine, args.prompt or PROMPTS, plain=plain, raw=args.raw, **sampling)
    except (CBEngineError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    if all(answer.error for answer in answers):
        raise CommandError("no prompt was answered")


async def watch(
    engine: AsyncEngine, prompts: Sequence[str], *, plain: bool | None = None, raw: bool = False, **sampling: Any
) -> list[Answer]:
    """Answer all prompts at once and show them while they grow.

    `plain`: lines of text instead of drawn panels; default: where standard output is no terminal. `raw`: continue the
    prompts as they are, without the model's chat template. `sampling`: fields of `SamplingParams`, for all of them. A
    prompt that fails shows why, and the others go on. Returns the answers in the order of the prompts.
    """
    answers = [Answer(number, prompt) for number, prompt in enumerate(prompts, 1)]
    started = time.monotonic()
    with _view(answers, plain) as view:
        async with asyncio.TaskGroup() as tasks:
            for answer in answers:
                tasks.create_task(_follow(engine, answer, raw, sampling))
            while not all(answer.done for answer in answers):
                await asyncio.sleep(REFRESH_SECONDS)
                view.refresh()
    print(totals(answers, time.monotonic() - started))
    return answers


async def _follow(engine: AsyncEngine, answer: Answer, raw: bool, sampling: dict[str, Any]) -> None:
    try:
        if raw:
            answer.stream = engine.stream(answer.prompt, **sampling)
        else:
            answer.stream = engine.chat([{"role": "user", "content": answer.prompt}], **sampling)
        await answer.stream.result()  # what has come so far is drawn meanwhile
    except CBEngineError as error:
        answer.error = error
    finally:
        answer.done = True


def _view(answers: Sequence[Answer], plain: bool | None) -> View:
    if plain is None:
        plain = not sys.stdout.isatty()
    if plain:
        return Lines(answers)
    from cbengine.cli.panels import Panels

    return Panels(answers)
