"""`cbengine chat`, with a fake model and a script in the place of the keyboard."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from cbengine import AsyncEngine, EngineDeadError
from cbengine.cli.chat import Chat
from cbengine.devices.base import DeviceLostError
from cbengine.testing import FakeModel
from tests.support.leaks import assert_idle

Line = str | type[BaseException] | Callable[[], str]
"""What the user does at a prompt: types this, makes input() raise this, or types what this returns."""


class Session:
    """A chat whose user does one thing of `lines` at each prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: FakeModel, *lines: Line) -> None:
        self.model = model
        self.sampling: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
        self.left = list(lines)
        self._output = io.StringIO()
        monkeypatch.setattr("builtins.input", self._read)

    def _read(self, _: str) -> str:
        line = self.left.pop(0)
        if isinstance(line, type) and issubclass(line, BaseException):
            raise line
        return line if isinstance(line, str) else line()

    def run(self, *, system: str | None = None) -> list[str]:
        """Run it until it leaves; returns the contents of the messages that it remembers."""
        engine = AsyncEngine(self.model, page_size=16, num_blocks=512)
        with asyncio.Runner() as runner:
            runner.run(engine.start())
            try:
                chat = Chat(engine, runner, Console(file=self._output, width=200), system, self.sampling)
                chat.loop()
                assert_idle(engine)
            finally:
                runner.run(engine.aclose())
        return [message["content"] for message in chat.messages]

    def answer(self, *contents: str, system: str | None = None, tokens: int = 12) -> str:
        """What the model says to a conversation of these contents, the user's and its own in turn."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        tokenizer = self.model.tokenizer
        prompt = tokenizer.encode(tokenizer.apply_chat_template(messages))
        return tokenizer.decode(self.model.reference(prompt, tokens, ignore_eos=True))

    @property
    def output(self) -> str:
        return self._output.getvalue()


def test_a_conversation_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, FakeModel(), "Hello", "", "And then?", "/exit")
    remembered = session.run(system="Be brief")
    first = session.answer("Hello", system="Be brief")
    second = session.answer("Hello", first, "And then?", system="Be brief")
    assert remembered == ["Be brief", "Hello", first, "And then?", second]
    assert session.output.count("(length, 12 tokens") == 2
    assert session.left == []


def test_reset_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, FakeModel(), "Hello", "/reset", "Who?", EOFError)
    assert session.run(system="Be brief") == ["Be brief", "Who?", session.answer("Who?", system="Be brief")]


def test_an_unknown_command_gets_help_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, FakeModel(), "/what", "/exit")
    assert session.run() == []
    assert "/reset" in session.output
    assert session.model.forwards == 0


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(delay=0.002)

    def press(_: object) -> None:
        if model.forwards == 30:
            os.kill(os.getpid(), signal.SIGINT)

    def go_on() -> str:
        session.sampling["max_new_tokens"] = 12
        return "Shorter"

    model.fault = press
    session = Session(monkeypatch, model, "Tell me everything", go_on, KeyboardInterrupt)
    session.sampling["max_new_tokens"] = 3000
    question, stopped, shorter, answer = session.run()
    whole = session.answer(question, tokens=3000)
    assert 0 < len(stopped) < len(whole)
    assert whole.startswith(stopped)
    assert (shorter, answer) == ("Shorter", session.answer(question, stopped, "Shorter"))
    assert "(stopped)" in session.output
    assert session.left == []


def test_a_turn_that_fails_is_shown_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, FakeModel(max_model_len=200), "x" * 300, "Hello", "/exit")
    assert session.run() == ["Hello", session.answer("Hello")]
    assert "PromptTooLongError" in session.output


def test_a_dead_engine_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: object) -> None:
        raise DeviceLostError("the device is gone")

    session = Session(monkeypatch, FakeModel(fault=die), "Hello", "/exit")
    with pytest.raises(EngineDeadError):
        session.run()
    assert session.left == ["/exit"]
