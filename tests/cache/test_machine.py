"""The cache under every order of what the engine does with it, against a model in plain Python.

The machine is a caricature of the engine: rows, steps in flight, fences, committed tokens. Pages are not moved, but what
they would hold is known: a dictionary from block to the tokens that were written there last. After every rule all books
balance (`CacheManager.check`), and whatever a row is about to read is what it wrote or found.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cbengine.cache.geometry import CacheGeometry
from cbengine.cache.manager import CacheManager, Dropped
from cbengine.cache.prefix import Chain, digest
from cbengine.cache.swap import Pairs, SwapCosts, SwapSpace, SwapTicket
from cbengine.models.base import LayerSpec, ModelSpec

PAGE, ROWS, BLOCKS, LIMIT, AHEAD = 4, 6, 14, 40, 8


def geometry_of(windows: tuple[int | None, ...]) -> CacheGeometry:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    layers = tuple(LayerSpec(kind, 1, 2, window) for kind, window in zip(kinds, windows, strict=True))
    spec = ModelSpec("machine", layers, 1, 2, 4, 50, 64, torch.float32, 0, (), {})
    return CacheGeometry.of(spec, PAGE)


def weak(data: bytes) -> bytes:
    """A hash with two bits: nearly everything collides."""
    return bytes([sum(data) % 4])


@dataclass(eq=False)
class Work:
    """A sequence: in a row, on its way out of one, or waiting."""

    tokens: list[int]
    chain: Chain
    row: int = -1
    computed: int = 0
    planned: int = 0
    leaving: bool = False
    ended: bool = False
    ticket: SwapTicket | None = None


@dataclass(eq=False)
class Step:
    """A launched step: how far each of its sequences gets."""

    number: int
    ends: list[tuple[Work, int, int]] = field(default_factory=list)


class Copies:
    """Moves what blocks hold at once."""

    def __init__(self, machine: CacheMachine) -> None:
        self.machine = machine

    def to_host(self, pairs: Pairs) -> Copies:
        for group, (device, host) in enumerate(pairs):
            for block, place in zip(device, host, strict=True):
                self.machine.host[group, place] = dict(self.machine.device.get((group, block), {}))
        return self

    def to_device(self, pairs: Pairs) -> Copies:
        for group, (device, host) in enumerate(pairs):
            for block, place in zip(device, host, strict=True):
                self.machine.device[group, block] = dict(self.machine.host[group, place])
        return self

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CacheMachine(RuleBasedStateMachine):
    """Full attention, with the prefix cache."""

    windows: tuple[int | None, ...] = (None,)
    digest = staticmethod(digest)

    @initialize()
    def build(self) -> None:
        self.geometry = geometry_of(self.windows)
        self.cache = CacheManager(self.geometry, BLOCKS, ROWS, LIMIT, self._assigned, sharing=True)
        self.cache.swap = SwapSpace(self.geometry, 8, Copies(self), SwapCosts("swap"))
        self.tokens = np.zeros((ROWS, LIMIT), np.int32)
        self.free_rows = list(range(ROWS))
        self.live: list[Work] = []
        self.waiting: list[Work] = []
        self.flight: deque[Step] = deque()
        self.launched = self.committed = 0
        self.returning: list[tuple[int, Work | Dropped]] = []
        self.device: dict[
            tuple[int, int], dict[int, tuple[int, ...]]
        ] = {}  # block -> {offset: (position, prefix hash)}
        self.host: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        self.step = Step(1)

    def _assigned(self, tag: str, blocks: list[int]) -> None:
        """I11: no step in flight reads or writes what gets a new owner."""
        group = int(tag.removeprefix("block") or 0)
        for step in self.flight:
            for work, start, end in step.ends:
                if work.row >= 0:
                    touched = {self._block(group, work, p) for p in range(self._low(group, start), end)}
                    assert not touched & set(blocks), f"block of {tag} handed out while step {step.number} uses it"

    def _low(self, group: int, start: int) -> int:
        window = self.geometry.groups[group].window
        return 0 if window is None else max(0, start - window + 1)

    def _block(self, group: int, work: Work, position: int) -> int:
        return int(self.cache.group_tables[group][work.row, position // PAGE])

    def _running(self) -> list[Work]:
        return [work for work in self.live if not work.leaving]

    # --- rules -----------------------------------------------------------------------------------------------------

    @rule(data=st.data(), salt=st.sampled_from([None, "x"]), length=st.integers(1, 24), kind=st.integers(0, 2))
    def arrive(self, data: st.DataObject, salt: str | None, length: int, kind: int) -> None:
        """A new sequence; two of three kinds begin alike."""
        tokens = [kind * (i // 9) + i % 3 for i in range(length)]
        if data.draw(st.booleans()):
            tokens[-1] = 7
        self.waiting.append(Work(tokens, Chain(salt, self.digest)))

    @precondition(lambda self: self.waiting and self.free_rows)
    @rule(which=st.integers(0, 100))
    def admit(self, which: int) -> None:
        work = self.waiting[which % len(self.waiting)]
        known = np.array(work.tokens, np.int32)
        match = self.cache.match(work.chain, known)
        if self.cache.spare_after(len(known) + 1, match) < 0:
            return
        self.waiting.remove(work)
        work.row = self.free_rows.pop()
        self.tokens[work.row, : len(known)] = known
        there = self.cache.admit(work.row, len(known) + 1, match, chain=work.chain, ticket=work.ticket)
        work.ticket = None
        work.computed = work.planned = there
        work.leaving = False
        assert there < len(known)
        self.live.append(work)
        self._check_readable(work, there)

    @precondition(lambda self: self._running())
    @rule(which=st.integers(0, 100), count=st.integers(1, AHEAD))
    def plan(self, which: int, count: int) -> None:
        """The next tokens of a sequence join the step being planned."""
        running = self._running()
        work = running[which % len(running)]
        if any(work is other for other, _, _ in self.step.ends):
            return
        end = min(work.planned + count, len(work.tokens))
        if end == work.planned:  # a decode: its token is not known to the host, but it is what the device samples
            if end >= LIMIT - 1:
                return
            work.tokens.append(len(work.tokens) % 3)
            self.tokens[work.row, end] = work.tokens[-1]
            end += 1
        end = self.cache.reach(work.row, end)
        if end <= work.planned:
            return
        self.step.ends.append((work, work.planned, end))
        work.planned = end

    @precondition(lambda self: len(self.flight) < 2)
    @rule()
    def launch(self) -> None:
        """Everything of the step happens on the device, in the order of the launches."""
        for group, pairs in enumerate(self.cache.take_copies()):
            for source, to in pairs:
                self.device[group, to] = dict(self.device.get((group, source), {}))
        step, self.step = self.step, Step(self.launched + 2)
        step.ends = [entry for entry in step.ends if not entry[0].leaving]
        for work, start, end in step.ends:
            self._check_readable(work, start)
            for group in range(len(self.geometry.groups)):
                for position in range(start, end):
                    cell = self.device.setdefault((group, self._block(group, work, position)), {})
                    cell[position % PAGE] = self._content(work, position)
        self.launched += 1
        self.flight.append(step)
        self._take_dropped()

    @precondition(lambda self: self.flight)
    @rule()
    def commit(self) -> None:
        step = self.flight.popleft()
        for work, _, end in step.ends:
            work.computed = end
        running = [work for work, _, _ in step.ends if not work.leaving]
        rows = np.array([work.row for work in running], np.int64)
        self.cache.advance(rows, np.array([work.computed for work in running], np.int64), self.tokens)
        self.committed += 1
        self._take_dropped()
        self._reclaim()

    @precondition(lambda self: self._running())
    @rule(which=st.integers(0, 100), how=st.sampled_from(["cancel", "preempt", "swap"]))
    def leave(self, which: int, how: str) -> None:
        running = self._running()
        work = running[which % len(running)]
        for other, start, _ in self.step.ends:
            if other is work:
                work.planned = start
        self.step.ends = [entry for entry in self.step.ends if entry[0] is not work]
        work.leaving, work.ended = True, how == "cancel"
        if how == "swap":
            work.ticket = self.cache.swap_out(work.row, work.planned)
        self.cache.retire(work.row)
        self.returning.append((self.launched, work))
        self._reclaim()

    @precondition(lambda self: self._running() and self.free_rows)
    @rule(which=st.integers(0, 100), back=st.integers(0, 9))
    def fork(self, which: int, back: int) -> None:
        """A sibling goes on from a committed position, with another token."""
        running = self._running()
        parent = running[which % len(running)]
        at = parent.computed - back
        if at < 1:
            return
        row = self.free_rows[-1]
        if not self.cache.fork(parent.row, row, at):
            return
        self.free_rows.pop()
        child = Work([*parent.tokens[:at], 9], Chain.like(parent.chain, at // PAGE), row, at, at)
        self.tokens[row, : at + 1] = child.tokens
        self.live.append(child)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 100))
    def give_up(self, which: int) -> None:
        """Somebody who waits, perhaps with pages swapped out, is cancelled."""
        work = self.waiting.pop(which % len(self.waiting))
        if work.ticket is not None:
            assert self.cache.swap is not None
            self.cache.swap.drop(work.ticket)

    @rule()
    def new_weights(self) -> None:
        """Rare in life; here it must not be wrong at any moment."""
        if len(self.live) > 3:
            self.cache.forget()

    # --- how it is checked -----------------------------------------------------------------------------------------

    def _content(self, work: Work, position: int) -> tuple[int, ...]:
        """What K and V at a position depend on: all tokens up to it."""
        return (position, *work.tokens[: position + 1])

    def _check_readable(self, work: Work, start: int) -> None:
        """All that a query at `start` reads is there and right, as soon as the launched steps and the copies have run."""
        pending = [dict(pairs) for pairs in self.cache._copies]
        for group in range(len(self.geometry.groups)):
            sources = {to: source for source, to in pending[group].items()}
            for position in range(self._low(group, start), start):
                block = self._block(group, work, position)
                assert block >= 2 * self.geometry.blocks_per_chunk[group], "a page inside the window is gone"
                cell = self.device.get((group, sources.get(block, block)), {})
                assert cell.get(position % PAGE) == self._content(work, position), "a page holds something else"

    def _take_dropped(self) -> None:
        dropped = self.cache.take_dropped()
        if dropped:
            self.returning.append((self.launched, dropped))

    def _reclaim(self) -> None:
        for entry in self.returning[:]:
            fence, what = entry
            if fence > self.committed:
                continue
            self.returning.remove(entry)
            if not isinstance(what, Work):
                self.cache.release_dropped(what)
                continue
            self.cache.release(what.row)
            self.free_rows.append(what.row)
            what.row = -1
            self.live.remove(what)
            if what.ticket is not None:
                what.ticket.computed = what.computed
            if not what.ended:
                if what.computed == len(what.tokens):
                    what.tokens.append(8)
                self.waiting.append(what)

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        usage = self.cache.usage()
        assert usage.used + usage.free + usage.cached + usage.reserved == usage.total
        assert min(usage.used, usage.free, usage.cached) >= 0
        for work in self._running():
            for group, held in zip(self.geometry.groups, self.cache.held(work.row), strict=True):
                if group.window is not None:
                    ahead = int(self.cache.ready[work.row]) - work.computed
                    assert held <= -(-(group.window + ahead) // PAGE) + 1, "a window keeps more than it sees"

    def teardown(self) -> None:
        """Everything is free in the end."""
        if not hasattr(self, "cache"):
            return
        for work in self._running():
            work.leaving = work.ended = True
            self.cache.retire(work.row)
            self.returning.append((self.launched, work))
        while self.flight:
            self.flight.popleft()
            self.committed += 1
        self._take_dropped()
        self._reclaim()
        for work in self.waiting:
            if work.ticket is not None:
                assert self.cache.swap is not None
                self.cache.swap.drop(work.ticket)
        self.cache.check()
        usage = self.cache.usage()
        assert usage.used == 0 and self.cache.num_free == self.cache.capacity and self.cache.num_retired == 0
        self.cache.forget()
        assert self.cache.usage().free == self.cache.capacity
        assert self.cache.swap is not None and self.cache.swap.pool.num_free == self.cache.swap.pool.capacity


class CollidingMachine(CacheMachine):
    """The same with a hash that collides all the time."""

    digest = staticmethod(weak)


class SlidingMachine(CacheMachine):
    windows = (6,)


class HybridMachine(CacheMachine):
    """A chunk is one block of the three sliding layers, or three of the full one."""

    windows = (None, 5, 5, 5)


class UnevenMachine(CacheMachine):
    """Two full layers and three sliding ones: a chunk is three blocks of the one or two of the other."""

    windows = (None, None, 9, 9, 9)


for machine in (CacheMachine, CollidingMachine, SlidingMachine, HybridMachine, UnevenMachine):
    machine.TestCase.settings = settings(
        max_examples=80, stateful_step_count=60, deadline=None, phases=(Phase.reuse, Phase.generate)
    )

TestFull = CacheMachine.TestCase
TestColliding = CollidingMachine.TestCase
TestSliding = SlidingMachine.TestCase
TestHybrid = HybridMachine.TestCase
TestUneven = UnevenMachine.TestCase
