"""Triton's interpreter, where it and NumPy have grown apart. Imports no triton that needs no mending."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def mend() -> None:
    """Triton 3.6, which torch 2.11 brings, takes the bounds of a loop for numbers though they are arrays of one element: NumPy
    2.4 refuses that, and warns before. Newer ones squeeze them, as is done here. Before any kernel runs."""
    try:
        if not version("triton").startswith("3.6."):
            return
    except PackageNotFoundError:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    before = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch
