"""The drawn view: one panel for each answer, side by side, growing in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cbengine.cli.answers import Answer

STYLES = {"pending": "dim", "prefilling": "yellow", "decoding": "green", "preempted": "magenta", "error": "red"}
"""Colour of a panel's border by status; any other status is an end, in blue."""

MIN_WIDTH = 30
"""Columns that a panel needs to be readable; a narrower terminal stacks them."""


class Panels:
    """Draws with rich. The drawing is done by `refresh()` alone, so on the caller's thread."""

    def __init__(self, answers: Sequence[Answer], console: Console | None = None) -> None:
        self._answers = answers
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        # What stays on the screen shows whole answers, however long they are.
        self._live.vertical_overflow = "visible"
        self._live.update(self._draw(None), refresh=True)
        self._live.stop()

    def refresh(self) -> None:
        self._live.update(self._draw(self._console.height), refresh=True)

    def _draw(self, height: int | None) -> Table:
        """All panels; the end of each text only where it would not fit on a screen of `height` rows."""
        columns = max(1, min(len(self._answers), self._console.width // MIN_WIDTH))
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        rows = -(-len(self._answers) // columns)
        panel_height = None if height is None else max(4, (height - 1) // rows)
        for start in range(0, len(self._answers), columns):
            grid.add_row(*(self._panel(a, columns, panel_height) for a in self._answers[start : start + columns]))
        return grid

    def _panel(self, answer: Answer, columns: int, height: int | None) -> Panel:
        text = Text(answer.text.strip(), overflow="fold")
        if height is not None:
            width = max(1, self._console.width // columns - 4)  # less the border and its padding
            tail = text.wrap(self._console, width)[-(height - 2) :]
            text = Text("\n").join(tail)
        return Panel(
            text,
            title=Text(answer.prompt, overflow="ellipsis", no_wrap=True),
            subtitle=Text(answer.summary),
            border_style=STYLES.get(answer.status, "blue"),
            height=height,
        )
