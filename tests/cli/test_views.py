"""The two views of the demo, drawn from answers that grow by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cbengine.bridge.buffer import StreamBuffer
from cbengine.cli.answers import Answer, totals
from cbengine.cli.lines import WIDTH, Lines
from cbengine.cli.panels import Panels
from cbengine.errors import PromptTooLongError
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.stream import TokenStream


class Typed:
    """An answer whose tokens a test writes, one piece a token, a tenth of a second apart."""

    def __init__(self, number: int = 1, prompt: str = "Hello?") -> None:
        port: Any = None  # nobody waits on this stream
        self.buffer = StreamBuffer(port, f"request-{number}", 3, 0.0)
        self.answer = Answer(number, prompt, TokenStream(self.buffer, lambda: None))

    def write(self, *pieces: str) -> None:
        self.buffer.status = RequestStatus.DECODING
        for piece in pieces:
            self.buffer.ids.append(len(self.buffer.ids))
            self.buffer.texts.append(piece)
            self.buffer.times.append(len(self.buffer.times) / 10)

    def end(self) -> None:
        self.buffer.status, self.buffer.reason = RequestStatus.FINISHED, FinishReason.STOP
        self.answer.done = True


def test_summary_follows_the_stream() -> None:
    typed = Typed()
    assert typed.answer.summary == "pending, 0 tokens"
    typed.write("One")
    assert typed.answer.summary == "decoding, 1 token"
    typed.write(" two", " three")
    assert typed.answer.summary == "decoding, 3 tokens, 10.0 tokens/s"
    typed.end()
    assert typed.answer.summary == "stop, 3 tokens, 10.0 tokens/s"
    assert totals([typed.answer, Typed(2).answer], 1.5) == "2 answers, 3 tokens in 1.5 s: 2.0 tokens/s together"
    assert Answer(3, "?", error=PromptTooLongError("too long")).summary == "error: too long"


def test_a_line_shows_once_it_is_complete() -> None:
    typed, out = Typed(), io.StringIO()
    with Lines([typed.answer], out) as view:
        assert out.getvalue() == "[1] > Hello?\n"
        typed.write("Hi", " there")
        view.refresh()
        assert out.getvalue() == "[1] > Hello?\n"
        typed.write("!\nNext")
        view.refresh()
        view.refresh()
        assert out.getvalue() == "[1] > Hello?\n[1] Hi there!\n"
        typed.write(" line")
        typed.end()
    assert out.getvalue() == "[1] > Hello?\n[1] Hi there!\n[1] Next line\n[1] (stop, 4 tokens, 10.0 tokens/s)\n"


@pytest.mark.parametrize("step", [1, 3, 40, 10_000])
def test_lines_lose_and_repeat_nothing(step: int) -> None:
    text = "The  quick brown fox\n\njumps " + "over " * 60 + "x" * (3 * WIDTH) + "\n  the lazy dog, " * 9 + "end"
    typed, out = Typed(), io.StringIO()
    with Lines([typed.answer], out) as view:
        for start in range(0, len(text), step):
            typed.write(text[start : start + step])
            view.refresh()
        typed.end()
    lines = [line.removeprefix("[1]").removeprefix(" ") for line in out.getvalue().splitlines()[1:-1]]
    assert all(len(line) <= WIDTH for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert lines[1] == ""


def test_answers_are_told_apart() -> None:
    one, two, out = Typed(1, "A?"), Typed(2, "B?"), io.StringIO()
    with Lines([one.answer, two.answer], out) as view:
        two.write("second\n")
        view.refresh()
        one.write("first\n")
        one.end()
        two.end()
    assert [line[:3] for line in out.getvalue().splitlines()] == ["[1]", "[2]", "[2]", "[1]", "[1]", "[2]"]


@pytest.mark.parametrize("width", [120, 50])
def test_panels_show_every_prompt_and_its_state(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=30, record=True, force_terminal=True)
    answers = [Typed(number, f"Question {number}?") for number in (1, 2, 3)]
    with Panels([typed.answer for typed in answers], console) as view:
        for typed in answers:
            typed.write("Words", " and [bold]more[/bold]", " words")
        view.refresh()
        for typed in answers:
            typed.end()
    shown = console.export_text()
    for number in (1, 2, 3):
        assert f"Question {number}?" in shown
    assert shown.count("and [bold]more[/bold]") >= 3
    assert "decoding" in shown
    assert "stop" in shown


def test_a_long_answer_scrolls_while_it_grows_and_is_whole_at_the_end() -> None:
    console = Console(file=io.StringIO(), width=60, height=8, record=True, force_terminal=True)
    typed = Typed()
    with Panels([typed.answer], console) as view:
        typed.write(*[f"line-{i}\n" for i in range(40)])
        console.export_text(clear=True)
        view.refresh()
        growing = console.export_text(clear=True)
        typed.end()
    assert "line-39" in growing
    assert "line-0 " not in growing
    whole = console.export_text()
    assert all(f"line-{i} " in whole for i in range(40))
