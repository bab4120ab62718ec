"""transformers' own continuous batching over the same model object, on the same device."""

from __future__ import annotations

import importlib
import inspect
import time
from dataclasses import fields
from typing import Any

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.ours import PROMPT
from benchmarks.gpu_parts.report import Row
from benchmarks.gpu_parts.shapes import random_prompts

_LIMIT = 60.0

TUNINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "graphs and async": {"use_cuda_graph": True, "use_async_batching": True},
}
"""What it is tried with; the faster one counts."""


def decode(model: Any, machine: Machine, row: Row, tuning: str) -> Row:
    """`row.batch` requests that decode together: the time that an answer's second part takes longer than its first.

    Raises whatever transformers raises; `TimeoutError` if nothing comes for long.
    """
    generation: Any = importlib.import_module("transformers.generation")
    transformers: Any = importlib.import_module("transformers")
    short, long = machine.size((8, 72), (2, 6))
    prompt = machine.size(PROMPT, 8)
    wanted: dict[str, Any] = {
        "page_size": 256,
        "num_blocks": machine.size(row.batch * 2 + 16, 16),
        "max_batch_tokens": machine.size(2048, 64),
        "max_requests_per_batch": row.batch,
        "allow_block_sharing": False,
        **TUNINGS[tuning],
    }
    known = {field.name for field in fields(generation.ContinuousBatchingConfig)}  # of this release
    config = generation.ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
    greedy = transformers.GenerationConfig(do_sample=False, max_new_tokens=long, eos_token_id=-1, pad_token_id=0)
    open_manager = model.continuous_batching_context_manager
    arguments = {"generation_config": greedy, "continuous_batching_config": config, "timeout": 30}
    taken = inspect.signature(open_manager).parameters
    context = open_manager(**{name: value for name, value in arguments.items() if name in taken})
    try:
        with context as manager:
            _seconds(manager, model, 2, prompt, short, 0)
            seconds = {new: _seconds(manager, model, row.batch, prompt, new, new) for new in (short, long)}
    finally:
        destroy = getattr(model, "destroy_cached_continuous_batching_manager", None)
        if destroy is not None:
            destroy()
        machine.settle()
    row.step = max(1e-9, seconds[long] - seconds[short]) / (long - short)
    row.rate = row.batch / row.step
    row.note = f"{tuning}, attention {model.config._attn_implementation}"
    return row


def _seconds(manager: Any, model: Any, count: int, prompt: int, new: int, seed: int) -> float:
    """From the first request to the last answer."""
    start = time.perf_counter()
    for ids in random_prompts(model, count, prompt, 1000 + seed):
        manager.add_request(ids, max_new_tokens=new)
    left = count
    while left:
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("the manager's thread has died")
            if time.perf_counter() - start > _LIMIT:
                raise TimeoutError(f"{left} of {count} answers have not come within {_LIMIT:.0f} s")
        elif output.error:
            raise RuntimeError(str(output.error))
        elif output.is_finished():
            left -= 1
    return time.perf_counter() - start
