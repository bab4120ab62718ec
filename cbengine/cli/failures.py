"""Errors that end a command with one line instead of a traceback."""

from __future__ import annotations

import importlib.util


class CommandError(Exception):
    """The command cannot go on; the message is all that its user needs to see."""


def require_rich(command: str) -> None:
    """Raises `CommandError`, saying what to install, if rich is missing."""
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"`{command}` draws with the package rich, which is missing: pip install 'cbengine[cli]'")
