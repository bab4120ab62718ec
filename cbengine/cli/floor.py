"""The least time that this machine needs for a workload: bytes over its bandwidth, operations over its GEMM rate.

Both rates are measured with torch, in the process that asks and with its threads. Nothing but what cannot be avoided counts:
the weights once for each step, the keys and values of every decode, matrix products and attention. Not counted: norms,
sampling, caches that are too small, and everything that the engine does itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cbengine.cli.monitor import DISTURBED, Monitor
from cbengine.cli.workload import Workload
from cbengine.models.base import ModelSpec

_SECONDS = 0.4  # each rate is measured over so long
_READ_BYTES = 256 * 2**20
_GEMM = (512, 2048, 2048)  # rows, depth, columns: large enough for the peak, small enough for the caches


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the machine, with `threads` threads."""

    bandwidth: float
    """Bytes read a second."""
    gemm: float
    """Floating-point operations a second of a float32 matrix product; a multiply and an add are two."""
    threads: int
    other_cores: float = 0.0
    """That somebody else used meanwhile: the machine can do more than was measured."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Where the time of a run would go at best."""

    steps: int
    weight_bytes: int
    """Read in one step."""
    kv_bytes: int
    """Read and written in all of them."""
    operations: int
    rates: Rates

    @property
    def memory_seconds(self) -> float:
        return (self.steps * self.weight_bytes + self.kv_bytes) / self.rates.bandwidth

    @property
    def compute_seconds(self) -> float:
        return self.operations / self.rates.gemm

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.memory_seconds + self.compute_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The larger one: reading and computing at the same time, as no program does all the time."""
        return max(self.memory_seconds, self.compute_seconds)

    def derivation(self, wall: float) -> list[str]:
        """Lines that tell how the share of the floor in `wall` seconds comes about."""
        rates = self.rates
        return [
            f"memory:  ({self.steps:,} steps x {self.weight_bytes / 1e6:,.0f} MB of weights + {self.kv_bytes / 1e9:,.1f} GB of "
            f"keys and values) / {rates.bandwidth / 1e9:.1f} GB/s = {self.memory_seconds:.1f} s",
            f"compute: {self.operations / 1e9:,.0f} GFLOP / {rates.gemm / 1e9:.0f} GFLOP/s = {self.compute_seconds:.1f} s",
            *self._warning(),
            f"floor:   {self.seconds:.1f} s, one after the other; measured {wall:.1f} s: {self.seconds / wall:.0%} of the "
            f"floor (overlapped without loss {self.overlapped_seconds:.1f} s, {self.overlapped_seconds / wall:.0%})",
        ]

    def _warning(self) -> list[str]:
        other = self.rates.other_cores
        return (
            [f"         both rates are too low: others used {other:.2f} cores meanwhile"] if other > DISTURBED else []
        )


def measure_rates(monitor: Monitor) -> Rates:
    """Measure the machine, about a second. Takes `_READ_BYTES` of memory meanwhile."""
    monitor.begin()
    with torch.inference_mode():
        memory = torch.ones(_READ_BYTES // 4)
        bandwidth = _READ_BYTES / _fastest(lambda: memory.sum())
        rows, depth, columns = _GEMM
        left, right = torch.rand(rows, depth), torch.rand(columns, depth)
        gemm = 2 * rows * depth * columns / _fastest(lambda: torch.nn.functional.linear(left, right))
    return Rates(bandwidth, gemm, torch.get_num_threads(), monitor.end().other_cores)


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls: what others on the machine do meanwhile is not its fault."""
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def parameters(spec: ModelSpec) -> tuple[int, int]:
    """Weights that every token is multiplied with: of all layers, and of the head. A dense decoder with a gated MLP."""
    return spec.layer_weights, spec.hidden_size * spec.vocab_size


def floor(
    workload: Workload, spec: ModelSpec, rates: Rates, *, steps: int, computed: int, bytes_per_weight: float
) -> Floor:
    """The floor of a run.

    Args:
        steps: that the engine made of it.
        computed: prompt tokens that were not found in the prefix cache.
        bytes_per_weight: 2 where float32 weights are kept in fp16, as the CPU kernels do wherever that is exact.
    """
    layers, head = parameters(spec)
    prompts, answers = workload.prompt_tokens, workload.output_tokens
    operations = 2 * layers * (computed + answers - len(workload.items)) + 2 * head * answers
    # After the last attention only sampled tokens matter.
    last = spec.hidden_size * (spec.num_heads * spec.layers[-1].head_dim + 3 * spec.intermediate_size)
    operations -= 2 * last * max(0, computed - len(workload.items))
    kv, item = 0, spec.kv_dtype.itemsize
    for layer in spec.layers:
        seen_by_prompts = (
            sum(_seen(0, len(i.prompt), layer.window) for i in workload.items) * computed // max(1, prompts)
        )
        seen_by_answers = sum(
            _seen(len(i.prompt), len(i.prompt) + i.max_new_tokens - 1, layer.window) for i in workload.items
        )
        operations += 4 * spec.num_heads * layer.head_dim * (seen_by_prompts + seen_by_answers)
        kv += 2 * layer.num_kv_heads * layer.head_dim * item * (seen_by_answers + computed + answers)
    return Floor(steps, round((layers + head) * bytes_per_weight), kv, operations, rates)


def _seen(start: int, end: int, window: int | None) -> int:
    """How many positions the tokens from `start` to `end` see, each itself and what came before, within the window."""
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    inside = max(0, window - start)
    return _seen(start, start + inside, None) + (end - start - inside) * window
