"""The threads that kernels compute with."""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch

from cbengine.kernels.library import Library
from cbengine.threads import set_own_num_threads


class Team:
    """Native threads without a Python state. They sleep when there is nothing to do, and end when the object is collected.

    Args:
        size: how many, of which the thread that calls a kernel is one.

    Raises:
        RuntimeError: the system lets us start no thread.
    """

    def __init__(self, library: Library, size: int) -> None:
        self.library = library
        self.size = size
        self.handle: int | None = library.team_new(size)
        if self.handle is None:
            raise RuntimeError(f"could not start {size - 1} threads for the CPU kernels")
        end = weakref.finalize(self, library.team_free, self.handle)
        end.atexit = False  # somebody may still compute; the process takes all threads along


class _Local(threading.local):
    team: Team | None = None
    size: int | None = None
    """How many threads, where `take_over_threads` was called."""


_local = _Local()


def team_of_thread(library: Library) -> int | None:
    """What the library's functions take as the team: the calling thread's own, as large as torch's number of threads.

    It is made at the first call, made anew when that number has changed, and ends with the thread. So threads that compute
    at the same time never wait for each other.
    """
    team, size = _local.team, _local.size or torch.get_num_threads()
    if team is None or team.size != size or team.library is not library:
        team = _local.team = Team(library, size)
    return team.handle


def take_over_threads() -> None:
    """In the calling thread, which must be ours, give torch's threads to the kernels: torch's own operations use one.

    OpenMP's threads wait for their next piece of work by spinning, for milliseconds by default, so that after any operation
    of torch they would keep ours from the core that they need. Called again, it does nothing.
    """
    if _local.size is not None:
        return
    _local.size = torch.get_num_threads()
    set_own_num_threads(1)


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
