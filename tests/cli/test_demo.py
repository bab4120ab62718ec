"""`cbengine demo` and `watch`, with a fake model."""

from __future__ import annotations

import asyncio
import re

import pytest

from cbengine import AsyncEngine, RequestFailedError
from cbengine.cli.answers import Answer
from cbengine.cli.demo import watch
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel

PROMPTS = ["alpha", "beta", "gamma", "delta"]


def run(model: FakeModel, prompts: list[str], *, raw: bool = False, plain: bool | None = True) -> list[Answer]:
    async def main() -> list[Answer]:
        async with AsyncEngine(model, page_size=16, num_blocks=64) as engine:
            return await watch(engine, prompts, raw=raw, plain=plain, max_new_tokens=40, ignore_eos=True)

    return asyncio.run(main())


def expected(model: FakeModel, prompt: str, *, raw: bool = False) -> str:
    tokenizer = model.tokenizer
    text = prompt if raw else tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.decode(model.reference(tokenizer.encode(text), 40, ignore_eos=True))


@pytest.mark.parametrize("raw", [False, True])
def test_every_prompt_is_answered_at_once(capsys: pytest.CaptureFixture[str], raw: bool) -> None:
    model = FakeModel()
    answers = run(model, PROMPTS, raw=raw)
    assert [answer.text for answer in answers] == [expected(model, prompt, raw=raw) for prompt in PROMPTS]
    assert model.forwards < 2 * 40, "they share the forwards"
    shown = capsys.readouterr().out
    assert len(re.findall(r"\[\d\] \(length, 40 tokens", shown)) == 4
    assert "4 answers, 160 tokens in " in shown


def test_output_that_is_no_terminal_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    run(FakeModel(), ["alpha"], plain=None)
    assert "[1] > alpha\n" in capsys.readouterr().out


def test_drawn_panels_hold_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    run(FakeModel(), ["alpha", "beta"], plain=False)
    shown = capsys.readouterr().out
    assert "alpha" in shown
    assert "beta" in shown
    assert "─╮" in shown


def test_a_prompt_that_fails_shows_why_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    answers = run(model, ["alpha", "b" * 5000, "gamma"])
    assert [bool(answer.error) for answer in answers] == [False, True, False]
    assert answers[2].text == expected(model, "gamma")
    assert "[2] (error: the prompt has " in capsys.readouterr().out


def test_every_prompt_of_a_broken_step_says_so() -> None:
    def fault(_: StepInputs) -> None:
        raise ArithmeticError("planted")

    answers = run(FakeModel(fault=fault), ["alpha"])
    assert isinstance(answers[0].error, RequestFailedError)
