"""A stand-in for what `CudaDevice` uses of torch.cuda, over memory of the host.

It is stricter than CUDA where CUDA goes wrong in silence: it writes down on which stream everything was put, refuses copies
that would block the host, and replays a graph exactly as it was captured: the same operations on the same memory with the same
numbers, whatever has changed in Python since. What is copied to the host is there when the host has waited for it, and garbage
before; what is copied from the host must stay as it is until then. A `fault` is reported by every call that reaches the device
from then on; a capture that broke leaves the allocator in it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cbengine.devices.cuda import CudaRuntime
from cbengine.execution.host_reads import NoHostReads

Entry = tuple[str, ...]


class FakeGraph:
    """The operations of a capture, and the memory that they were called with."""

    def __init__(self, owner: FakeCuda) -> None:
        self.owner = owner
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.stream: FakeStream | None = None
        self.replays = 0
        self.alive = True

    def replay(self) -> None:
        assert self.alive, "a graph was replayed after its reset"
        assert self.owner.current is self.stream, "a graph was replayed on another stream than it was captured on"
        self.replays += 1
        with torch.inference_mode():
            for func, args, kwargs, result in self.calls:
                _put(func(*args, **kwargs), result)

    def reset(self) -> None:
        self.alive = False
        self.calls.clear()


def _put(fresh: Any, kept: Any) -> None:
    """A kernel of a graph writes its result to where it was at capture."""
    if isinstance(kept, torch.Tensor):
        if fresh.data_ptr() != kept.data_ptr() or fresh.stride() != kept.stride():
            kept.copy_(fresh)
    elif isinstance(kept, (tuple, list)):
        for one, other in zip(fresh, kept, strict=True):
            _put(one, other)


class _Tape(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, result))
        return result


@dataclass(eq=False)
class UnderWay:
    """A copy that the host has not waited for."""

    dst: torch.Tensor
    src: torch.Tensor
    meant: torch.Tensor
    to_host: bool
    landed: bool = False

    def land(self) -> None:
        """The host has waited for it."""
        if self.landed:
            return
        self.landed = True
        if self.to_host:
            self.dst.copy_(self.meant)
        else:
            assert torch.equal(self.src, self.meant), "pinned memory was written while it was being copied"


def _land(copies: set[UnderWay]) -> None:
    for copy in copies:
        copy.land()
    copies.clear()


@dataclass(eq=False)
class FakeStream:
    owner: FakeCuda
    name: str
    under_way: set[UnderWay] = field(default_factory=set)
    """Copies that whoever waits for this stream has waited for."""

    def wait_event(self, event: FakeEvent) -> None:
        self.owner.report()
        self.under_way |= event.under_way
        self.owner.log.append(("wait", self.name, event.name))

    def synchronize(self) -> None:
        self.owner.log.append(("synchronize", self.name))
        self.owner.report()
        _land(self.under_way)


@dataclass(eq=False)
class FakeEvent:
    owner: FakeCuda
    name: str
    blocking: bool
    under_way: set[UnderWay] = field(default_factory=set)

    def record(self, stream: FakeStream) -> None:
        self.owner.report()
        self.owner.log.append(("record", stream.name, self.name))
        stream.under_way = {copy for copy in stream.under_way if not copy.landed}
        self.under_way = set(stream.under_way)

    def synchronize(self) -> None:
        self.owner.log.append(("host waits", self.name))
        self.owner.report()
        _land(self.under_way)

    def query(self) -> bool:
        self.owner.report()
        _land(self.under_way)
        return True


@dataclass
class Capture:
    pool: object
    stream: FakeStream
    mode: str


@dataclass(eq=False)
class FakeCuda(CudaRuntime):
    """`log` has what was put where: ("op", stream) for what `launch` ran, ("copy", stream), ("wait", stream, event), …"""

    index: int = 0
    log: list[Entry] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    graphs: list[FakeGraph] = field(default_factory=list)
    fault: Exception | None = None
    """What an earlier kernel did wrong: CUDA reports it with whatever is called next."""
    current_device: int = 0
    cached: int = 0
    """Calls of `empty_cache`."""
    forgotten: int = 0
    """Calls of `forget_workspaces`."""
    broken_off: list[Any] = field(default_factory=list)
    """Pools of captures that broke."""

    def __post_init__(self) -> None:
        super().__init__(self.index)
        self.default = FakeStream(self, "default")
        self.current = self.default
        self.streams: list[FakeStream] = []
        self.pinned_at: set[int] = set()
        self.registered: set[int] = set()
        self.device_at: set[int] = set()
        self.users: dict[int, set[str]] = {}
        """Address of device memory: the streams that the allocator was told of."""
        self.capturing_now = False
        self.break_capture: Exception | None = None
        """Raised by the end of a capture, as after an operation that cannot be captured."""
        self.allocates_to: object = None
        """The pool of the graphs that torch's allocator serves everybody from: during a capture, or because one broke."""
        self._keep: list[torch.Tensor] = []  # no address is used twice

    def report(self) -> None:
        if self.fault is not None:
            raise self.fault

    def set_device(self) -> None:
        self.report()
        self.current_device = self.index

    def make_stream(self) -> FakeStream:
        self.report()
        self.streams.append(FakeStream(self, f"s{len(self.streams)}"))
        return self.streams[-1]

    def make_event(self, blocking: bool) -> FakeEvent:
        return FakeEvent(self, f"e{sum(entry[0] == 'event' for entry in self.log)}", blocking)

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Generator[None]:
        before, self.current = self.current, stream
        self.log.append(("op", stream.name))
        try:
            yield
        finally:
            self.current = before

    def settle(self) -> None:
        self.current.synchronize()

    def synchronize(self) -> None:
        assert not self.capturing_now, "the host waited for the device during a capture"
        self.log.append(("synchronize",))
        self.report()
        for stream in (self.default, *self.streams):
            _land(stream.under_way)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert not self.capturing_now, "a buffer was made during a capture"
        assert self.allocates_to is None, "a buffer was made of memory that belongs to graphs"
        self.report()
        self.log.append(("zeros", self.current.name))
        return self._remember(torch.zeros(shape, dtype=dtype), self.device_at)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.report()
        return self._remember(torch.zeros(shape, dtype=dtype), self.pinned_at)

    def _remember(self, tensor: torch.Tensor, where: set[int]) -> torch.Tensor:
        self._keep.append(tensor.new_empty(0).set_(tensor.untyped_storage()))
        where.add(tensor.untyped_storage().data_ptr())
        return tensor

    def register(self, tensor: torch.Tensor) -> None:
        self.report()
        self.registered.add(tensor.data_ptr())
        self.pinned_at.add(tensor.data_ptr())

    def unregister(self, tensor: torch.Tensor) -> None:
        self.report()
        self.registered.remove(tensor.data_ptr())
        self.pinned_at.remove(tensor.data_ptr())

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        places = [tensor.untyped_storage().data_ptr() for tensor in (dst, src)]
        known = all(place in self.device_at or place in self.pinned_at for place in places)
        assert known, "a copy to or from memory that is not pinned makes the host wait"
        assert self.current is not self.default, "a copy on the default stream is ordered with nothing"
        self.report()
        self.log.append(("copy", self.current.name))
        to_host = places[0] in self.pinned_at
        self.current.under_way.add(UnderWay(dst, src, src.clone(), to_host))
        if to_host:
            dst.fill_(-77)
        else:
            dst.copy_(src)

    def used_by(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.users.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream.name)

    def make_graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    def make_pool(self) -> object:
        return object()

    @contextmanager
    def capturing(self, graph: FakeGraph, *, pool: object, stream: FakeStream, mode: str) -> Generator[None]:
        assert not self.capturing_now, "one capture at a time"
        self.synchronize()
        self.captures.append(Capture(pool, stream, mode))
        self.capturing_now, self.allocates_to = True, pool
        self.current = stream  # as torch does: a capture that breaks leaves it so
        graph.stream = stream
        try:
            with _Tape(graph), NoHostReads():
                yield
        finally:
            self.capturing_now = False
        if self.break_capture is not None:
            raise self.break_capture
        self.allocates_to = None

    def memory(self) -> tuple[int, int]:
        self.report()
        return 1 << 30, 2 << 30

    def empty_cache(self) -> None:
        self.report()
        self.cached += 1

    def forget_workspaces(self) -> None:
        self.report()
        self.forgotten += 1

    def end_capture(self, pool: Any) -> None:
        self.broken_off.append(pool)
        self.allocates_to = None


def in_order(log: list[Entry], *wanted: Callable[[Entry], bool]) -> bool:
    """Whether entries that satisfy `wanted` come in this order."""
    rest = iter(log)
    return all(any(satisfies(entry) for entry in rest) for satisfies in wanted)
