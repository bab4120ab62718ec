"""Structured output through the engine, on a real model, beside answers that know nothing of it."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cbengine import AsyncEngine, FinishReason, InvalidRequestError, StructuredSpec, UnsupportedFeatureError
from cbengine.testing import FakeModel
from tests.adversity.census import Record
from tests.loops.test_heartbeat import Heartbeat
from tests.support.guard import LoopGuard
from tests.support.leaks import idle
from tests.support.loops import aio
from tests.support.models import Reference

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "title": {"enum": ["Dr", "Frau", "Señora", "さん"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 12}, "number": {"type": "integer", "maximum": 99}},
            "required": ["street"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["a", "é", "🌊"]}, "maxItems": 3},
    },
    "required": ["name", "title", "age", "address", "tags"],
    "additionalProperties": False,
}

SETTINGS: dict[str, Any] = {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_every_answer_is_valid(smollm2: Path, reference_generate: Reference, count: int) -> None:
    spec = StructuredSpec(json_schema=PERSON)
    plain = [504, 3575, 282, 4649, 314]
    expected = reference_generate(plain, 24, ignore_eos=True)

    async def main() -> None:
        async with AsyncEngine(str(smollm2), **SETTINGS) as engine:
            neighbours = [engine.stream(plain, temperature=0, max_new_tokens=24, ignore_eos=True) for _ in range(2)]
            answers = await engine.generate_batch(
                [f"Person number {i} as JSON: " for i in range(count)],
                structured=spec,
                temperature=1.0,
                seed=3,
                max_new_tokens=250,
            )
            for answer in answers:
                assert answer.finish_reason == FinishReason.STOP, answer.text
                jsonschema.validate(json.loads(answer.text), PERSON)
            assert len({answer.text for answer in answers}) > count // 2
            for neighbour in neighbours:
                assert list((await neighbour.result()).token_ids) == expected
            await idle(engine)

    asyncio.run(main())


@pytest.mark.timeout(200)
def test_other_kinds_and_preemption(smollm2: Path) -> None:
    async def main() -> None:
        tight = {**SETTINGS, "page_size": 4, "num_blocks": 13, "safety_margin": 0.0}
        async with AsyncEngine(str(smollm2), **tight) as engine:
            requests: list[Any] = [
                StructuredSpec(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
                StructuredSpec(choice=["yes", "no", "maybe"]),
                StructuredSpec(grammar='start: "<" /[a-z]{3,12}/ ">"'),
                StructuredSpec(
                    json_schema={
                        "type": "array",
                        "items": {"type": "integer", "maximum": 9},
                        "minItems": 9,
                        "maxItems": 12,
                    }
                ),
            ]
            streams = [
                engine.stream("Answer: ", structured=spec, temperature=0.9, seed=i, max_new_tokens=45)
                for spec in requests
                for i in range(2)
            ]
            texts = [(await stream.result()).text for stream in streams]
            assert engine.stats().preemptions > 0
            assert all(len(text) == 10 and text[4] == text[7] == "-" for text in texts[:2])
            assert set(texts[2:4]) <= {"yes", "no", "maybe"}
            assert all(text[0] == "<" and text[-1] == ">" and text[1:-1].islower() for text in texts[4:6])
            assert all(9 <= len(json.loads(text)) <= 12 for text in texts[6:])
            with pytest.raises(InvalidRequestError, match="nsatisfiable"):
                impossible = {"type": "string", "minLength": 5, "maxLength": 2}
                await engine.generate("x", structured=StructuredSpec(json_schema=impossible))
            await idle(engine)

    asyncio.run(main())


SUM = StructuredSpec(
    json_schema={
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["sum"],
        "additionalProperties": False,
    }
)


@pytest.mark.timeout(200)
def test_after_reasoning(smollm2: Path) -> None:
    """A model that has seen how to reason does so, whatever the answer has to be like; told not to, it does not."""
    messages: list[dict[str, str]] = []
    for a, b in ((2, 3), (4, 4), (1, 6), (2, 2)):
        thought = f'<think>{a} plus {b} is {a + b}.</think>\n{{"sum": {a + b}}}'
        messages += [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": thought}]
    messages.append({"role": "user", "content": "5 + 4"})
    opened = [*messages, {"role": "assistant", "content": "<think>"}]

    async def main() -> None:
        async with AsyncEngine(str(smollm2), **SETTINGS) as engine:
            arguments: dict[str, Any] = {"structured": SUM, "temperature": 0, "max_new_tokens": 60}
            streams = [
                engine.chat(messages, reasoning="think", **arguments),
                engine.chat(opened, continue_final_message=True, reasoning="think", **arguments),
                engine.chat(messages, reasoning=None, **arguments),
                engine.stream("So <think>", structured=replace(SUM, reasoning=None), temperature=0, max_new_tokens=60),
            ]
            answers = [await stream.result() for stream in streams]
            for answer in answers[:2]:
                assert "plus" in answer.reasoning and "</think>" in answer.text
                jsonschema.validate(json.loads(answer.content), json.loads(str(SUM.json_schema)))
            assert answers[0].text.startswith("<think>") and not answers[1].text.startswith("<think>")
            for answer in answers[2:]:
                assert answer.reasoning == "" and set(json.loads(answer.text)) == {"sum"}
            assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}
            await idle(engine)

    asyncio.run(main())


@aio("asyncio")
@pytest.mark.timeout(200)
async def test_the_tokenizer_is_prepared_while_the_model_is_loaded(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, loop_guard: LoopGuard, record_property: Record
) -> None:
    """The library holds the GIL meanwhile, so that no request may be what it is done for; the loop's lag is reported."""
    import llguidance

    prepared: list[str] = []
    real = llguidance.LLTokenizer

    def counting(*args: Any, **options: Any) -> Any:
        prepared.append(threading.current_thread().name)
        return real(*args, **options)

    monkeypatch.setattr(llguidance, "LLTokenizer", counting)
    heart = Heartbeat()
    async with AsyncEngine(str(smollm2), **SETTINGS) as engine:
        assert prepared == ["cbengine-engine"]
        async with heart.beating():
            beside = engine.stream([504, 3575, 282], temperature=0, max_new_tokens=30, ignore_eos=True)
            answers = await engine.generate_batch(
                ["Answer: "] * 2, structured=StructuredSpec(choice=["yes", "no"]), max_new_tokens=8
            )
            assert {answer.text for answer in answers} <= {"yes", "no"}
            assert len((await beside.result()).token_ids) == 30
        assert len(prepared) == 1
        await engine.stop()
        await engine.start()
        await engine.generate("Answer: ", structured=StructuredSpec(regex="[0-9]"), max_new_tokens=8)
        assert len(prepared) == 1
    heart.report(record_property, loop_guard)


def test_needs_a_tokenizer() -> None:
    async def main() -> None:
        async with AsyncEngine(FakeModel()) as engine:
            with pytest.raises(UnsupportedFeatureError, match="tokenizer"):
                engine.stream([1, 2], structured=StructuredSpec(choice=["a"]))
            with pytest.raises(InvalidRequestError, match="StructuredSpec"):
                engine.stream([1, 2], structured={"type": "object"})  # type: ignore[arg-type]

    asyncio.run(main())
