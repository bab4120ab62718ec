"""The threads that kernels compute with."""

from __future__ import annotations

import ctypes
import weakref

import torch

from cbengine.kernels.library import Library


class Team:
    """Threads for one model's kernels: as many as torch has in the calling thread, which is one of them.

    They are native threads without a Python state. They sleep when there is nothing to do, and end when the object is
    collected. One call at a time computes; others wait.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._size = 0
        self._handle: int | None = None
        self._end: weakref.finalize[..., Team] | None = None

    def handle(self) -> int:
        """What the library's functions take as the team, with `torch.get_num_threads()` threads. Compute thread.

        Raises:
            RuntimeError: the system lets us start no thread.
        """
        size = torch.get_num_threads()
        if self._handle is None or size != self._size:
            self.close()
            self._handle = self.library.team_new(size)
            if self._handle is None:
                raise RuntimeError(f"could not start {size - 1} threads for the CPU kernels")
            self._size = size
            self._end = weakref.finalize(self, self.library.team_free, self._handle)
            self._end.atexit = False  # a thread may still compute; the process takes all of them along
        return self._handle

    def close(self) -> None:
        """End the threads. Idempotent; the next call starts new ones."""
        if self._end is not None:
            self._end()
            self._handle = self._end = None


def check(status: int) -> None:
    """Raise what a function of the library reported."""
    if status:
        raise MemoryError("out of memory in a CPU kernel")


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's first element is; None for None."""
    return None if tensor is None else tensor.data_ptr()


def pointer(structure: ctypes.Structure) -> int:
    """Address of a structure, which has to be kept alive."""
    return ctypes.addressof(structure)
