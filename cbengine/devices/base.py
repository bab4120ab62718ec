"""The seam between the step loop and whatever executes its work.

One loop runs over four implementations: `cuda` (real streams), `threaded` (a stream is a worker thread: the CPU
product), `inline` (everything at once: the reference) and `cbengine.testing.SimDevice` (a seeded legal order with a race
check). Everything here is called from the engine thread only, unless it says otherwise.

The contract, which the loop's invariants I6 to I10 and I14 stand on:

* A stream runs its operations in the order in which they were launched. Different streams are ordered by events alone.
* `record(event, stream)` marks the point after everything launched on `stream` so far; `wait(stream, event)` lets later
  operations of `stream` start only after the newest such mark; `event.synchronize()` blocks the calling thread on it.
  Waiting for an event that was never recorded returns at once.
* An operation that raises ends its *span*: the operations between two recorded events of one stream. The rest of the
  span is skipped, `synchronize()` of the event that closes the span raises the operation's own exception, and the span
  after it runs as if nothing had happened. So a step that breaks is reported by that step's `done` event and by no other.
  A fault that leaves the device unusable is raised as `DeviceLostError` by this and every later call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


class DeviceLostError(RuntimeError):
    """The device cannot be used any more; the engine ends (`EngineDeadError`), and may be started again."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of memory that the device has, and that a new allocation could have."""

    total: int
    free: int


class Stream(ABC):
    """An ordered queue of operations."""

    name: str


class Event(ABC):
    """A mark in a stream that other streams and the host can wait for. Can be recorded again and again."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the newest recorded mark is reached. Raises what its span raised."""

    @abstractmethod
    def query(self) -> bool:
        """True if `synchronize()` would not block."""

    def wait_until(self, deadline: float) -> None:
        """Sleep until the mark is reached, or until `deadline` (`time.perf_counter()`). Raises nothing.

        A device that cannot sleep on it returns at once: whoever calls this only wants to be early, not sure.
        """


class Device(ABC):
    """Memory, streams and events of one device."""

    name: str
    """"cpu", "cuda:0", …"""
    torch_device: torch.device
    overlaps: bool
    """True if the host goes on while an operation runs: double buffering pays only then."""
    graphs: bool = False
    """True if replaying what was captured costs less than running it: graphs are then used where nobody said otherwise."""
    checks: bool = False
    """True if `reads`/`writes` tags are looked at. The loop computes the expensive ones (pages) only then."""

    def attach(self) -> None:
        """Prepare the calling thread to be the engine thread of this device (current device, thread-local state)."""

    @abstractmethod
    def stream(self, name: str) -> Stream: ...

    @abstractmethod
    def event(self, name: str = "") -> Event: ...

    @abstractmethod
    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory that copies can read from and write to asynchronously (pinned where that exists)."""

    @abstractmethod
    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in device memory."""

    def free_buffer(self, buffer: torch.Tensor) -> None:
        """Give the memory of one of this device's buffers back, whoever still has views of it. They must not be written
        any more. Only when nothing runs on the device."""
        buffer.untyped_storage().resize_(0)

    @abstractmethod
    def launch(
        self,
        stream: Stream,
        fn: Callable[[], Any],
        *,
        name: str = "",
        reads: Iterable[Hashable | torch.Tensor] = (),
        writes: Iterable[Hashable | torch.Tensor] = (),
    ) -> None:
        """Queue `fn` on `stream`. `reads` and `writes` name what it touches: tensors (by their storage) or tags."""

    @abstractmethod
    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy between two buffers of the same shape. Asynchronous: `src` must stay as it is until it is done."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None: ...

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None: ...

    def host_access(
        self, *, reads: Iterable[Hashable | torch.Tensor] = (), writes: Iterable[Hashable | torch.Tensor] = ()
    ) -> None:
        """Declare that the host is about to read or write this. Free of charge, except on a device that checks it."""

    def capture(self, key: Hashable, fn: Callable[[], Any]) -> Callable[[], Any]:
        """Make `fn` cheap to run again and again with the same memory (a CUDA graph). The result runs on `compute`.

        `key` names it in messages. What `fn` reads other than through fixed buffers is frozen by a real graph, so it must not
        vary between replays; a device without graphs runs `fn` each time, and raises `BakedValueError` where it varies
        (`cbengine.devices.baked`). `fn` may run while it is captured, and memory that it writes may change then. Only when
        nothing is queued.

        Raises:
            RuntimeError: `fn` cannot be captured. The device is as before.
        """
        return fn

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every stream is empty. Raises nothing that an event already reported or will report."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo: ...

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued and release threads and streams. Idempotent."""
