"""The timeline: what it records of an engine's steps, what it makes of them, and the trace that it writes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from cbengine import AsyncEngine, EngineConfig
from cbengine.errors import EngineError, EngineNotStartedError
from cbengine.observe.timeline import Span, Timeline, shares
from cbengine.testing import FakeModel
from tests.support.loops import aio

SETTINGS = EngineConfig(page_size=16, num_blocks=64, max_batch_tokens=64)


def step(start: float, end: float, decodes: int = 1, prompt_tokens: int = 0) -> list[Span]:
    """A step whose forward and sampling take all of it but half a second at its head."""
    args = {"decodes": decodes, "prompt_tokens": prompt_tokens}
    middle = (start + 0.5 + end) / 2
    return [
        Span("compute", "step", start, end, args),
        Span("compute", "forward", start + 0.5, middle, {}),
        Span("compute", "sample", middle, end, {}),
    ]


def test_shares_of_steps() -> None:
    host = [Span("engine", "plan", 9.0, 11.0, {}), Span("engine", "wait", 11.0, 13.0, {})]
    found = shares([*step(0, 10), *step(11, 20), *step(20, 30, prompt_tokens=5), *step(30, 40, decodes=3), *host])
    # Two pairs end in a step that only decodes: [10, 20] with a gap of one second, [30, 40] without any.
    assert (found.steps, found.period, found.waited, found.prepared, found.host) == (2, 20, 1, 1, 1)
    assert found.waited_share == 2 / 20
    large = shares([*step(0, 10), *step(11, 20), *step(30, 40, decodes=3)], min_decodes=2)
    assert (large.steps, large.period, large.waited) == (1, 20, 10)
    assert shares([*step(0, 10), *step(11, 20, prompt_tokens=5)], decode_only=False).waited == 1


def test_time_without_work_is_not_waiting() -> None:
    found = shares([*step(0, 10), Span("engine", "idle", 10.5, 17, {}), *step(18, 20)])
    assert (found.period, found.waited) == (3.5, 1.5)


def test_shares_of_nothing() -> None:
    assert shares([]).waited_share == 0.0
    assert shares(step(0, 1)).steps == 0


def test_spans_beyond_the_limit_are_counted() -> None:
    timeline = Timeline(max_spans=2)
    for _ in range(5):
        timeline.add("plan", 0.0, 1.0)
    assert (len(timeline), timeline.dropped) == (2, 3)
    assert timeline.seconds("plan") == timeline.host_seconds() == 2.0
    assert timeline.chrome()["otherData"] == {"dropped_spans": 3}


def test_a_timed_function_is_recorded_when_it_raises_too() -> None:
    timeline = Timeline()
    with pytest.raises(ZeroDivisionError):
        timeline.timed("broken", lambda: 1 // 0, reason="zero")()
    (span,) = timeline.spans
    assert (span.name, span.args, span.thread) == ("broken", {"reason": "zero"}, threading.current_thread().name)
    assert span.start <= span.end


def test_what_is_written_is_json(tmp_path: Path) -> None:
    timeline = Timeline()
    with timeline.span("plan", requests=3):
        pass
    timeline.write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == timeline.chrome()


@aio("asyncio")
async def test_the_trace_of_an_engine() -> None:
    async with AsyncEngine(FakeModel(eos_token_ids=()), config=SETTINGS) as engine:
        await engine.generate([1, 2, 3], temperature=0, max_new_tokens=4)  # before, so not in it
        with engine.timeline() as timeline:
            before = engine.stats().steps
            outputs = await engine.generate_batch([[5, 6, 7], [8, 9]], temperature=0, max_new_tokens=8)
        steps = engine.stats().steps - before
        recorded = len(timeline)
        await engine.generate([1, 2, 3], temperature=0, max_new_tokens=4)
        assert len(timeline) <= recorded + 30  # at most what was in flight, and a turn, when it was switched off
    assert [len(output.token_ids) for output in outputs] == [8, 8]

    trace = timeline.chrome()["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert set(threads.values()) == {"cbengine-engine", "cbengine-compute", "cbengine-transfer"}
    where: dict[str, set[str]] = {}
    for event in trace:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            where.setdefault(event["name"], set()).add(threads[event["tid"]])
    places = {
        "cbengine-engine": ("intake", "plan", "fill", "launch", "wait", "commit", "text", "emit"),
        "cbengine-compute": ("step", "forward", "sample", "copy tokens"),
        "cbengine-transfer": ("copy inputs",),
    }
    expected = {name: {place} for place, names in places.items() for name in names}
    assert {name: where[name] for name in expected} == expected
    computed = [event for event in trace if event["name"] == "step"]
    assert len(computed) == steps
    assert sum(event["args"]["prompt_tokens"] for event in computed) == 5
    assert sum(event["args"]["decodes"] for event in computed) == 2 * (8 - 1)
    assert len([event for event in trace if event["name"] == "text"]) == 16
    found = timeline.shares()
    assert 0 < found.steps < steps and 0 <= found.waited_share <= 1 and found.host > 0


@aio("asyncio")
async def test_one_timeline_at_a_time_and_only_while_it_runs() -> None:
    engine = AsyncEngine(FakeModel(), config=SETTINGS)
    with pytest.raises(EngineNotStartedError):
        with engine.timeline():
            pass
    async with engine:
        with engine.timeline():
            with pytest.raises(EngineError, match="being recorded already"):
                with engine.timeline():
                    pass
        with engine.timeline() as timeline:
            await engine.generate([1, 2, 3], temperature=0, max_new_tokens=4)
            assert timeline.seconds("step") > 0
