"""Runner: OpenVINO GenAI, ContinuousBatchingPipeline, whose `step` is called in a loop, which is its only way to batch."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import WARM_UP, Arrivals, Item, Record, arguments, jobs, ready

numpy: Any = importlib.import_module("numpy")
openvino: Any = importlib.import_module("openvino")
genai: Any = importlib.import_module("openvino_genai")


def main() -> None:
    args = arguments(__doc__, max_batch_tokens=2048, cache_gb=2)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gb
    scheduler.max_num_seqs = args.max_seqs
    scheduler.max_num_batched_tokens = args.max_batch_tokens
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    # Else it computes in bf16 where the processor can, and keeps 8-bit keys and values: not the same work.
    properties = {
        "INFERENCE_NUM_THREADS": args.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
    }
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
    for number in range(2):
        _add(pipeline, 10**6 + number, WARM_UP)
        while pipeline.has_non_finished_requests():
            pipeline.step()
    ready(genai.__version__, max_num_batched_tokens=args.max_batch_tokens, cache_size=args.cache_gb, **properties)
    number = 0
    for items, finish in jobs():
        finish(serve(pipeline, items, number))
        number += len(items)


def serve(pipeline: Any, items: Sequence[Item], first: int) -> list[Record]:
    """Records of the requests, which are numbered from `first`. A token counts when the step that made it returns."""
    records = [Record() for _ in items]
    arrivals, live = Arrivals(items, records), {}
    while arrivals or live:
        for i in arrivals.due():
            live[i] = _add(pipeline, first + i, items[i])
        if not live:
            time.sleep(arrivals.wait())
            continue
        pipeline.step()
        now = time.perf_counter()
        for i, handle in list(live.items()):
            while handle.can_read():
                for output in handle.read().values():
                    records[i].add(list(output.generated_ids), now)
            if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                del live[i]
    return records


def _add(pipeline: Any, number: int, item: Item) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = item.max_new_tokens, True
    config.do_sample, config.num_return_sequences = False, 1
    return pipeline.add_request(number, openvino.Tensor(numpy.array([item.prompt], dtype=numpy.int64)), config)


if __name__ == "__main__":
    main()
