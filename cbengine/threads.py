"""torch's number of threads, for one thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")

_changing = threading.Lock()
"""Between a change and its undoing, a thread that is new to torch would take a number that was meant for another."""


def set_own_num_threads(num_threads: int) -> None:
    """Have torch's operations in the calling thread use so many threads; other threads keep what they have.

    OpenMP's number belongs to a thread, but torch also makes it the default of threads that use it later. Short-lived
    threads look the default up and put it back.
    """
    with _changing:
        torch.get_num_threads()  # a thread takes the default at its first use, and would do so after the change
        default = _elsewhere(torch.get_num_threads)
        torch.set_num_threads(num_threads)
        _elsewhere(lambda: torch.set_num_threads(default))


def _elsewhere(fn: Callable[[], _T]) -> _T:
    """What `fn` returns in a thread of its own."""
    result: list[_T] = []
    thread = threading.Thread(target=lambda: result.append(fn()), name="cbengine-threads", daemon=True)
    thread.start()
    thread.join()
    return result[0]
