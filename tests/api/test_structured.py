"""Structured output through the engine, on a real model, beside answers that know nothing of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cbengine import AsyncEngine, FinishReason, InvalidRequestError, StructuredSpec, UnsupportedFeatureError
from cbengine.testing import FakeModel
from tests.support.leaks import idle
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
@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
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


def test_needs_a_tokenizer() -> None:
    async def main() -> None:
        async with AsyncEngine(FakeModel()) as engine:
            with pytest.raises(UnsupportedFeatureError, match="tokenizer"):
                engine.stream([1, 2], structured=StructuredSpec(choice=["a"]))
            with pytest.raises(InvalidRequestError, match="StructuredSpec"):
                engine.stream([1, 2], structured={"type": "object"})  # type: ignore[arg-type]

    asyncio.run(main())
