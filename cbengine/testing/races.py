"""Happens-before by vector clocks: finds two accesses that nothing orders, whatever order they happened to run in.

The idea is that of FastTrack (Flanagan and Freund, PLDI 2009): a resource remembers the time of its last write and of
the reads since then, and each new access must come after those that it conflicts with. All clocks are known when a call
is made, because the calls of one host thread alone order the streams; so a race is found at the call that completes it,
before anything runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from cbengine.devices.base import DeviceLostError

HOST = 0
"""The timeline of the host; streams are 1, 2, …"""

Clock = tuple[int, ...]

_STORAGE = object()  # keeps the address of a tensor apart from a tag that is an int


class RaceError(DeviceLostError):
    """Two operations touch the same thing, at least one of them writes, and nothing orders them.

    `first` and `second` name the operations in the order of their calls, `resource` is what both touch.
    """

    def __init__(self, resource: str, first: str, second: str) -> None:
        super().__init__(
            f"race on {resource}: {first} and {second} are ordered by no stream, no event and no wait of the host"
        )
        self.resource = resource
        self.first = first
        self.second = second


@dataclass(slots=True)
class _Access:
    timeline: int
    tick: int
    label: str


@dataclass(slots=True)
class _Resource:
    label: str
    storage: torch.UntypedStorage | None  # held, so that no other tensor gets the address while we remember it
    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict[int, _Access])  # newest read since `write`, by timeline


class RaceDetector:
    """The clocks of the host and of every stream, and who touched what. Not thread-safe: one host thread."""

    def __init__(self) -> None:
        self._clocks: list[list[int]] = [[0]]
        self._resources: dict[Hashable, _Resource] = {}

    def add_timeline(self) -> int:
        """A new stream; returns its timeline."""
        for clock in self._clocks:
            clock.append(0)
        self._clocks.append([0] * len(self._clocks[HOST]))
        return len(self._clocks) - 1

    def mark(self, timeline: int) -> Clock:
        """The time of everything that was put on this timeline so far."""
        return tuple(self._clocks[timeline])

    def join(self, timeline: int, clock: Clock) -> None:
        """What comes next on `timeline` comes after `clock`."""
        own = self._clocks[timeline]
        for i, tick in enumerate(clock):  # may be shorter than `own`: made before the newest stream
            if tick > own[i]:
                own[i] = tick

    def join_everything(self) -> None:
        """The host has waited for all streams: everything so far comes before everything that follows."""
        for timeline in range(1, len(self._clocks)):
            self.join(HOST, self.mark(timeline))
        self._resources.clear()

    def operation(
        self,
        timeline: int,
        label: str,
        reads: Iterable[Hashable | torch.Tensor],
        writes: Iterable[Hashable | torch.Tensor],
    ) -> None:
        """An operation was queued on a stream. Raises `RaceError`."""
        self.join(timeline, self.mark(HOST))
        self._access(timeline, label, reads, writes)

    def host(
        self, label: str, reads: Iterable[Hashable | torch.Tensor], writes: Iterable[Hashable | torch.Tensor]
    ) -> None:
        """The host is about to read and write. Raises `RaceError`."""
        self._access(HOST, label, reads, writes)

    def _access(
        self,
        timeline: int,
        label: str,
        reads: Iterable[Hashable | torch.Tensor],
        writes: Iterable[Hashable | torch.Tensor],
    ) -> None:
        clock = self._clocks[timeline]
        clock[timeline] += 1
        access = _Access(timeline, clock[timeline], label)
        read = [r for r in map(self._resource, reads) if r is not None]
        written = [r for r in map(self._resource, writes) if r is not None]
        # All checks come before any change, so that an operation does not race with itself.
        for resource in read:
            _check(resource, resource.write, access, clock)
        for resource in written:
            _check(resource, resource.write, access, clock)
            for earlier in resource.reads.values():
                _check(resource, earlier, access, clock)
        for resource in read:
            resource.reads[timeline] = access
        for resource in written:
            # Everything before is ordered before this write, so what is ordered after it is ordered after all.
            resource.write = access
            resource.reads.clear()

    def _resource(self, what: Hashable | torch.Tensor) -> _Resource | None:
        """The entry of a tag or of a tensor's storage; None for a tensor without memory."""
        if not isinstance(what, torch.Tensor):
            entry = self._resources.get(what)
            if entry is None:
                entry = self._resources[what] = _Resource(repr(what), None)
            return entry
        storage = what.untyped_storage()
        address = storage.data_ptr()
        if address == 0:
            return None
        key = (_STORAGE, address)
        entry = self._resources.get(key)
        if entry is None:
            label = f"the tensor at {address:#x} ({what.dtype}, shape {tuple(what.shape)})"
            entry = self._resources[key] = _Resource(label, storage)
        return entry


def _check(resource: _Resource, earlier: _Access | None, access: _Access, clock: list[int]) -> None:
    if earlier is not None and clock[earlier.timeline] < earlier.tick:
        raise RaceError(resource.label, earlier.label, access.label)
