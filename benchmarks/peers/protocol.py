"""What every runner shares. Standard library only: it is imported in the virtual environments of the peers.

A runner starts its engine, says "ready", and then reads jobs, one line of JSON each: {"workload": FILE, "out": FILE}. For
each it says "begin", serves the workload, says "end", writes what its clients saw, and says "done". It says so, one line of
JSON each, to the file descriptor that the environment variable names: standard output belongs to the libraries.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EVENTS = "CBENGINE_PEERS_EVENTS"
"""Environment variable with the number of the file descriptor for what a runner says."""

STARTED = time.perf_counter()


@dataclass(frozen=True)
class Item:
    """A request of a workload, see `cbengine.cli.workload.Item`."""

    prompt: Sequence[int]
    max_new_tokens: int
    arrival_s: float = 0.0
    after_tokens: int = 0


@dataclass
class Record:
    """What its client saw, see `cbengine.cli.measures.Record`."""

    submit: float = 0.0
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], now: float) -> None:
        self.ids += ids
        self.times += [now] * len(ids)


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """The options that every runner takes, and some of its own."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True, help="longest sequence of all workloads")
    parser.add_argument("--max-seqs", type=int, default=64)
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    return parser.parse_args()


def say(event: str, **values: Any) -> None:
    os.write(int(os.environ[EVENTS]), (json.dumps({"event": event, **values}) + "\n").encode())


def ready(version: str, **settings: Any) -> None:
    """The engine serves, and has been warmed up."""
    say("ready", version=version, settings=settings, start_seconds=time.perf_counter() - STARTED)


def jobs() -> Iterator[tuple[list[Item], Callable[[Sequence[Any]], None]]]:
    """The workloads to serve, and for each the function that takes its records. It must have been called before the next."""
    for line in sys.stdin:
        job = json.loads(line)
        items = [Item(**item) for item in json.loads(Path(job["workload"]).read_text(encoding="utf-8"))["requests"]]

        def finish(records: Sequence[Any], out: Path = Path(job["out"])) -> None:
            say("end")
            out.write_text(json.dumps([asdict(record) for record in records]), encoding="utf-8")
            say("done")

        say("begin")
        yield items, finish


class Arrivals:
    """For engines that are driven by a loop of ours: which requests are due."""

    def __init__(self, items: Sequence[Item], records: Sequence[Record]) -> None:
        self._records = records
        self._start = time.perf_counter()
        self._timed = sorted(
            (i for i, item in enumerate(items) if not item.after_tokens), key=lambda i: items[i].arrival_s
        )
        self._first = list(self._timed)
        self._late = [i for i, item in enumerate(items) if item.after_tokens]
        self._items = items

    def __bool__(self) -> bool:
        """Whether somebody is still to come."""
        return bool(self._timed or self._late)

    def due(self) -> list[int]:
        """The numbers of the requests to send now. Their records get the time when they came: this loop may have been held up
        by a step, and who came meanwhile has waited for it."""
        now, found = time.perf_counter(), []
        while self._timed and self._start + self._items[self._timed[0]].arrival_s <= now:
            found.append(self._timed.pop(0))
        if self._late and not self._timed:
            made = min(len(self._records[i].ids) for i in self._first)
            found += [i for i in self._late if made >= self._items[i].after_tokens]
            self._late = [i for i in self._late if i not in found]
        for i in found:
            item = self._items[i]
            self._records[i].submit = now if item.after_tokens else self._start + item.arrival_s
        return found

    def wait(self) -> float:
        """Seconds until the next one is due by the clock; 0 if it does not go by the clock."""
        if not self._timed:
            return 0.0
        return max(0.0, self._start + self._items[self._timed[0]].arrival_s - time.perf_counter())


Stream = Callable[[int, Item], AsyncIterator[Sequence[int]]]
"""Sends a request (its number in the workload) and yields its new tokens as they come."""


async def ask(items: Sequence[Item], stream: Stream) -> list[Record]:
    """For engines with an asyncio API: one coroutine for each request."""
    records = [Record() for _ in items]
    late, start = asyncio.Event(), time.perf_counter()
    wanted = max((item.after_tokens for item in items), default=0)
    first = [record for item, record in zip(items, records, strict=True) if not item.after_tokens]

    async def client(number: int, item: Item, record: Record) -> None:
        if item.after_tokens:
            await late.wait()
            record.submit = time.perf_counter()
        else:
            record.submit = start + item.arrival_s  # a busy loop may wake us later
            await asyncio.sleep(max(0.0, record.submit - time.perf_counter()))
        async for ids in stream(number, item):
            record.add(ids, time.perf_counter())
            if wanted and not late.is_set() and min(len(one.ids) for one in first) >= wanted:
                late.set()

    await asyncio.gather(
        *(client(i, item, record) for i, (item, record) in enumerate(zip(items, records, strict=True)))
    )
    return records


WARM_UP = Item(prompt=list(range(100, 116)), max_new_tokens=4)
"""A request that each engine answers twice before it is ready."""
