"""The step loop without its thread: built over any device and turned by hand, with readers that need no event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbengine.bridge.buffer import StreamBuffer
from cbengine.bridge.inbox import Cancel, Inbox, Pause, Read, Resume, Stop, Submit
from cbengine.bridge.outbox import Delivery, StatusEvent
from cbengine.bridge.ports import LoopPort, Waiter
from cbengine.config import EngineConfig
from cbengine.devices.base import Device
from cbengine.errors import EngineStoppedError
from cbengine.execution.build import Built, build
from cbengine.execution.pipeline import Sampler
from cbengine.execution.sampler import sample
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.sampling import SamplingParams
from cbengine.scheduling.admission import Registry
from cbengine.scheduling.request import LEGAL, Request
from cbengine.testing import FakeModel


class DirectPort(LoopPort):
    """Delivers at once, on the calling thread, and holds the order of what a reader is told: legal states only, and
    after the terminal one nothing more."""

    def __init__(self) -> None:
        super().__init__(object())
        self.posts = 0
        self._status: dict[StreamBuffer, RequestStatus] = {}

    def _schedule(self, fn: Callable[..., Any], *args: Any) -> None:
        self.posts += 1
        items: list[Delivery] = args[0]
        for item in items:
            before = self._status.get(item.reader, RequestStatus.PENDING)
            label = item.reader.request_id
            if isinstance(item.event, StatusEvent):
                now = item.event.status
                assert now in LEGAL[before], f"{label} was told {now.value} after {before.value}"
                self._status[item.reader] = now
            else:
                assert not before.ended, f"{label} was given token {item.token_id} after its end"
        fn(*args)

    def waiter(self) -> Waiter:
        raise AssertionError("nobody waits in a driven test")


@dataclass
class Driven:
    """A request of a driven test, and what it was given."""

    request: Request
    buffer: StreamBuffer
    expected: list[int]
    """The answer that it has to get, if nothing ends it before."""
    cancelled: bool = False

    @property
    def alive(self) -> bool:
        return self.buffer.reason is None


@dataclass
class Driver:
    """Turns a loop by hand."""

    model: FakeModel
    device: Device
    config: EngineConfig
    sampler: Sampler = sample
    built: Built = field(init=False)
    driven: list[Driven] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox = Inbox()
        self.port = DirectPort()
        self.registry = Registry(self.config.max_queue_size, self.config.max_queued_tokens)
        self.built = build(self.config, self.model, self.device, self.inbox, self.registry, None, self.sampler)
        self.loop = self.built.loop
        self.parts = self.loop.parts
        self.pauses_heard = 0
        self._resumed = 0

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        expected: Sequence[int] | None = None,
        *,
        unread: int = 0,
        **sampling: Any,
    ) -> Driven:
        """Hand in a request.

        Args:
            expected: its answer; by default the model's own reference (greedy).
            unread: its `stream_buffer` with backpressure "pause"; 0 = it never waits for its reader.
        """
        params = (params or SamplingParams(**sampling)).resolved(self.model.spec.generation_defaults)
        number = len(self.driven)
        buffer = StreamBuffer(self.port, f"r{number}", len(prompt), 0.0)
        room = min(self.built.memory.max_model_len, self.parts.cache.capacity_tokens)
        limit = min(len(prompt) + (params.max_new_tokens or room), room)
        request = Request(
            id=number,
            label=f"r{number}",
            params=params,
            seed=params.seed or 0,
            reader=buffer,
            arrival_time=0.0,
            prompt=np.array(prompt, np.int32),
            limit=limit,
            stop_ids=frozenset(params.stop_token_ids),
            backpressure="pause" if unread else "buffer",
            stream_buffer=unread,
        )
        if unread:
            buffer.stride = max(1, unread // 2)
            buffer.ack = lambda: self.inbox.put(Read(number))
        if expected is None:
            expected = self.model.reference(
                prompt,
                limit - len(prompt),
                min_new_tokens=params.min_new_tokens,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
            )
        driven = Driven(request, buffer, list(expected))
        self.driven.append(driven)
        self.registry.enter([number], request.label, len(prompt), lambda: self.inbox.put(Submit(request)))
        return driven

    def cancel(self, driven: Driven) -> None:
        driven.cancelled = True
        self.inbox.put(Cancel(driven.request.id))

    def pause(self) -> None:
        self.inbox.put(Pause(self._paused))

    def _paused(self) -> None:
        assert self.parts.pipeline.num_in_flight == 0, "a pause was acknowledged while a step was in flight"
        self.pauses_heard += 1

    @property
    def paused(self) -> bool:
        """A pause was acknowledged and has not been taken back."""
        return self.pauses_heard > self._resumed

    def resume(self) -> None:
        self._resumed += 1
        self.inbox.put(Resume())

    def stop(self, *, drain: bool) -> None:
        """Lifts all pauses, too."""
        self._resumed = 1 << 30
        self.inbox.put(Stop(drain=drain))

    @property
    def busy(self) -> bool:
        return bool(self.parts.requests or self.parts.pipeline.num_in_flight)

    def turn(self) -> bool:
        return self.loop.turn()

    def run(self, turns: int = 100_000) -> int:
        """Turn until there is nothing left to do; returns the number of turns."""
        for turn in range(turns):
            busy = self.turn()
            if self.loop.stopped:
                self.loop.refuse_rest()
                return turn
            if not busy:
                return turn
        raise AssertionError(f"not done after {turns} turns")

    def check(self) -> None:
        """Every answer is right and has ended, for a reason that there is, and everything was given back."""
        for driven in self.driven:
            buffer, request = driven.buffer, driven.request
            expected = driven.expected
            assert buffer.ids == expected[: len(buffer.ids)], f"{request!r} said {buffer.ids}, not {expected}"
            match buffer.reason:
                case FinishReason.STOP | FinishReason.LENGTH:
                    assert buffer.ids == expected, f"{request!r} ended after {buffer.ids}, not {expected}"
                case FinishReason.CANCELLED:
                    assert driven.cancelled, f"nobody cancelled {request!r}"
                case FinishReason.ERROR:
                    assert isinstance(buffer.error, EngineStoppedError), f"{request!r}: {buffer.error!r}"
                case _:
                    raise AssertionError(f"{request!r} has no end")
        said = sum(len(driven.buffer.ids) for driven in self.driven)
        assert self.parts.committer.tokens == said, "tokens were counted that nobody was given"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held by anybody."""
        parts = self.parts
        parts.cache.check()
        assert not parts.requests and parts.pipeline.num_in_flight == 0
        assert parts.cache.num_free == parts.cache.capacity and parts.cache.num_retired == 0
        assert parts.rows.num_used == 0 and self.registry.num_labels == 0 and self.registry.num_queued == 0
        assert parts.scheduler.num_running == 0 and parts.scheduler.num_waiting == 0
