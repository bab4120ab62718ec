"""Steps that break, a device that is lost, and a host that never waits for the device within a step."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, RequestFailedError
from cbengine.execution.pipeline import Pipeline
from tests.gpu import networks
from tests.gpu.card import Card
from tests.gpu.serving import answers, ask, built, engine_for, run, until_idle

pytestmark = pytest.mark.gpu


class Broken(RuntimeError):
    """What the test injects."""


def break_step(engine: AsyncEngine, number: int) -> None:
    """The launch of a kernel fails in the step of this number, counted from now."""
    device: Any = built(engine).device
    plain, count = device.launch, iter(range(1 << 30))

    def launch(stream: Any, fn: Any, *, name: str = "", **tags: Any) -> None:
        if name == "step" and next(count) == number:
            whole = fn

            def fn() -> None:
                whole()
                raise Broken("no such kernel image")

        plain(stream, fn, name=name, **tags)

    device.launch = launch


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_broken_step_fails_its_own_requests(card: Card, number: int, asynchronous: bool) -> None:
    """Two run at a time: those two fail, and the rest get the answers that they would have had."""
    model: Any = networks.network("llama", card)
    prompts, new = networks.prompts(card, [9, 30, 5, 17, 11, 26]), card.size(12, 6)
    settings: dict[str, Any] = {"max_requests_per_batch": 2, "use_async_batching": asynchronous, **card.graphs}
    expected, _ = answers(model, card, prompts, new, **settings)

    async def main() -> list[Any]:
        async with engine_for(model, card, **settings) as engine:
            break_step(engine, number)
            async with engine.paused():
                streams = [engine.stream(p, max_new_tokens=new, temperature=0.0, ignore_eos=True) for p in prompts]
            done = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
            stats = await until_idle(engine)
            assert stats.requests_failed == 2 and bool(engine.health())
            return done

    done = run(main())
    assert [isinstance(one, RequestFailedError) for one in done] == [True, True, False, False, False, False]
    assert all("no such kernel image" in str(one) for one in done[:2])
    found = [list(one.token_ids) for one in done[2:]]
    networks.assert_same(model, prompts[2:], found, expected[2:])


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_step_makes_the_host_wait(card: Card, name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and sampling of every step, with everything that a request may ask for, under torch's own watch for waiting."""
    model: Any = networks.network(name, card)
    settings: dict[str, Any] = card.graphs if graphs else {"use_cuda_graph": False}
    prompts = networks.prompts(card, card.size([9, 200, 33, 5], [9, 20]), seed=6)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 3},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 4},
        {"temperature": 0.0, "logit_bias": {5: 2.0, 9: -3.0}, "logprobs": 3, "min_new_tokens": 2, "ignore_eos": False},
    ]
    plain, steps = Pipeline._run, []

    def watched(self: Pipeline, *args: Any) -> None:
        with card.no_waiting():
            steps.append(1)
            plain(self, *args)

    async def main() -> None:
        async with engine_for(model, card, **settings) as engine:
            await ask(engine, prompts, 3)  # compiles
            for params in kinds:
                await ask(engine, prompts, 3, **params)
            with monkeypatch.context() as patch:
                patch.setattr(Pipeline, "_run", watched)
                for params in kinds:
                    await ask(engine, prompts, card.size(6, 3), **params)
            assert len(steps) >= len(kinds) * 3

    run(main())


def test_the_watch_for_waiting_bites(card: Card) -> None:
    """A step that does look at a value fails."""
    value = torch.ones(3, device=card.device)
    if card.dry:
        with card.no_waiting():
            assert value.sum().item() == 3.0
        return
    with pytest.raises(RuntimeError, match="synchroniz"), card.no_waiting():
        value.sum().item()


LOST = """
import asyncio, sys, types
sys.modules["tests"] = types.ModuleType("tests")  # whatever else has that name
sys.modules["tests"].__path__ = [sys.argv[2]]
import torch
from cbengine import EngineDeadError
from cbengine.devices.base import DeviceLostError
from tests.gpu.card import Card
from tests.gpu import networks
from tests.gpu.serving import built, engine_for

async def main(card):
    engine = engine_for(networks.network("llama", card), card, attention_backend="sdpa")
    await engine.start()
    prompts = networks.prompts(card, [4, 8])
    streams = [engine.stream(p, max_new_tokens=60, temperature=0.0, ignore_eos=True) for p in prompts]
    await anext(aiter(streams[0]))
    device = built(engine).device
    plain = device.launch
    def launch(stream, fn, *, name="", **tags):
        def broken():
            fn()
            if card.dry:
                raise DeviceLostError("gone")
            far = torch.full((1,), 1 << 20, device=card.device)
            torch.zeros(4, device=card.device)[far]  # a device-side assertion: the context is gone
        plain(stream, broken if name == "step" else fn, name=name, **tags)
    device.launch = launch
    for stream in streams:
        try:
            await asyncio.wait_for(stream.result(), 60)
            sys.exit("it was not noticed")
        except EngineDeadError:
            pass
    assert not engine.health() and engine.health().status == "dead", engine.health()
    print("dead, as it should be", flush=True)

dry = sys.argv[1] == "cpu"
asyncio.run(main(Card(torch.device("cpu") if dry else torch.device("cuda", 0), dry)))
"""


def test_a_lost_device_ends_the_engine_and_every_stream_hears_of_it(card: Card, tmp_path: Path) -> None:
    """In a process of its own, since no other test could use the device afterwards."""
    script = tmp_path / "lost.py"
    script.write_text(LOST, encoding="utf-8")
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), "cpu" if card.dry else "cuda", str(root / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert "dead, as it should be" in done.stdout, done.stderr[-3000:]
