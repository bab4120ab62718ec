"""Runner: continuous batching of transformers, through its manager with streaming."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.peers.protocol import WARM_UP, Arrivals, Item, Record, arguments, jobs, ready

transformers: Any = importlib.import_module("transformers")
generation: Any = importlib.import_module("transformers.generation")

_numbers = itertools.count()


def main() -> None:
    args = arguments(__doc__, max_batch_tokens=256, num_blocks=200, page_size=256)
    torch.set_num_threads(args.threads)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = generation.ContinuousBatchingConfig(
        page_size=args.page_size,
        num_blocks=args.num_blocks,
        max_batch_tokens=args.max_batch_tokens,
        max_requests_per_batch=args.max_seqs,
        auto_switch_to_flash=False,
    )
    greedy = transformers.GenerationConfig(do_sample=False, max_new_tokens=256, eos_token_id=-1, pad_token_id=0)
    context = model.continuous_batching_context_manager(generation_config=greedy, continuous_batching_config=config)
    with context as manager:
        for _ in range(2):
            serve(manager, [WARM_UP])
        ready(transformers.__version__, max_batch_tokens=args.max_batch_tokens, num_blocks=args.num_blocks)
        for items, finish in jobs():
            finish(serve(manager, items))


def serve(manager: Any, items: Sequence[Item]) -> list[Record]:
    """Records of the requests. Raises what a request failed of, and if the manager's thread has died."""
    records = [Record() for _ in items]
    arrivals, live = Arrivals(items, records), {}
    while arrivals or live:
        for i in arrivals.due():
            label = str(next(_numbers))
            live[label] = i
            manager.add_request(
                list(items[i].prompt),
                request_id=label,
                max_new_tokens=items[i].max_new_tokens,
                streaming=True,
                eos_token_id=-1,
            )
        output = manager.get_result(timeout=min(1.0, arrivals.wait() or 1.0))
        if output is None:
            if not manager.is_running():
                raise RuntimeError("the manager's thread has died")
            continue
        if output.error:
            raise RuntimeError(output.error)
        record = records[live[output.request_id]]
        record.add(output.generated_tokens[len(record.ids) :], time.perf_counter())
        if output.is_finished():
            del live[output.request_id]
    return records


if __name__ == "__main__":
    main()
