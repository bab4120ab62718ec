"""The least time that a step can take: bytes over the measured copy bandwidth, operations over the measured matmul rate."""

from __future__ import annotations

from benchmarks.gpu_parts.machine import Rates
from cbengine.cli.floor import parameters
from cbengine.models.base import ModelSpec


def decode_seconds(spec: ModelSpec, rates: Rates, batch: int, context: float) -> float:
    """One step of `batch` sequences of `context` tokens each: the weights once, everybody's keys and values; or the
    multiplications, whichever takes longer. The embedding counts only as the output matrix."""
    layers, head = parameters(spec)
    item = spec.kv_dtype.itemsize
    kv = attention = 0.0
    for layer in spec.layers:
        seen = context if layer.window is None else min(context, layer.window)
        kv += 2 * layer.num_kv_heads * layer.head_dim * item * seen
        attention += 4 * spec.num_heads * layer.head_dim * seen
    memory = ((layers + head) * item + batch * kv) / rates.bandwidth
    compute = batch * (2 * (layers + head) + attention) / rates.matmul
    return max(memory, compute)


def prefill_seconds(spec: ModelSpec, rates: Rates, prompts: int, length: int) -> float:
    """Prompts of `length` tokens, one sampled token each."""
    layers, head = parameters(spec)
    operations = 2.0 * layers * length + 2.0 * head
    for layer in spec.layers:
        reach = length if layer.window is None else min(length, layer.window)
        pairs = reach * (reach + 1) / 2 + (length - reach) * reach
        operations += 4 * spec.num_heads * layer.head_dim * pairs
    return prompts * operations / rates.matmul
