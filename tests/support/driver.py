"""The step loop without its thread: built over any device and turned by hand, with readers that need no event loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbengine.bridge.buffer import StreamBuffer
from cbengine.bridge.inbox import Cancel, Inbox, Stop, Submit
from cbengine.bridge.ports import LoopPort, Waiter
from cbengine.config import EngineConfig
from cbengine.devices.base import Device
from cbengine.execution.build import Built, build
from cbengine.outputs import FinishReason
from cbengine.sampling import SamplingParams
from cbengine.scheduling.admission import Registry
from cbengine.scheduling.request import Request
from cbengine.testing import FakeModel


class DirectPort(LoopPort):
    """Delivers at once, on the calling thread."""

    def __init__(self) -> None:
        super().__init__(object())
        self.posts = 0

    def _schedule(self, fn: Callable[..., Any], *args: Any) -> None:
        self.posts += 1
        fn(*args)

    def waiter(self) -> Waiter:
        raise AssertionError("nobody waits in a driven test")


@dataclass
class Driven:
    """A request of a driven test, and what it was given."""

    request: Request
    buffer: StreamBuffer
    prompt: list[int]
    max_new_tokens: int
    cancelled: bool = False


@dataclass
class Driver:
    """Turns a loop by hand."""

    model: FakeModel
    device: Device
    config: EngineConfig
    built: Built = field(init=False)
    driven: list[Driven] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox = Inbox()
        self.port = DirectPort()
        self.registry = Registry(self.config.max_queue_size, self.config.max_queued_tokens)
        self.built = build(self.config, self.model, self.device, self.inbox, self.registry, None)
        self.loop = self.built.loop
        self.parts = self.loop.parts

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 8, **sampling: Any) -> Driven:
        params = SamplingParams(max_new_tokens=max_new_tokens, **sampling).resolved(self.model.spec.generation_defaults)
        number = len(self.driven)
        buffer = StreamBuffer(self.port, f"r{number}", len(prompt), 0.0)
        room = min(self.built.memory.max_model_len, self.parts.cache.capacity_tokens)
        request = Request(
            id=number,
            label=f"r{number}",
            params=params,
            seed=params.seed or 0,
            reader=buffer,
            arrival_time=0.0,
            prompt=np.array(prompt, np.int32),
            limit=min(len(prompt) + max_new_tokens, room),
            stop_ids=frozenset(params.stop_token_ids),
        )
        self.registry.enter(number, request.label, len(prompt), lambda: self.inbox.put(Submit(request)))
        driven = Driven(request, buffer, list(prompt), max_new_tokens)
        self.driven.append(driven)
        return driven

    def cancel(self, driven: Driven) -> None:
        driven.cancelled = True
        self.inbox.put(Cancel(driven.request.id))

    def stop(self, *, drain: bool) -> None:
        self.inbox.put(Stop(drain=drain))

    def run(self, turns: int = 100_000) -> int:
        """Turn until there is nothing left to do; returns the number of turns."""
        for turn in range(turns):
            busy = self.loop.turn()
            if self.loop.stopped or not busy:
                return turn
        raise AssertionError(f"not done after {turns} turns")

    def reference(self, driven: Driven) -> list[int]:
        limit = driven.request.limit - len(driven.prompt)
        return self.model.reference(driven.prompt, limit)

    def check(self) -> None:
        """Every answer is right, has ended once, and everything was given back."""
        for driven in self.driven:
            buffer, expected = driven.buffer, self.reference(driven)
            assert buffer.reason is not None, f"{driven.request!r} has no end"
            assert buffer.ids == expected[: len(buffer.ids)], f"{driven.request!r} said {buffer.ids}, not {expected}"
            if buffer.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert buffer.ids == expected
        self.check_idle()

    def check_idle(self) -> None:
        parts = self.parts
        parts.cache.check()
        assert not parts.requests and parts.pipeline.num_in_flight == 0
        assert parts.cache.num_free == parts.cache.capacity and parts.cache.num_retired == 0
        assert parts.rows.num_used == 0 and self.registry.num_labels == 0 and self.registry.num_queued == 0
        assert parts.scheduler.num_running == 0 and parts.scheduler.num_waiting == 0


def random_workload(driver: Driver, seed: int, requests: int = 12, cancel_share: float = 0.3, stop: str = "") -> None:
    """Requests, cancels and (with `stop`: "hard" or "drain") a stop at random turns; runs until nothing is left."""
    rng = random.Random(seed)
    todo = requests
    turns = 0
    while todo or driver.parts.requests or driver.parts.pipeline.num_in_flight:
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            if todo:
                todo -= 1
                prompt = [rng.randrange(1, 97) for _ in range(rng.randint(1, 20))]
                driver.submit(prompt, rng.randint(1, 12))
        alive = [d for d in driver.driven if d.buffer.reason is None and not d.cancelled]
        if alive and rng.random() < cancel_share:
            driver.cancel(rng.choice(alive))
        if stop and turns == rng.randint(4, 12):
            driver.stop(drain=stop == "drain")
            todo = 0
        driver.loop.turn()
        turns += 1
        assert turns < 10_000, "the workload does not come to an end"
        if driver.loop.stopped:
            break
    driver.run()
