"""The threads that kernels compute with: one team for each thread that calls, as large as torch's number says."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from cbengine.kernels import team as teams
from cbengine.kernels.matrix import PackedMatrix
from cbengine.kernels.team import take_over_threads
from cbengine.threads import set_own_num_threads
from tests.kernels.variants import variant

WEIGHT = torch.randn(500, 200, generator=torch.Generator().manual_seed(0))
X = torch.randn(30, 200, generator=torch.Generator().manual_seed(1))


def helpers() -> int:
    """Threads of this process that are a team's helpers; all of its threads, where they have no names."""
    tasks = list(Path("/proc/self/task").glob("*/comm"))
    if not tasks:
        return psutil.Process().num_threads()
    return sum(path.read_text().strip() == "cbengine-kernel" for path in tasks)


def in_thread(work: Callable[[], None], *sizes: int) -> None:
    """Call `work` once for each number of threads, in one thread of its own."""

    def run() -> None:
        for size in sizes:
            torch.set_num_threads(size)
            work()

    before = torch.get_num_threads()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(before)  # torch makes what was set last the default of new threads


def wait_for_helpers(count: int) -> None:
    deadline = time.monotonic() + 10
    while helpers() != count and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert helpers() == count


@pytest.fixture
def matrix() -> PackedMatrix:
    return PackedMatrix(variant("native"), [WEIGHT])


def test_as_many_threads_as_torch_has_and_none_left(matrix: PackedMatrix) -> None:
    before, seen = helpers(), []

    def work() -> None:
        matrix.product(X)
        seen.append(helpers() - before)

    in_thread(work, 3, 1, 4)
    assert seen == [2, 0, 3]
    wait_for_helpers(before)


def test_helpers_sleep_while_nothing_is_asked_of_them(matrix: PackedMatrix) -> None:
    spent: list[float] = []

    def work() -> None:
        matrix.product(X)
        time.sleep(0.05)
        begin = psutil.Process().cpu_times()
        time.sleep(0.5)
        end = psutil.Process().cpu_times()
        spent.append(end.user + end.system - begin.user - begin.system)

    in_thread(work, 4)
    assert spent[0] < 0.4  # three helpers that spin would have used 1.5 s, or all that there is


def test_taking_over_leaves_other_threads_what_they_have(matrix: PackedMatrix) -> None:
    before, inside = torch.get_num_threads(), []

    def work() -> None:
        for _ in range(2):
            teams.take_over_threads()
            matrix.product(X)
            inside.append((torch.get_num_threads(), helpers()))

    start = helpers()
    in_thread(work, 3)
    assert inside == [(1, start + 2)] * 2
    assert torch.get_num_threads() == before
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]
    wait_for_helpers(start)


def test_a_child_process_computes_alone(matrix: PackedMatrix) -> None:
    """Threads do not survive a fork; the child has the caller's team, but not its helpers."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    expected = matrix.product(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        same = torch.equal(matrix.product(X), expected)
        teams._local.team = None  # collected, without waiting for helpers that do not exist
        gc.collect()
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    torch.set_num_threads(before)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_step_that_does_not_fit_the_memory_is_an_error() -> None:
    with pytest.raises(MemoryError):
        teams.check(-1)


def test_taking_over_what_was_set_for_a_thread_alone_leaves_the_default() -> None:
    default, seen = torch.get_num_threads(), list[int]()

    def work() -> None:
        set_own_num_threads(default + 2)
        take_over_threads()
        seen.append(torch.get_num_threads())

    for run in (work, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [1, default] and torch.get_num_threads() == default
