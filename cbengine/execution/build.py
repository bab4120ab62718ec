"""Putting the parts of the loop together, once at every start. Engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cbengine.bridge.inbox import Inbox
from cbengine.bridge.outbox import Outbox
from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry, layer_views
from cbengine.cache.manager import CacheManager
from cbengine.cache.sizing import MemoryPlan, plan_memory, swap_chunks
from cbengine.cache.swap import SwapCosts, SwapSpace
from cbengine.config import EngineConfig
from cbengine.devices.base import Device
from cbengine.execution import compile
from cbengine.execution.batch import BatchFiller
from cbengine.execution.buckets import Limits
from cbengine.execution.commit import Committer
from cbengine.execution.graphs import GraphPaths
from cbengine.execution.loop import LoopParts, StepLoop
from cbengine.execution.pipeline import Pipeline, Sampler
from cbengine.execution.sampler import has_kernels_for, sample, warm_up
from cbengine.execution.swapping import BlockMover
from cbengine.models.base import ModelRunner, ModelSpec
from cbengine.observe.counters import Counters
from cbengine.scheduling.admission import Registry
from cbengine.scheduling.base import Budgets
from cbengine.scheduling.fifo import FifoScheduler
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.passes import PassScheduler
from cbengine.scheduling.prefill_first import PrefillFirstScheduler
from cbengine.scheduling.rows import RowTable

logger = logging.getLogger("cbengine")

_CPU_PREFILL: dict[str, Any] = {
    "prefill": 24,
    "prefill_per_decode": 1.5,
    "prefill_over_square": 6144,
    "long_prompt": 512,
    "prefill_of_long": 48,
    "prefill_per_waiting": 16,
    "prefill_when_waiting": 6.0,
}
"""On a CPU, where matrix products are as fast with 64 rows as with 512: short steps cost nothing there."""
_FEW, _FEW_WORK = (48, 256), 28e9
"""What few who decode put up with at once: from so many to so many prompt tokens, and no more multiplications than these, which
take two cores a quarter of a second."""
_SCHEDULERS: dict[str, type[PassScheduler]] = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}


@dataclass(slots=True)
class Built:
    """A loop ready to run, and the plan it was sized by."""

    loop: StepLoop
    memory: MemoryPlan
    config: EngineConfig
    """With every inferred setting filled in."""
    pool: torch.Tensor
    """The cache, uint8."""
    host_pool: torch.Tensor | None
    """Its counterpart on the host, for swapping, if there is one."""
    device: Device

    def free(self) -> None:
        """Give back the memory of the cache. Now, and not with the last reference: views of it may be kept alive by the
        frames of an exception that somebody keeps. Only when nothing runs on the device any more."""
        for tensor in (self.pool, self.host_pool):
            if tensor is not None:
                self.device.free_buffer(tensor)


def build(
    config: EngineConfig,
    runner: ModelRunner,
    device: Device,
    inbox: Inbox,
    registry: Registry,
    make_detokenizer: Callable[..., object] | None,
    sampler: Sampler = sample,
) -> Built:
    """Allocate the cache and the slots, and wire the parts.

    Raises:
        UnsupportedFeatureError: the cache cannot serve this model's attention.
        ValueError: the settings do not fit the memory.
    """
    spec = runner.spec
    asynchronous = device.overlaps if config.use_async_batching is None else config.use_async_batching
    config = config.merged({"use_async_batching": asynchronous})
    memory = _plan(config, runner, device)
    config = config.merged(
        {
            "page_size": memory.page_size,
            "attention_backend": getattr(getattr(runner, "attention", None), "name", config.attention_backend),
            "num_blocks": memory.num_blocks,
            "max_batch_tokens": memory.max_batch_tokens,
            "max_requests_per_batch": memory.max_requests,
            "max_model_len": memory.max_model_len,
            "safety_margin": config.margin,
            "device": device.name,
        }
    )
    geometry = CacheGeometry.of(spec, memory.page_size)
    chunks = geometry.chunks_for(memory.num_blocks) + RESERVED_CHUNKS
    pool = device.device_buffer((chunks * geometry.chunk_bytes,), torch.uint8)
    compiles = compile.prepare(config, runner)
    runner.bind(layer_views(pool, geometry), memory.page_size)
    device.synchronize()  # weights were loaded, and the model tried out, on no stream of ours
    if compiles:
        compile.warm_up(runner, device)
    paths = GraphPaths.of(config, device, runner)
    config = config.merged({"use_cuda_graph": (paths.varlen, paths.decode)})
    _say_what_is_off(config, geometry, spec.name)
    host_chunks = swap_chunks(config, geometry)
    host_pool = device.host_buffer((host_chunks * geometry.chunk_bytes,), torch.uint8) if host_chunks else None
    parts = _parts(
        config, memory, geometry, runner, device, inbox, registry, make_detokenizer, sampler, pool, host_pool
    )
    _warm_up(config, paths, memory, parts)
    _try_sampler(spec, device, sampler)
    return Built(StepLoop(parts), memory, config, pool, host_pool, device)


def _warm_up(config: EngineConfig, paths: GraphPaths, memory: MemoryPlan, parts: LoopParts) -> None:
    """Everything that would make the first requests wait."""
    width = parts.cache.tables.shape[1]
    limits = Limits(memory.max_requests, memory.max_batch_tokens, width, memory.page_size)
    parts.pipeline.graphs.warm_up(config, paths, limits)


def _plan(config: EngineConfig, runner: ModelRunner, device: Device) -> MemoryPlan:
    memory = plan_memory(
        runner.spec,
        config,
        device.memory_info(),
        on_cpu=device.torch_device.type == "cpu",
        page_size_multiple=getattr(runner, "page_size_multiple", 1),
    )
    logger.info("%s: %s", runner.spec.name, memory)
    return memory


def _say_what_is_off(config: EngineConfig, geometry: CacheGeometry, name: str) -> None:
    if config.allow_block_sharing and any(group.window is not None for group in geometry.groups):
        logger.info("%s: no prefix cache, because it has layers with a sliding window", name)


def _try_sampler(spec: ModelSpec, device: Device, sampler: Sampler) -> None:
    """Kernels that draw are compiled now, and not in front of somebody who waits for tokens."""
    if sampler is not sample or device.torch_device.type == "cpu":
        return
    numbers = device.device_buffer((1,), torch.float32)
    if not has_kernels_for(numbers):
        return
    compute, done = device.stream("compute"), device.event("sampled")
    device.launch(compute, partial(warm_up, spec.vocab_size, spec.kv_dtype, numbers), name="try the sampler")
    device.record(done, compute)
    done.synchronize()


def _parts(
    config: EngineConfig,
    memory: MemoryPlan,
    geometry: CacheGeometry,
    runner: ModelRunner,
    device: Device,
    inbox: Inbox,
    registry: Registry,
    make_detokenizer: Callable[..., object] | None,
    sampler: Sampler,
    pool: torch.Tensor,
    host_pool: torch.Tensor | None,
) -> LoopParts:
    num_rows = 2 * memory.max_requests  # a row that waits for its fence (I11) must not keep a newcomer out
    checked = partial(_assigned, device) if device.checks else None
    rows = RowTable(num_rows, memory.max_model_len, checked)
    cache = _cache(config, memory, geometry, num_rows + 1, checked)
    if host_pool is not None:
        cache.swap = _swap_space(config, geometry, device, pool, host_pool)
    lifecycle = Lifecycle(rows, cache)
    scheduler = _scheduler(config, runner.spec, memory, rows, cache, lifecycle)
    outbox = Outbox()
    pipeline = Pipeline(
        device,
        runner,
        depth=2 if config.use_async_batching else 1,
        rows=num_rows,
        max_tokens=memory.max_batch_tokens,
        max_seqs=memory.max_requests,
        width=cache.tables.shape[1],
        geometry=geometry,
        pool=pool,
        vocab_size=runner.spec.vocab_size,
        sampler=sampler,
    )
    return LoopParts(
        rows=rows,
        cache=cache,
        lifecycle=lifecycle,
        scheduler=scheduler,
        filler=BatchFiller(rows, cache, runner.spec.eos_token_ids, pipeline.graphs),
        pipeline=pipeline,
        committer=Committer(rows, lifecycle, outbox, runner.spec.eos_token_ids, runner.spec.vocab_size),
        inbox=inbox,
        outbox=outbox,
        registry=registry,
        counters=Counters(),
        requests={},
        make_detokenizer=make_detokenizer,
    )


def _swap_space(
    config: EngineConfig, geometry: CacheGeometry, device: Device, pool: torch.Tensor, host_pool: torch.Tensor
) -> SwapSpace:
    costs = SwapCosts(config.preemption)
    blocks = host_pool.numel() // geometry.chunk_bytes
    return SwapSpace(geometry, blocks, BlockMover(device, geometry, pool, host_pool, costs), costs)


def _assigned(device: Device, kind: str, owned: list[int]) -> None:
    """Rows or blocks have a new owner, who is about to write to them."""
    device.host_access(writes=[(kind, index) for index in owned])


def _cache(
    config: EngineConfig,
    memory: MemoryPlan,
    geometry: CacheGeometry,
    rows: int,
    on_assign: Callable[[str, list[int]], None] | None,
) -> CacheManager:
    return CacheManager(
        geometry,
        memory.num_blocks,
        rows,
        memory.max_model_len,
        on_assign,
        sharing=config.allow_block_sharing,
        tokens_ahead=2 * memory.max_batch_tokens,
    )


def prefill_to_few(spec: ModelSpec) -> int:
    """`Budgets.prefill_to_few` on a CPU."""
    least, most = _FEW
    return min(max(least, int(_FEW_WORK / max(1, spec.layer_weights))), most)


def _scheduler(
    config: EngineConfig,
    spec: ModelSpec,
    memory: MemoryPlan,
    rows: RowTable,
    cache: CacheManager,
    lifecycle: Lifecycle,
) -> PassScheduler:
    # Pages are counted as often as they are read: those that several requests share, for each of them.
    pages = memory.max_requests * cache.tables.shape[1]
    budgets = Budgets(memory.max_batch_tokens, memory.max_requests, pages_read=pages)
    on_cpu = config.device == "cpu"
    if config.scheduler_type == "fifo" and (config.prefill_chunk or on_cpu):
        ours = {**_CPU_PREFILL, "prefill_to_few": prefill_to_few(spec)}
        share: dict[str, Any] = {"prefill": config.prefill_chunk} if config.prefill_chunk else ours
        budgets = replace(budgets, attention_reach=spec.attention_reach, **share)
    kind, reserve = _SCHEDULERS[config.scheduler_type], config.admission == "reserve"
    return kind(rows, cache, lifecycle, budgets, config.margin, reserve=reserve)
