"""Engines over a `FakeModel`, whose every answer is known, and a gate that lets it compute one step at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from cbengine import AsyncEngine, Token, TokenStream
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel
from tests.support.leaks import idle

SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "num_blocks": 128,
    "max_batch_tokens": 32,
    "max_requests_per_batch": 16,
    "safety_margin": 0.0,
}
"""Small enough for a test to reach every limit."""


def fake_engine(model: FakeModel | None = None, **settings: Any) -> AsyncEngine:
    """An engine that is not started yet."""
    return AsyncEngine(model or FakeModel(), **{**SETTINGS, **settings})


@asynccontextmanager
async def running(model: FakeModel | None = None, **settings: Any) -> AsyncGenerator[AsyncEngine]:
    """A started engine, which has to be idle by the end of the block. A gate in the model is open by then."""
    async with fake_engine(model, **settings) as engine:
        try:
            yield engine
        finally:
            if model is not None and isinstance(model.fault, Gate):
                model.fault.open()
        await idle(engine)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of printable characters."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, 97) for _ in range(length)]


async def read(stream: TokenStream) -> list[Token]:
    """All tokens that are left."""
    return [token async for token in stream]


async def read_some(stream: TokenStream, count: int) -> list[Token]:
    """The next `count` tokens, fewer if the stream ends."""
    tokens: list[Token] = []
    while len(tokens) < count:
        try:
            tokens.append(await stream.__anext__())
        except StopAsyncIteration:
            break
    return tokens


class Gate:
    """`FakeModel(fault=gate)`: each step waits at its head until the test lets it pass. Closed at first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passes = 0
        self._open = False
        self._arrived = self._passed = 0

    def __call__(self, inputs: StepInputs) -> None:
        """On the compute thread."""
        with self._condition:
            self._arrived += 1
            self._condition.wait_for(lambda: self._open or self._passes > 0, timeout=60)
            self._passes -= 1
            self._passed += 1

    @property
    def arrived(self) -> int:
        """Steps that have come to the gate so far, those that went through included."""
        return self._arrived

    @property
    def busy(self) -> bool:
        """A step is waiting at the gate."""
        return self._arrived > self._passed

    def let_pass(self, steps: int) -> None:
        """Let this many steps pass, now or when they come. Does not wait."""
        with self._condition:
            self._passes += steps
            self._condition.notify_all()

    def open(self) -> None:
        """Let everything pass."""
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def close(self) -> None:
        """Let nothing pass any more."""
        with self._condition:
            self._open = False
            self._passes = 0

    async def steps(self, count: int = 1) -> None:
        """Let `count` steps pass, one after the other, and wait until one more is at the gate each time."""
        await self.someone_waits()
        for _ in range(count):
            passed = self._passed
            self.let_pass(1)
            await self._until(lambda passed=passed: self._passed > passed and self.busy)

    async def someone_waits(self) -> None:
        """Wait until a step is at the gate."""
        await self._until(lambda: self.busy)

    @staticmethod
    async def _until(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(10):
            while not condition():
                await anyio.sleep(0.0005)
