"""Errors that end a command with one line instead of a traceback."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


class CommandError(Exception):
    """The command cannot go on; the message is all that its user needs to see."""


def require_writable(option: str, path: Path) -> None:
    """Before anything is measured: whether a file can be written there. Raises `CommandError`; writes nothing."""
    if path.is_dir():
        raise CommandError(f"{option} {path}: that is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise CommandError(
            f"{option} {path}: there is no folder {path.absolute().parent}; make it, or name another file"
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise CommandError(f"{option} {path}: it cannot be written; name another file")


def require_rich(command: str) -> None:
    """Raises `CommandError`, saying what to install, if rich is missing."""
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"`{command}` draws with the package rich, which is missing: pip install 'cbengine[cli]'")
