"""The plain view: whole lines of each answer, marked with its number, as they become complete."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Self, TextIO

from cbengine.cli.answers import Answer

WIDTH = 96
"""Columns of a line of text, its mark not included."""


class Lines:
    """Prints to a file or pipe, where nothing can be drawn over. A line shows once it can no longer change."""

    def __init__(self, answers: Sequence[Answer], out: TextIO | None = None) -> None:
        self._answers = answers
        self._out = out or sys.stdout
        self._shown = [0] * len(answers)
        """Per answer: how many characters of its text have been printed."""
        self._closed = [False] * len(answers)

    def __enter__(self) -> Self:
        for answer in self._answers:
            self._print(answer, f"> {answer.prompt}")
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()

    def refresh(self) -> None:
        for i, answer in enumerate(self._answers):
            if self._closed[i]:
                continue
            self._show(i, answer)
            if answer.done:
                self._print(answer, f"({answer.summary})")
                self._closed[i] = True

    def _show(self, i: int, answer: Answer) -> None:
        pending = answer.text[self._shown[i] :]
        lines: list[str] = []
        for paragraph in pending.splitlines(keepends=True):
            # Every line but the last of its paragraph is complete; the last one is if the paragraph is.
            rows = textwrap.wrap(paragraph, WIDTH) or [""]
            whole = answer.done or paragraph.endswith("\n")
            lines += rows if whole else rows[:-1]
            used = len(paragraph) if whole else paragraph.rindex(rows[-1]) if len(rows) > 1 else 0
            self._shown[i] += used
        for line in lines:
            self._print(answer, line)

    def _print(self, answer: Answer, line: str) -> None:
        print(f"[{answer.number}] {line}".rstrip(), file=self._out, flush=True)
