"""What a benchmark asks for: prompts of real text with fixed lengths, and when they arrive. Same seed, same workload."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbengine.cli.failures import CommandError

NAMES = ("offline", "prefix", "poisson", "long")
"""All at once; all at once behind 200 shared tokens; Poisson arrivals; one long prompt that comes among 16 that decode."""

SHARED_PREFIX = 200
DECODERS, DECODER_TOKENS, LONG_PROMPT, LONG_AFTER = 16, 128, 2048, 32
_NOT_IN_A_FILE_NAME = re.compile(r"[^\w.+-]+")  # a workload's name is part of the names of files
_TEXT_ROOM = 1000  # tokens that a text must have beyond what is cut out of it


@dataclass(frozen=True, slots=True)
class Item:
    """One request, greedy, whose answer has exactly `max_new_tokens`."""

    prompt: Sequence[int]
    max_new_tokens: int
    arrival_s: float = 0.0
    """Seconds after the start."""
    after_tokens: int = 0
    """Above 0: it comes when every request that has 0 here has that many tokens, however long it takes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    items: Sequence[Item]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.max_new_tokens for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer together."""
        return max(len(item.prompt) + item.max_new_tokens for item in self.items)

    @property
    def at_once(self) -> bool:
        """Whether everything is there from the start, so that the machine is never out of work."""
        return not any(item.arrival_s or item.after_tokens for item in self.items)

    def first(self, count: int) -> Workload:
        """The first requests only, and whoever waits for them."""
        kept = [item for item in self.items if not item.after_tokens][:count]
        return Workload(self.name, kept + [item for item in self.items if item.after_tokens])

    def __str__(self) -> str:
        """For example "offline: 64 requests, 8261 prompt and 4358 output tokens"."""
        return f"{self.name}: {len(self.items)} requests, {self.prompt_tokens} prompt and {self.output_tokens} output tokens"


def text() -> str:
    """English that every Python brings along: its own reference manual."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def make(
    name: str, ids: Sequence[int], *, requests: int = 64, rate: float = 1.0, seed: int = 0, max_len: int | None = None
) -> Workload:
    """A workload of windows cut out of the token ids `ids` of a text.

    Lengths of prompts are lognormal around 120 tokens, within 16 to 512; of answers with a heavier tail around a median of
    44, within 8 to 256. Workloads of different names, rates and seeds draw other windows, so that one is
    not found in the prefix cache of another.

    Args:
        name: one of `NAMES`.
        requests: how many; for "long", how many decode when the long one comes, at most 16.
        rate: arrivals a second, for "poisson".
        max_len: longest sequence that the model takes; prompts and answers are cut to fit.

    Raises:
        CommandError: the name is unknown, a number is not positive, or the text or the model too short.
    """
    if name not in NAMES:
        raise CommandError(f"no workload {name!r}: use {', '.join(NAMES)}, or a file")
    if requests < 1 or not rate > 0 or not math.isfinite(rate):
        raise CommandError(f"a workload needs at least one request and a rate above 0, got {requests} and {rate:g}")
    draw = random.Random(f"{seed} {name} {rate if name == 'poisson' else ''}")
    longest = max_len or 1 << 30
    if len(ids) < LONG_PROMPT + _TEXT_ROOM or longest < 2 * SHARED_PREFIX:
        raise CommandError(
            f"workloads need a text of {LONG_PROMPT + _TEXT_ROOM} tokens and a model of {2 * SHARED_PREFIX}, "
            f"got {len(ids)} and {longest}"
        )
    if name == "long":
        return Workload("long", _long(draw, ids, min(requests, DECODERS), longest))
    prefix = _cut(draw, ids, SHARED_PREFIX) if name == "prefix" else []
    items, at = [], 0.0
    for number in range(requests):
        size = _clip(draw.lognormvariate(math.log(120) - 0.32, 0.8), 16, min(512, longest - SHARED_PREFIX - 128))
        answer = _clip(draw.lognormvariate(math.log(44), 1.0), 8, min(256, longest - len(prefix) - size))
        if name == "poisson" and number:
            at += draw.expovariate(rate)
        items.append(Item(prefix + _cut(draw, ids, size), answer, round(at, 4)))
    return Workload(f"poisson-{rate:g}" if name == "poisson" else name, items)


def _long(draw: random.Random, ids: Sequence[int], decoders: int, longest: int) -> list[Item]:
    items = [Item(_cut(draw, ids, draw.randint(16, 96)), DECODER_TOKENS) for _ in range(decoders)]
    return [*items, Item(_cut(draw, ids, min(LONG_PROMPT, longest - 16)), 16, after_tokens=LONG_AFTER)]


def _cut(draw: random.Random, ids: Sequence[int], size: int) -> list[int]:
    start = draw.randrange(len(ids) - size)
    return list(ids[start : start + size])


def _clip(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


def _can_be_asked(item: Item) -> bool:
    """Whether its values are what a request has; they come from somebody's file."""
    prompt: Any = item.prompt
    arrival: Any = item.arrival_s
    whole = isinstance(prompt, list) and _whole(*prompt, item.max_new_tokens, item.after_tokens)
    if not (whole and isinstance(arrival, (int, float)) and 0 <= arrival < math.inf):
        return False
    return bool(prompt) and item.max_new_tokens > 0 and item.after_tokens >= 0


def _whole(*values: object) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _can_be_sent(items: Sequence[Item]) -> bool:
    """Whether somebody goes first, and the others wait for no more than the first ones get."""
    first = [item.max_new_tokens for item in items if not item.after_tokens]
    return bool(first) and max(item.after_tokens for item in items) <= min(first)


def save(workload: Workload, path: Path) -> None:
    """Write it as JSON, which `load` reads."""
    value = {"name": workload.name, "requests": [asdict(item) for item in workload.items]}
    path.write_text(json.dumps(value), encoding="utf-8")


def load(path: Path) -> Workload:
    """Read a workload: what `save` has written, or a plain list of requests. Its name is the file's, if it has none.

    Raises:
        CommandError: no such file, or no workload in it.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        named = isinstance(value, dict)
        items = [Item(**item) for item in (value["requests"] if named else value)]
        name = str(value["name"]) if named else path.stem
        workload = Workload(_NOT_IN_A_FILE_NAME.sub("-", name), items)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CommandError(
            f"{path} is none of the workloads {', '.join(NAMES)}, and no workload can be read from such a file: {error}"
        ) from error
    if not (all(_can_be_asked(item) for item in items) and _can_be_sent(items)):
        raise CommandError(
            f"{path} holds no workload: every request needs a prompt (a list of token ids), max_new_tokens of at least 1, "
            "arrival_s of at least 0 if any, and after_tokens that the others reach if any"
        )
    return workload
