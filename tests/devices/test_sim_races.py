"""The race check of the simulated device: what is ordered is no race, what is not ordered is one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable

import pytest
import torch

from cbengine.devices import Stream
from cbengine.testing import RaceError, SimDevice
from cbengine.testing.sim import SimEvent


def _lazy(*, check_races: bool = True) -> SimDevice:
    return SimDevice(0, eagerness=0.0, check_races=check_races)


def _nothing() -> None:
    pass


class Program:
    """Calls on a device in one line each."""

    def __init__(self, *, check_races: bool = True) -> None:
        self.device = _lazy(check_races=check_races)
        self.events: dict[str, SimEvent] = {}

    def stream(self, name: str) -> Stream:
        return self.device.stream(name)

    def event(self, name: str) -> SimEvent:
        return self.events.setdefault(name, self.device.event(name))

    def read(self, stream: str, *what: Hashable) -> None:
        self.device.launch(self.stream(stream), _nothing, name="read", reads=what)

    def write(self, stream: str, *what: Hashable) -> None:
        self.device.launch(self.stream(stream), _nothing, name="write", writes=what)

    def host_read(self, *what: Hashable) -> None:
        self.device.host_access(reads=what)

    def host_write(self, *what: Hashable) -> None:
        self.device.host_access(writes=what)

    def record(self, event: str, stream: str) -> None:
        self.device.record(self.event(event), self.stream(stream))

    def wait(self, stream: str, event: str) -> None:
        self.device.wait(self.stream(stream), self.event(event))

    def sync(self, event: str) -> None:
        self.event(event).synchronize()

    def query(self, event: str) -> None:
        while not self.event(event).query():
            pass


ORDERED: dict[str, Callable[[Program], object]] = {
    "one stream": lambda p: (p.write("a", "x"), p.write("a", "x"), p.read("a", "x"), p.write("a", "x")),
    "two reads": lambda p: (p.read("a", "x"), p.read("b", "x"), p.host_read("x")),
    "two tags": lambda p: (p.write("a", "x"), p.write("b", "y")),
    "a read and a write in one operation": lambda p: p.device.launch(
        p.stream("a"), _nothing, reads=("x",), writes=("x", "x")
    ),
    "an event": lambda p: (p.write("a", "x"), p.record("e", "a"), p.wait("b", "e"), p.write("b", "x")),
    "a chain of events": lambda p: (
        p.write("a", "x"),
        p.record("e", "a"),
        p.wait("b", "e"),
        p.record("f", "b"),
        p.wait("c", "f"),
        p.write("c", "x"),
    ),
    "the host waits and launches": lambda p: (p.write("a", "x"), p.record("e", "a"), p.sync("e"), p.write("b", "x")),
    "the host asks and launches": lambda p: (p.write("a", "x"), p.record("e", "a"), p.query("e"), p.write("b", "x")),
    "the host waits and writes": lambda p: (p.read("a", "x"), p.record("e", "a"), p.sync("e"), p.host_write("x")),
    "the host writes and launches": lambda p: (p.host_write("x"), p.read("a", "x"), p.read("b", "x"), p.host_read("x")),
    "the host waits for everything": lambda p: (
        p.write("a", "x"),
        p.write("b", "y"),
        p.device.synchronize(),
        p.host_write("x", "y"),
    ),
    "an event of a stream that waited": lambda p: (
        p.read("a", "x"),
        p.record("e", "a"),
        p.wait("b", "e"),
        p.record("f", "b"),
        p.sync("f"),
        p.host_write("x"),
    ),
    "a stream made later": lambda p: (
        p.write("a", "x"),
        p.record("e", "a"),
        p.write("z", "other"),
        p.wait("z", "e"),
        p.write("z", "x"),
    ),
}

# The last call is the one that must raise.
UNORDERED: dict[str, Callable[[Program], object]] = {
    "two writes": lambda p: (p.write("a", "x"), p.write("b", "x")),
    "a write and a read": lambda p: (p.write("a", "x"), p.read("b", "x")),
    "a read and a write": lambda p: (p.read("a", "x"), p.write("b", "x")),
    "the first of two readers": lambda p: (
        p.read("a", "x"),
        p.read("b", "x"),
        p.record("e", "b"),
        p.wait("c", "e"),
        p.write("c", "x"),
    ),
    "a record before the write": lambda p: (p.record("e", "a"), p.write("a", "x"), p.wait("b", "e"), p.write("b", "x")),
    "a wait before the record": lambda p: (
        p.record("e", "a"),
        p.wait("b", "e"),
        p.write("a", "x"),
        p.record("e", "a"),
        p.write("b", "x"),
    ),
    "a wait on another stream": lambda p: (p.write("a", "x"), p.record("e", "a"), p.wait("c", "e"), p.write("b", "x")),
    "a wait that does not hold the host": lambda p: (
        p.write("a", "x"),
        p.record("e", "a"),
        p.wait("b", "e"),
        p.host_read("x"),
    ),
    "the host writes what is read": lambda p: (p.read("a", "x"), p.host_write("x")),
    "the host reads what is written": lambda p: (p.write("a", "x"), p.host_read("x")),
    "the host waited too early": lambda p: (
        p.write("a", "x"),
        p.record("e", "a"),
        p.sync("e"),
        p.write("a", "x"),
        p.host_read("x"),
    ),
    "the host writes after the launch": lambda p: (
        p.host_write("x"),
        p.read("a", "x"),
        p.read("b", "y"),
        p.record("e", "b"),
        p.sync("e"),
        p.host_write("x"),
    ),
    "what ran long ago": lambda p: (
        p.write("a", "x"),
        p.record("e", "a"),
        p.query("e"),
        p.write("a", "x"),
        p.read("b", "x"),
    ),
}


@pytest.mark.parametrize("name", list(ORDERED))
def test_what_is_ordered_is_no_race(name: str) -> None:
    program = Program()
    ORDERED[name](program)
    program.device.synchronize()
    assert program.device.fault is None


@pytest.mark.parametrize("name", list(UNORDERED))
def test_what_is_not_ordered_is_a_race(name: str) -> None:
    program = Program()
    with pytest.raises(RaceError) as raised:
        UNORDERED[name](program)
    assert raised.value.resource == "'x'"
    assert program.device.fault is raised.value


@pytest.mark.parametrize("name", list(UNORDERED))
def test_races_are_not_looked_for_where_nobody_asked(name: str) -> None:
    program = Program(check_races=False)
    UNORDERED[name](program)
    program.device.synchronize()
    assert not program.device.checks


def test_a_race_is_found_when_the_order_happened_to_be_right() -> None:
    device = SimDevice(0, eagerness=0.9)
    device.launch(device.stream("a"), _nothing, name="first", writes=("x",))
    while not device.trace:
        device.host_access()
    with pytest.raises(RaceError, match=r"race on 'x': first on a and second on b"):
        device.launch(device.stream("b"), _nothing, name="second", writes=("x",))
    assert device.trace == [("a", "first")]


def test_a_race_ends_the_device() -> None:
    device = _lazy()
    a, b = device.stream("a"), device.stream("b")
    device.launch(a, _nothing, writes=("x",))
    with pytest.raises(RaceError) as raised:
        device.launch(b, _nothing, writes=("x",))
    for call in (
        lambda: device.launch(a, _nothing),
        device.synchronize,
        device.host_access,
        device.event().synchronize,
    ):
        with pytest.raises(RaceError) as again:
            call()
        assert again.value is raised.value
    device.close()
    assert device.trace == []


def test_a_tensor_is_its_storage() -> None:
    device = _lazy()
    buffer, other = device.host_buffer((8,), torch.int64), device.host_buffer((8,), torch.int64)
    a, b = device.stream("a"), device.stream("b")
    device.launch(a, _nothing, writes=(buffer[:2],))
    device.launch(b, _nothing, writes=(other, torch.empty(0), other.data_ptr(), buffer.data_ptr()))
    device.launch(a, _nothing, writes=(torch.empty(0),))
    with pytest.raises(RaceError, match=r"the tensor at 0x[0-9a-f]+ \(torch.int64, shape \(2,\)\)"):
        device.launch(b, _nothing, reads=(buffer[6:],))


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_copy_reads_its_source_and_writes_its_target(role: str) -> None:
    device = _lazy()
    source, target = device.host_buffer((8,), torch.int64), device.device_buffer((8,), torch.int64)
    device.copy(device.stream("a"), target, source)
    device.host_access(reads=(source,))
    access = {"writes": (source,)} if role == "source" else {"reads": (target,)}
    with pytest.raises(RaceError, match="copy on a and the host"):
        device.host_access(**access)


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    device = _lazy()
    for i in range(50):
        device.launch(device.stream(str(i % 3)), _nothing, writes=(torch.empty(1000),))
    device.synchronize()
    assert device.fault is None


def _random_program(rng: random.Random) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []
    for _ in range(rng.randint(5, 25)):
        kind = rng.choice(("read", "write", "host_read", "host_write", "record", "record", "wait", "wait", "sync"))
        stream, event, what = rng.choice("abc"), rng.choice("ef"), rng.choice("xyz")
        arguments = {"wait": (stream, event), "record": (event, stream), "sync": (event,)}
        default = (what,) if kind.startswith("host") else (stream, what)
        calls.append((kind, *arguments.get(kind, default)))
    return calls


def _first_race(calls: list[tuple[str, ...]]) -> int | None:
    """The first call that conflicts with an earlier one that does not come before it, by search in the whole graph."""
    accesses = ("read", "write", "host_read", "host_write")
    before: list[set[int]] = []  # for each call, all calls that come before it
    newest: dict[str, int] = {}  # the newest call of each timeline
    marks: dict[str, int] = {}
    for i, (kind, *arguments) in enumerate(calls):
        timeline = "host" if kind.startswith("host") or kind == "sync" else arguments[kind == "record"]
        direct = {newest[t] for t in (timeline, "host") if t in newest}
        if kind in ("wait", "sync") and arguments[-1] in marks:
            direct.add(marks[arguments[-1]])
        before.append(direct.union(*(before[d] for d in direct)))
        newest[timeline] = i
        if kind == "record":
            marks[arguments[0]] = i
        if kind in accesses:
            for j, (earlier, *what) in enumerate(calls[:i]):
                conflict = earlier in accesses and what[-1] == arguments[-1] and "write" in kind + earlier
                if conflict and j not in before[i]:
                    return i
    return None


def test_the_clocks_agree_with_a_search_in_the_whole_graph() -> None:
    outcomes = Counter[bool]()
    for seed in range(600):
        calls = _random_program(random.Random(seed))
        program, raised = Program(), None
        for i, (kind, *arguments) in enumerate(calls):
            try:
                getattr(program, kind)(*arguments)
            except RaceError:
                raised = i
                break
        assert raised == _first_race(calls), calls
        outcomes[raised is None] += 1
    assert min(outcomes.values()) > 50
