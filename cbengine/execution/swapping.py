"""Moving blocks between the device and the host, in batches, on the transfer stream. Engine thread only.

    I10 Every KV write of a step is on `compute`. A copy to the host waits for every step that was launched before it, and the
        steps after it wait for the copy: their inputs follow it on the transfer stream, and they wait for their inputs.

A copy to the device needs to wait for nothing: it fills blocks that were free, which no launched step touches (I11).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from cbengine.cache.geometry import CacheGeometry, block_views
from cbengine.cache.manager import block_tag
from cbengine.cache.swap import Pairs, SwapCosts
from cbengine.devices.base import Device, DeviceLostError, Event

Moves = Sequence[tuple[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]]
"""Block views (to, from), and the blocks of each."""


class BlockTransfer:
    """A batch of copies under way. See `cbengine.cache.swap.Transfer`."""

    def __init__(self, event: Event, num_bytes: int, costs: SwapCosts) -> None:
        self.event = event
        self._bytes = num_bytes
        self._costs = costs
        self._started = 0.0
        self._ended = 0.0
        self._through = False

    def run(self, moves: Moves, blocking: bool) -> None:
        """On the transfer stream."""
        self._started = time.perf_counter()
        for to, source, to_blocks, source_blocks in moves:
            for to_block, source_block in zip(to_blocks, source_blocks, strict=True):
                to[to_block].copy_(source[source_block], non_blocking=True)
        if blocking:
            self._ended = time.perf_counter()

    def done(self) -> bool:
        if not self._through and self.event.query():
            self._finish()
        return self._through

    def wait(self) -> None:
        self.event.synchronize()
        if not self._through:
            self._finish()

    def _finish(self) -> None:
        self._through = True
        # Where copies are only queued by `run`, the time at which we see that they are through is an upper bound.
        self._costs.moved(self._bytes, (self._ended or time.perf_counter()) - self._started)


class BlockMover:
    """Queues copies of whole blocks. See `cbengine.cache.swap.Mover`.

    `pool`, `host`: uint8 tensors of whole chunks, on the device and on the host.
    """

    def __init__(
        self, device: Device, geometry: CacheGeometry, pool: torch.Tensor, host: torch.Tensor, costs: SwapCosts
    ) -> None:
        self._device = device
        self._transfer = device.stream("transfer")
        self._compute = device.stream("compute")
        self._sizes = geometry.group_block_bytes
        self._views = block_views(pool, geometry)
        self._host_views = block_views(host, geometry)
        self._costs = costs

    def to_host(self, pairs: Pairs) -> BlockTransfer:
        moves = [
            (host, device, host_blocks, blocks)
            for host, device, (blocks, host_blocks) in zip(self._host_views, self._views, pairs, strict=True)
        ]
        reads, writes = self._tags(pairs, "", 0), self._tags(pairs, "host ", 1)
        return self._twice(lambda: self._queue(moves, "swap out", reads, writes, after_steps=True))

    def to_device(self, pairs: Pairs) -> BlockTransfer:
        moves = [
            (device, host, blocks, host_blocks)
            for host, device, (blocks, host_blocks) in zip(self._host_views, self._views, pairs, strict=True)
        ]
        reads, writes = self._tags(pairs, "host ", 1), self._tags(pairs, "", 0)
        return self._twice(lambda: self._queue(moves, "swap in", reads, writes))

    def _twice(self, queue: Callable[[], BlockTransfer]) -> BlockTransfer:
        """What could not be queued is tried once more, when nothing of it can be under way."""
        try:
            return queue()
        except DeviceLostError:
            raise
        except Exception:
            self._device.synchronize()
            return queue()

    def _queue(
        self, moves: Moves, name: str, reads: list[Hashable], writes: list[Hashable], *, after_steps: bool = False
    ) -> BlockTransfer:
        device = self._device
        if after_steps:
            steps = device.event("steps_before_swap")
            device.record(steps, self._compute)
            device.wait(self._transfer, steps)
        num_bytes = sum(len(move[2]) * size for move, size in zip(moves, self._sizes, strict=True))
        transfer = BlockTransfer(device.event("swapped"), num_bytes, self._costs)
        blocking = device.torch_device.type == "cpu"
        device.launch(self._transfer, partial(transfer.run, moves, blocking), name=name, reads=reads, writes=writes)
        device.record(transfer.event, self._transfer)
        return transfer

    def _tags(self, pairs: Pairs, prefix: str, side: int) -> list[Hashable]:
        if not self._device.checks:
            return []
        return [(prefix + block_tag(index), block) for index, pair in enumerate(pairs) for block in pair[side]]


def copy_blocks(views: Sequence[torch.Tensor], copies: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Copy whole blocks within the pool, (from, to) for each group. On `compute`, before the step that needs them."""
    for view, pairs in zip(views, copies, strict=True):
        for source, to in pairs:
            view[to].copy_(view[source])
