"""The GPU that is measured: its rates, marks in its streams, its memory. On a dry run the CPU stands in for it."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """A GPU; or, where `dry`, the CPU with sizes that show only that the code runs."""

    device: torch.device
    dry: bool

    @classmethod
    def here(cls) -> Machine | None:
        """None where there is nothing to be measured."""
        if os.environ.get("CBENGINE_GPU_DRYRUN") == "cpu":
            return cls(torch.device("cpu"), True)
        return cls(torch.device("cuda", 0), False) if torch.cuda.is_available() else None

    def size(self, real: T, dry: T) -> T:
        return dry if self.dry else real

    @property
    def name(self) -> str:
        return "a CPU (dry run: the figures mean nothing)" if self.dry else torch.cuda.get_device_name(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.size(torch.bfloat16, torch.float32)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        """Give back what nobody uses."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def mark(self) -> Any:
        """A point in the current stream (a dry run: now)."""
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two marks. After `synchronize`."""
        return end - start if self.dry else start.elapsed_time(end) / 1000.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the machine."""

    bandwidth: float
    """Bytes read and written a second by a copy within device memory."""
    matmul: float
    """Floating-point operations a second of a large matrix product in the model's dtype."""


def measure_rates(machine: Machine) -> Rates:
    """About two seconds."""
    rates = Rates(_bandwidth(machine), _matmul(machine))
    machine.settle()
    return rates


def _bandwidth(machine: Machine) -> float:
    source = torch.ones(machine.size(1 << 30, 1 << 20), dtype=machine.dtype, device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(machine, lambda: target.copy_(source))


def _matmul(machine: Machine) -> float:
    side = machine.size(8192, 256)
    left, right = (torch.randn(side, side, device=machine.device).to(machine.dtype) for _ in range(2))
    return 2 * side**3 / _fastest(machine, lambda: left @ right)


def _fastest(machine: Machine, run: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs."""
    best = float("inf")
    for _ in range(machine.size(20, 3)):
        start = machine.mark()
        run()
        end = machine.mark()
        machine.synchronize()
        best = min(best, machine.between(start, end))
    return best


class Clock:
    """The time that there is for everything, and what is being done."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        return self._seconds - self.spent

    def say(self, what: str) -> None:
        """Progress, on the error stream."""
        print(f"[{self.spent:5.0f} s] {what}", file=sys.stderr, flush=True)
