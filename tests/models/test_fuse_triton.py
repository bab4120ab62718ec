"""A GPU's way to run a model, on a CPU: the Triton kernels in their interpreter, in place of transformers' own code."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from cbengine.models import fuse, fuse_gpu
from cbengine.models.adapter import TransformersRunner
from tests.models.paged import Paged, prompts_of, reference
from tests.models.test_fuse import other_norm, own_attention, own_forward, same, weights
from tests.models.tiny import tiny

WHOLE = ["llama", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "mistral-window", "gemma2", "gemma3-text"]
PARTS = ["mixtral", "qwen3-moe", "gpt-oss"]
QUICK = ["gemma3-text", "mixtral"]
CASES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WHOLE + PARTS]
PROMPTS = prompts_of([3, 9])
NEW = 3


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "_on_gpu", lambda model: True)
    monkeypatch.setattr(fuse, "_PROBE_TOKENS", 3)  # the interpreter takes its time


def kind_of(runner: TransformersRunner) -> str:
    return type(runner._fused).__name__


def answers(runner: TransformersRunner) -> list[list[int]]:
    return [request.tokens for request in Paged(runner, page_size=4).generate(PROMPTS, NEW)]


def expected_of(model: Any) -> list[list[int]]:
    return [reference(model, prompt, NEW)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = tiny(name)
    expected, before = expected_of(model), weights(model)
    runner = TransformersRunner(model)
    assert answers(runner) == expected
    assert kind_of(runner) == ("FusedGpu" if name in WHOLE else "FusedModules")
    assert same(weights(model), before)
    assert expected_of(model) == expected  # by somebody else, while it is served
    assert runner.capturable == all(backend.capturable for backend in runner._backends)
    runner.release()
    assert same(weights(model), before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert expected_of(model) == expected


def test_merged_weights_are_held_once_and_written_in_place() -> None:
    """Whoever trains the model meanwhile is seen from the next step on."""
    model: Any = tiny("llama")
    runner = TransformersRunner(model, owned=True)
    paged = Paged(runner, page_size=4)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for parts in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        storages = {part.weight.untyped_storage().data_ptr() for part in parts}
        assert len(storages) == 1
        assert parts[0].weight.untyped_storage().nbytes() == 4 * sum(part.weight.numel() for part in parts)
    with torch.no_grad():
        attention.k_proj.weight.mul_(-1.5)
        mlp.up_proj.weight.add_(0.3)
        model.model.norm.weight.mul_(0.5)
    request = paged.generate([PROMPTS[1]], NEW)[0]
    tokens, logits = reference(model, PROMPTS[1], NEW)
    assert request.tokens == tokens
    torch.testing.assert_close(torch.stack(request.logits), logits, rtol=1e-4, atol=1e-3)
    runner.release()
    assert (
        attention.q_proj.weight.untyped_storage().nbytes() > 4 * attention.q_proj.weight.numel()
    )  # to be served again
    assert runner.model is model
    assert attention.q_proj.weight.untyped_storage().nbytes() == 4 * attention.q_proj.weight.numel()
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert attention.q_proj.weight.grad is not None


@pytest.mark.parametrize("change", [own_attention, own_forward, other_norm])
def test_a_model_that_somebody_changed_runs_as_changed(change: Any) -> None:
    model = tiny("llama")
    plain = expected_of(model)
    change(model)
    changed = expected_of(model)
    assert changed != plain
    runner = TransformersRunner(model)
    assert answers(runner) == changed
    assert kind_of(runner) == "FusedModules"


def test_what_turns_out_different_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = fuse_gpu.recognise

    def wrong(*args: Any) -> Any:
        decoder = plain(*args)
        decoder.layers[1].attention.scale *= 1.01
        return decoder

    monkeypatch.setattr(fuse_gpu, "recognise", wrong)
    model = tiny("llama")
    before = weights(model)
    runner = TransformersRunner(model)
    with caplog.at_level(logging.WARNING, "cbengine"):
        Paged(runner, page_size=4)
    assert kind_of(runner) == "FusedModules"
    assert sum("faster code for it was not used" in record.message for record in caplog.records) == 1
    runner.release()
    assert same(weights(model), before)


def test_half_precision() -> None:
    """Every rounding is where transformers rounds: the logits are nearly those of its own forward."""
    model = tiny("qwen3").to(torch.float16)
    original = TransformersRunner(model, attention="sdpa")
    expected = Paged(original, page_size=4).generate([PROMPTS[1]], 1)[0].logits[0]
    original.release()
    runner = TransformersRunner(model)
    found = Paged(runner, page_size=4).generate([PROMPTS[1]], 1)[0].logits[0]
    assert kind_of(runner) == "FusedGpu" and found.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-3 * float(expected.abs().max()))


def test_mixed_precision_is_left_alone() -> None:
    model: Any = tiny("llama").to(torch.float16)
    model.model.norm.float()
    assert any(p.dtype == torch.float32 for p in model.parameters())
    runner = TransformersRunner(model)
    assert fuse._fuse_for_gpu(model, runner.spec, runner._backends, [], 4, runner._run, False) is None
