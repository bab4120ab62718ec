"""Swapping over hundreds of legal orders of the device, small enough for a millisecond or two each.

The real cache, the real swap space and the real copies between two buffers; instead of a model, steps that write numbers into
pages and look at those that they read. The race check finds whatever is not ordered, the numbers whatever is wrong all the
same.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cbengine.cache.geometry import layer_views
from cbengine.cache.manager import CacheManager, block_tag
from cbengine.cache.swap import SwapCosts, SwapSpace, SwapTicket
from cbengine.devices.base import Event
from cbengine.execution.swapping import BlockMover
from cbengine.testing import RaceError, SimDevice
from tests.cache.churn import MEMORY
from tests.cache.test_machine import PAGE, geometry_of
from tests.cache.test_swap import HAZARDS

ROWS, CHUNKS, LIMIT, TURNS = 4, 9, 40, 10
LAYOUTS: dict[str, tuple[int | None, ...]] = {"full": (None, None), "sliding": (6, 6), "hybrid": (None, 5, 5)}
SEEDS = 200


@dataclass(eq=False)
class Sequence:
    """`planned`: tokens that the launched steps write; `number` tells its pages from those of others."""

    number: int
    length: int
    row: int = -1
    computed: int = 0
    planned: int = 0
    ticket: SwapTicket | None = None


class Traffic:
    """Sequences that grow, are swapped out and come back, at random."""

    def __init__(self, seed: int, windows: tuple[int | None, ...], dropped: set[tuple[str, str]]) -> None:
        self.rng = random.Random(seed)
        self.device = SimDevice(seed, memory=MEMORY, drop=lambda kind, name: (kind, name) in dropped)
        self.geometry = geometry_of(windows)
        chunks, size = self.geometry.chunks_for(CHUNKS), self.geometry.chunk_bytes
        self.cache = CacheManager(self.geometry, CHUNKS, ROWS, LIMIT, self._assigned)
        pool = self.device.device_buffer(((chunks + 2) * size,), torch.uint8)
        host, costs = self.device.host_buffer((chunks * size,), torch.uint8), SwapCosts("swap")
        mover = BlockMover(self.device, self.geometry, pool, host, costs)
        self.cache.swap = SwapSpace(self.geometry, chunks, mover, costs)
        self.views = layer_views(pool, self.geometry)
        self.group_of = [i for n in range(len(windows)) for i, g in enumerate(self.geometry.groups) if n in g.layers]
        self.transfer, self.compute = self.device.stream("transfer"), self.device.stream("compute")
        self.slots = [
            (self.device.host_buffer((2,), torch.int32), self.device.device_buffer((2,), torch.int32)) for _ in range(2)
        ]
        self.flight: deque[tuple[Event, list[tuple[Sequence, int]]]] = deque()
        self.launched = self.committed = 0
        self.free_rows = list(range(ROWS))
        self.running: list[Sequence] = []
        self.returning: list[tuple[int, Sequence]] = []
        self.waiting = [Sequence(i, self.rng.randint(1, 12)) for i in range(5)]
        self.wrong: list[str] = []

    def _assigned(self, kind: str, blocks: list[int]) -> None:
        self.device.host_access(writes=[(kind, block) for block in blocks])

    # --- what happens on the host ----------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(TURNS):
            self.admit()
            if self.running and self.rng.random() < 0.4:
                self.leave(self.rng.choice(self.running))
            self.step()
        while self.flight:
            self.commit()
        self.device.synchronize()
        assert not self.wrong, self.wrong[0]

    def admit(self) -> None:
        for sequence in self.waiting[:]:
            if not self.free_rows or self.cache.spare_after(sequence.length + 1) < 0:
                return
            self.waiting.remove(sequence)
            sequence.row = self.free_rows.pop()
            there = self.cache.admit(sequence.row, sequence.length + 1, ticket=sequence.ticket)
            sequence.computed = sequence.planned = there
            sequence.ticket = None
            self.running.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.ticket = self.cache.swap_out(sequence.row, sequence.planned)
        self.cache.retire(sequence.row)
        self.returning.append((self.launched, sequence))

    def commit(self) -> None:
        done, ends = self.flight.popleft()
        done.synchronize()
        self.committed += 1
        for sequence, end in ends:
            sequence.computed = end
        here = [sequence for sequence, _ in ends if sequence in self.running]
        rows, computed = ([getattr(s, name) for s in here] for name in ("row", "computed"))
        self.cache.advance(np.array(rows, np.int64), np.array(computed, np.int64), np.zeros((ROWS, LIMIT), np.int32))
        self.reclaim()

    def reclaim(self) -> None:
        for fence, sequence in self.returning[:]:
            ticket = sequence.ticket
            if fence > self.committed or (ticket is not None and not ticket.transfer.done()):
                continue
            self.returning.remove((fence, sequence))
            self.cache.release(sequence.row)
            self.free_rows.append(sequence.row)
            if ticket is not None:
                ticket.computed = sequence.computed
            self.waiting.append(sequence)

    def step(self) -> None:
        """As `Pipeline` does it: inputs on `transfer`, everything else on `compute`, two at most in flight."""
        if len(self.flight) == 2:
            self.commit()
        spans = []
        for sequence in self.running:
            wanted = min(
                sequence.planned + self.rng.randint(1, 6), max(sequence.length, sequence.planned + 1), LIMIT - 1
            )
            end = self.cache.reach(sequence.row, wanted)
            if end > sequence.planned:
                spans.append((sequence, sequence.planned, end))
                sequence.planned, sequence.length = end, max(sequence.length, end)
        device, (host_in, device_in) = self.device, self.slots[self.launched % 2]
        ready, done = device.event("inputs_ready"), device.event("done")
        device.host_access(writes=(host_in,))
        device.copy(self.transfer, device_in, host_in)
        device.record(ready, self.transfer)
        device.wait(self.compute, ready)
        work = [(s, start, end, [t[s.row].copy() for t in self.cache.group_tables]) for s, start, end in spans]
        reads, writes = self._tags(work)
        device.launch(self.compute, lambda: self.work(work), name="step", reads=[device_in, *reads], writes=writes)
        device.record(done, self.compute)
        self.launched += 1
        self.flight.append((done, [(s, end) for s, _, end in spans]))

    # --- what happens on the device --------------------------------------------------------------------------------

    def _low(self, group: int, start: int) -> int:
        window = self.geometry.groups[group].window
        return 0 if window is None else max(0, start - window + 1)

    def _tags(self, work: list[tuple[Sequence, int, int, list[np.ndarray]]]) -> tuple[list[object], list[object]]:
        reads: list[object] = []
        writes: list[object] = []
        for _, start, end, tables in work:
            for group, table in enumerate(tables):
                tag, last = block_tag(group), -(-end // PAGE)
                reads += [(tag, block) for block in table[self._low(group, start) // PAGE : last].tolist()]
                writes += [(tag, block) for block in table[start // PAGE : last].tolist()]
        return reads, writes

    def work(self, work: list[tuple[Sequence, int, int, list[np.ndarray]]]) -> None:
        for sequence, start, end, tables in work:
            for layer, (key, value) in enumerate(self.views):
                group = self.group_of[layer]
                read, write = np.arange(self._low(group, start), start), np.arange(start, end)
                table, mark = tables[group], 100.0 * sequence.number + 1000.0 * layer
                for part in (key, value):
                    found = part[table[read // PAGE], read % PAGE, 0, 0].numpy()
                    if (found != mark + read).any():
                        self.wrong.append(f"{sequence} read {found} in layer {layer}, not {mark + read}")
                    part[table[write // PAGE], write % PAGE] = torch.from_numpy(mark + write).float()[:, None, None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_is_swapped_comes_back_as_it_was(layout: str) -> None:
    swaps = 0
    for seed in range(SEEDS):
        traffic = Traffic(seed, LAYOUTS[layout], set())
        traffic.run()
        traffic.cache.check()
        assert traffic.cache.swap is not None
        swaps += traffic.cache.swap.swaps_in
    assert swaps > SEEDS // 2


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planted_hazards_are_found(layout: str, hazard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, _ = HAZARDS[hazard]
    dropped: set[tuple[str, str]] = set()
    plant(monkeypatch, dropped)
    found = 0
    for seed in range(SEEDS // 4):
        try:
            Traffic(seed, LAYOUTS[layout], dropped).run()
        except (RaceError, AssertionError):
            found += 1
    assert found > SEEDS // 20, f"found in {found} of {SEEDS // 4} runs"
