"""What a step takes is what the plan said, within 5 %: every tensor that is alive at the peak, counted as it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbengine.cache import workspace
from cbengine.cache.geometry import CacheGeometry, layer_views
from cbengine.cache.sizing import MemoryPlan, plan_memory
from cbengine.cache.workspace import Step
from cbengine.config import EngineConfig
from cbengine.devices.base import MemoryInfo
from cbengine.devices.inline import InlineDevice
from cbengine.execution import sampler
from cbengine.execution.inputs import SamplingInputs
from cbengine.execution.processors import PenaltyLoad, PenaltyTables
from cbengine.models.adapter import TransformersRunner
from cbengine.models.base import ModelSpec
from cbengine.models.load import inspect, load
from tests.attention.packing import Work, step
from tests.cache.meter import Meter

TOKENS, SAMPLES, LONGEST = 256, 4, 1024


# --- the forward ---------------------------------------------------------------------------------------------------


def forward_peak(runner: TransformersRunner, page: int) -> tuple[int, int, int]:
    """Bytes at the peak of the two largest steps, without weights, cache and inputs; what stays; and those of the logits."""
    meter, geometry = Meter(), CacheGeometry.of(runner.spec, page)
    pages = geometry.blocks_for(LONGEST)
    pool = torch.zeros((geometry.chunks_for(pages + SAMPLES) + 2) * geometry.chunk_bytes, dtype=torch.uint8)
    network = runner.model
    meter.ignore([pool, *network.parameters(), *network.buffers()])
    with meter:  # it tries the model out, which leaves tables and small buffers
        runner.bind(layer_views(pool, geometry), page)
    meter.ignore([*network.parameters(), *network.buffers()])
    meter.start_again()
    blocks, logits = range(2, 2 + pages), 0
    decodes = [Work(LONGEST, 1, blocks) for _ in range(SAMPLES - 1)]
    prompt, alone = (Work(LONGEST, count, blocks) for count in (TOKENS - len(decodes), TOKENS))
    for inputs in (step(decodes, [prompt]), step([], [alone])):
        if len(geometry.groups) > 1:
            inputs.group_tables = (inputs.block_tables,) * 2
            inputs.host_group_tables = (inputs.host_block_tables,) * 2
        meter.ignore([inputs.token_ids, inputs.positions, inputs.block_tables, inputs.query_starts])
        meter.ignore([inputs.context_lens, inputs.sample_index, inputs.rows])
        with meter:
            out = runner.forward(inputs)
        logits = max(logits, out.untyped_storage().nbytes())
        del out
    held = meter.live
    runner.release()
    return meter.peak, held, logits


def planned(spec: ModelSpec, longest: int, page: int, **settings: Any) -> MemoryPlan:
    config = EngineConfig(
        page_size=page,
        max_batch_tokens=TOKENS,
        max_requests_per_batch=SAMPLES,
        max_model_len=longest,
        num_blocks=-(-longest // page) + SAMPLES,
        num_threads=1,
        **settings,
    )
    return plan_memory(spec, config, MemoryInfo(16 << 30, 16 << 30), on_cpu=True)


def check_forward(runner: TransformersRunner, backend: str | None, spec: ModelSpec | None = None) -> None:
    """`spec`: as it was read without loading anything; default: the runner's."""
    spec = spec or runner.spec
    peak, held, logits = forward_peak(runner, 16)
    plan = planned(spec, LONGEST, 16, attention_backend=backend)
    if backend is None:  # there are buffers that stay, and the memory of the kernels' threads, which is no tensor
        peak = max(peak, held + logits + plan.sampling_bytes) + workspace._scratch_bytes(spec)
        assert peak == pytest.approx(plan.activation_bytes + plan.logits_bytes + plan.sampling_bytes, rel=0.05)
        largest = Step(tokens=TOKENS, samples=SAMPLES, longest=LONGEST, on_cpu=True)
        lasting = workspace.native_bytes(spec, CacheGeometry.of(spec, 16), largest, threads=0)
        assert held == pytest.approx(lasting, rel=0.05)
    else:
        assert peak == pytest.approx(plan.activation_bytes + plan.mask_bytes, rel=0.05)
        assert held == pytest.approx(plan.mask_bytes, rel=0.05)
    assert logits == plan.logits_bytes


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma2"])
def test_a_step_of_a_small_model(kind: str, backend: str | None) -> None:
    """Two layers of ordinary proportions."""
    check_forward(TransformersRunner(small(kind), attention=backend), backend)


def small(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    windows = {"sliding_window": 300, "layer_types": ["sliding_attention", "full_attention"]}
    config, model = {
        "llama": (transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM),
        "gemma2": (transformers.Gemma2Config(**sizes, **windows), transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig(**sizes, **windows), transformers.Gemma3ForCausalLM),
    }[kind]
    return model(config).float().eval()


REAL = [pytest.param(None, id="native"), pytest.param("sdpa", marks=pytest.mark.slow)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", REAL)
def test_a_step_of_smollm2(smollm2: Path, backend: str | None) -> None:
    spec = inspect(str(smollm2))
    runner = load(smollm2, attention=backend, with_tokenizer=False).runner
    assert runner.spec.weight_bytes == pytest.approx(spec.weight_bytes, rel=0.05)
    check_forward(runner, backend, spec)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", [None, "sdpa"])
def test_a_step_of_gemma3(gemma3: Path, backend: str | None) -> None:
    spec = inspect(str(gemma3))
    runner = load(gemma3, attention=backend, with_tokenizer=False).runner
    assert runner.spec.weight_bytes == pytest.approx(spec.weight_bytes, rel=0.05)
    check_forward(runner, backend, spec)


# --- the sampler ---------------------------------------------------------------------------------------------------


def sampling_inputs(rows: int) -> SamplingInputs:
    """Rows whose top_k is too large, and whose distribution is too flat, for a look at the best tokens alone."""
    none = torch.zeros(0, dtype=torch.int32)
    ones, k = torch.ones(rows), torch.full((rows,), 1000, dtype=torch.int32)
    return SamplingInputs(ones, k, 0.9 * ones, 0.01 * ones, 0.5 * ones, none, none, True, True, True, True)


@pytest.mark.parametrize(("rows", "vocab"), [(3, 262_144), (9, 262_144), (16, 49_152), (50, 49_152), (200, 1000)])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "elsewhere"])
def test_the_sampler(rows: int, vocab: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_host_may_look", lambda tensor: on_cpu)
    logits, inputs, meter = torch.randn(rows, vocab), sampling_inputs(rows), Meter()
    meter.ignore([logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.uniform])
    with meter:
        sampler.sample(logits, inputs)
    planned = workspace._sampling_bytes(vocab, Step(tokens=256, samples=rows, longest=1024, on_cpu=on_cpu))
    assert meter.peak == pytest.approx(planned, rel=0.05)


# --- what requests ask for -----------------------------------------------------------------------------------------


def test_penalty_tables() -> None:
    """A place for each of five requests and for each of five that are leaving, taken one by one."""
    tables, vocab = PenaltyTables(InlineDevice(), 300), 300
    said = np.arange(LONGEST, dtype=np.int32) % vocab
    for place in range(10):
        tables.load([PenaltyLoad(place, said[:-1], said[-1:])])
    taken = tables._in_prompt.nbytes + tables._counts.nbytes + tables._said.nbytes
    logits = 3 * 5 * vocab * 4
    planned = workspace._on_request_bytes(vocab, Step(tokens=256, samples=5, longest=LONGEST, on_cpu=True))
    assert taken == pytest.approx(planned - logits, rel=0.05)
