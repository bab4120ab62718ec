"""`quantization="int8"`: which models it takes, what becomes of their weights, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, EngineConfig, UnsupportedFeatureError
from cbengine.models import fuse_int8
from cbengine.models.adapter import TransformersRunner
from cbengine.models.load import load
from cbengine.testing import FakeModel
from tests.attention.packing import Work
from tests.models.paged import Paged, prompts_of, reference
from tests.models.test_fuse import PARTS, WHOLE, same, weights
from tests.models.tiny import tiny
from tests.support.loops import aio


def int8(model: Any, **options: Any) -> TransformersRunner:
    return TransformersRunner(model, quantization="int8", **options)


def prompt_logits(runner: TransformersRunner) -> torch.Tensor:
    prompt = prompts_of([20])[0]
    return Paged(runner).forward([], [Work(20, 20, list(range(2, 6)), prompt)])


@pytest.mark.parametrize("name", WHOLE)
def test_every_family_that_the_kernels_run(name: str) -> None:
    """Close to the model, but not the model; one that is somebody's is as it was, before and after."""
    model = tiny(name)
    before = weights(model)
    plain = TransformersRunner(model, attention="eager")
    exact = prompt_logits(plain)
    plain.release()
    runner = int8(model)
    found = prompt_logits(runner)
    assert 1e-5 < float((found - exact).norm() / exact.norm()) < 0.1
    assert isinstance(runner._fused, fuse_int8.FusedInt8)
    assert same(weights(model), before)
    runner.release()
    assert runner._fused is None and runner.model is model
    prompt = prompts_of([9])[0]
    assert Paged(TransformersRunner(model)).generate([prompt], 4)[0].tokens == reference(model, prompt, 4)[0]


def test_weights_of_our_own_model_are_dropped_for_good() -> None:
    model = tiny("llama")
    runner = int8(model, owned=True)
    expected = prompt_logits(runner)
    assert all(layer.mlp.down_proj.weight.isnan().all() for layer in model.model.layers)
    assert model.model.embed_tokens.weight.untyped_storage().nbytes() == 4
    runner.release()
    assert torch.equal(prompt_logits(runner), expected)  # it can be served again
    runner.release()
    with pytest.raises(UnsupportedFeatureError, match="load the model again"):
        _ = runner.model


@pytest.mark.parametrize("name", PARTS[:2])
def test_a_model_with_an_unknown_part_is_refused(name: str) -> None:
    """And left as it was."""
    model = tiny(name)
    before = weights(model)
    with pytest.raises(UnsupportedFeatureError, match="kernels run as a whole"):
        Paged(int8(model, owned=True))
    assert same(weights(model), before)


def test_a_model_that_is_taken_for_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fuse_int8.recognise

    def wrong(*args: Any) -> Any:
        decoder = plain(*args)
        decoder.layers[1].attention.scale *= 1.01
        return decoder

    monkeypatch.setattr("cbengine.models.fuse.recognise", wrong)
    model = tiny("llama")
    before = weights(model)
    with pytest.raises(UnsupportedFeatureError, match="off what was taken for it"):
        Paged(int8(model, owned=True))
    assert same(weights(model), before)


def test_a_model_that_cannot_bear_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_int8, "_INT8_TOLERANCE", 1e-6)
    model = tiny("llama")
    before = weights(model)
    with pytest.raises(UnsupportedFeatureError, match="does not bear"):
        Paged(int8(model, owned=True))
    assert same(weights(model), before)


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = tiny("llama")
    model.lm_head.weight.data[3, 3] = torch.inf
    with pytest.raises(UnsupportedFeatureError, match="finite weights"):
        Paged(int8(model))


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_model_without_logits_is_not_said_to_change(value: float) -> None:
    model = tiny("llama")
    model.model.norm.weight.data.fill_(value)
    with pytest.raises(UnsupportedFeatureError, match="are not all finite, or all zero"):
        Paged(int8(model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: int8(model.to(torch.bfloat16)), "float32 weights"),
        (lambda model: int8(model, attention="sdpa"), "attention backend"),
        (lambda model: int8(model, attention="eager"), "attention backend"),
    ],
)
def test_where_it_is_not_served_it_is_refused_at_once(change: Any, words: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=words):
        change(tiny("llama"))


def test_without_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbengine.attention.cpu.get_library", lambda: None)
    monkeypatch.setattr("cbengine.models.fuse_int8.get_library", lambda: None)
    with pytest.raises(UnsupportedFeatureError, match="CPU kernels"):
        Paged(int8(tiny("llama")))


def test_the_setting_takes_what_it_says() -> None:
    assert EngineConfig().quantization is None
    assert EngineConfig(quantization="int8").quantization == "int8"
    for wrong in ("int4", "INT8", 8):
        with pytest.raises(ValueError, match="quantization must be None or int8"):
            EngineConfig(quantization=wrong)  # type: ignore[arg-type]


@aio("asyncio")
async def test_through_the_engine() -> None:
    """Answers do not depend on what else is computed, as without quantisation."""
    prompts = prompts_of([3, 40, 17])
    async with AsyncEngine(tiny("llama"), quantization="int8", num_blocks=24, page_size=16) as engine:
        together = await engine.generate_batch(prompts, max_new_tokens=8, temperature=0.0)
        alone = [await engine.generate(prompt, max_new_tokens=8, temperature=0.0) for prompt in prompts]
    assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in together]
    with pytest.raises(UnsupportedFeatureError, match="for transformers models"):
        await AsyncEngine(FakeModel(), quantization="int8").start()


@pytest.mark.slow
def test_a_real_model_takes_a_byte_for_each_weight(smollm2: Path) -> None:
    """Beside the embedding, which stays as exact as it was."""
    runner = load(smollm2, with_tokenizer=False, quantization="int8").runner
    embedding: Any = runner.model.get_input_embeddings()
    table = embedding.weight.numel()
    total = sum(p.numel() for p in runner.model.parameters())
    Paged(runner, page_size=16, num_blocks=8)
    fused: Any = runner._fused
    assert fused._decoder.nbytes < total * 1.02 + table * 1.3
