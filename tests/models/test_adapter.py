"""A model in service: other callers, release, one engine for each model, and models that are not what they seem."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from cbengine.attention.eager import EagerBackend
from cbengine.errors import UnsupportedFeatureError
from cbengine.models.adapter import IMPLEMENTATION, TransformersRunner
from tests.attention.packing import Work
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import SIZES, tiny

EVERY_KIND = ["llama", "mistral-window", "gemma2", "gemma3-composite", "gpt-oss"]


def batch_of(model: Any, prompts: list[list[int]], new: int = 6) -> list[list[int]]:
    """Greedy `generate` of one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return out.tolist()


@pytest.mark.parametrize("name", EVERY_KIND)
def test_generate_works_while_served(name: str) -> None:
    model = tiny(name)
    prompts = prompts_of([4, 19, 11])
    alone, batch = [reference(model, p, 6)[0] for p in prompts], batch_of(model, prompts)
    runner = TransformersRunner(model)
    Paged(runner)
    assert [reference(model, p, 6)[0] for p in prompts] == alone
    assert batch_of(model, prompts) == batch
    runner.release()
    assert batch_of(model, prompts) == batch


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_generate_in_another_thread_in_the_middle_of_a_step(name: str) -> None:
    """The other thread's whole call runs between the first and the second layer of a step of ours."""
    model = tiny(name)
    prompts = prompts_of([4, 19])
    expected = [reference(model, p, 6)[0] for p in prompts]
    paged = Paged(TransformersRunner(model, attention="sdpa"))
    others: list[list[list[int]]] = []

    def interrupt(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        thread = threading.Thread(target=lambda: others.append([reference(model, p, 6)[0] for p in prompts]))
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    served = paged.generate(prompts, 6)
    handle.remove()
    assert [request.tokens for request in served] == expected
    assert len(others) > 6
    assert all(other == expected for other in others)


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything of a model that is no tensor: module attributes, modes, configs."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[name] = (module.training, sorted(vars(module)), id(vars(module).get("config")))
    for config in {id(c): c for c in (vars(m).get("config") for m in model.modules()) if c is not None}.values():
        state[f"config {id(config)}"] = copy.copy(vars(config))
    return state


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("implementation", ["eager", None])
def test_release_puts_everything_back(name: str, implementation: str | None) -> None:
    model: Any = tiny(name)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    model.train()
    model.get_decoder().layers[0].eval()
    before, weights = state_of(model), {key: value.clone() for key, value in model.state_dict().items()}
    runner = TransformersRunner(model)
    assert state_of(model) == before
    for _ in range(2):  # an engine may be started again
        paged = Paged(runner)
        assert not any(module.training for module in model.modules())
        assert model.get_decoder().config._attn_implementation == IMPLEMENTATION
        paged.generate(prompts_of([7]), 3)
        runner.release()
        runner.release()
        assert state_of(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_release_on_a_lost_device_puts_back_what_is_the_hosts() -> None:
    """Its weights do not come back; the model's settings do, and it can be told so once."""
    model: Any = tiny("llama").train()
    implementation = model.config._attn_implementation
    runner = TransformersRunner(model)
    Paged(runner)
    runner._fused = _OnALostDevice()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.release()
    runner.release()
    assert model.config._attn_implementation == implementation and model.training
    TransformersRunner(model).release()


class _OnALostDevice:
    def release(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_vision_tower_keeps_its_own_implementation() -> None:
    model = tiny("gemma3-composite")
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    Paged(TransformersRunner(model))
    assert model.config.text_config._attn_implementation == IMPLEMENTATION
    assert model.config.vision_config._attn_implementation == "eager"


def test_one_model_serves_one_engine_at_a_time() -> None:
    model = tiny("llama")
    first, second = TransformersRunner(model), TransformersRunner(model)
    paged = Paged(first)
    with pytest.raises(UnsupportedFeatureError, match="served by another engine; stop that engine first"):
        Paged(second)
    second.release()  # takes nothing from the first
    prompts = prompts_of([9])
    answer = paged.generate(prompts, 4)[0].tokens
    first.release()
    assert Paged(second).generate(prompts, 4)[0].tokens == answer


def test_a_copy_of_a_served_model_is_a_model_of_its_own() -> None:
    model = tiny("llama")
    prompts = prompts_of([9])
    expected = reference(model, prompts[0], 4)[0]
    paged = Paged(TransformersRunner(model))
    twin = copy.deepcopy(model)
    assert reference(twin, prompts[0], 4)[0] == expected
    assert Paged(TransformersRunner(twin)).generate(prompts, 4)[0].tokens == expected
    assert paged.generate(prompts, 4)[0].tokens == expected


def test_registration_waits_for_the_first_bind() -> None:
    """Importing cbengine, or describing a model, changes nothing in transformers."""
    known = dict(AttentionInterface._global_mapping)
    AttentionInterface._global_mapping.pop(IMPLEMENTATION, None)
    try:
        runner = TransformersRunner(tiny("llama"))
        assert IMPLEMENTATION not in AttentionInterface().valid_keys()
        Paged(runner)
        assert IMPLEMENTATION in AttentionInterface().valid_keys()
    finally:
        AttentionInterface._global_mapping.update(known)


def test_step_without_samples_and_padding_only() -> None:
    paged = Paged(TransformersRunner(tiny("llama")))
    logits = paged.forward([], [Work(3, 3, [2], [5, 6, 7], samples=False)])
    assert logits.shape == (0, SIZES["vocab_size"])
    assert paged.forward([Work(0, 1, [])], []).shape == (0, SIZES["vocab_size"])


def test_padding_never_reaches_a_neighbour() -> None:
    """The same step with and without padded sequences and tokens: the same logits, and no block touched but one."""
    results = []
    for padding in (0, 3):
        paged = Paged(TransformersRunner(tiny("llama")))
        untouched = paged.pool[3:].clone()
        work = Work(4, 4, [2], [5, 6, 7, 8])
        results.append(paged.forward([], [work, *[Work(0, 1, [])] * padding], padded_tokens=padding))
        assert torch.equal(paged.pool[3:], untouched)
        assert not paged.pool[0].any()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_an_exception_ends_the_step_and_not_the_runner() -> None:
    model = tiny("llama")
    prompts = prompts_of([9])
    expected = reference(model, prompts[0], 4)[0]
    paged = Paged(TransformersRunner(model, attention="sdpa"))

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        paged.forward([], [Work(3, 3, [2], [5, 6, 7])])
    handle.remove()
    assert reference(model, prompts[0], 4)[0] == expected  # this thread is out of the step
    assert paged.generate(prompts, 4)[0].tokens == expected


def attention_twice(model: Any) -> None:
    module = model.model.layers[1].self_attn
    plain = module.forward

    def twice(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain(*args, **kwargs)
        return plain(*args, **kwargs)

    module.forward = MethodType(twice, module)


def no_attention(model: Any) -> None:
    def skip(self: nn.Module, hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states, None

    module = model.model.layers[1].self_attn
    module.forward = MethodType(skip, module)


def mask_of_its_own(model: Any) -> None:
    module = model.model.layers[1].self_attn
    plain = module.forward

    def masked(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        n = hidden_states.shape[1]
        return plain(hidden_states, **{**kwargs, "attention_mask": torch.zeros(1, 1, n, n)})

    module.forward = MethodType(masked, module)


def other_kv_heads(model: Any) -> None:
    model.config.num_key_value_heads = 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (attention_twice, "LlamaAttention called the attention function a second time"),
        (no_attention, r"layers \[1\] did not call the attention function"),
        (mask_of_its_own, "LlamaAttention attends with a mask or a bias of its own"),
        (other_kv_heads, "layer 0 has keys .* where its config says 1 heads of 8"),
    ],
)
def test_attention_that_is_not_as_promised_is_refused_at_bind(spoil: Callable[[Any], None], message: str) -> None:
    model = tiny("llama")
    spoil(model)
    before = state_of(model)
    with pytest.raises(UnsupportedFeatureError, match=message):
        Paged(TransformersRunner(model))
    assert state_of(model) == before


def small(config: type, **changes: Any) -> Any:
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return config(**{**sizes, "intermediate_size": 32, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transformers.BertLMHeadModel(small(transformers.BertConfig)), "BertSelfAttention is not causal"),
        (
            lambda: transformers.LlamaModel(small(transformers.LlamaConfig)),
            r"LlamaModel.forward takes no logits_to_keep; language models with a head",
        ),
        (
            lambda: transformers.StableLmForCausalLM(small(transformers.StableLmConfig, num_key_value_heads=4)),
            "StableLmForCausalLM does not attend through transformers' attention interface",
        ),
    ],
)
def test_models_that_cannot_be_served_are_refused_when_described(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=message):
        TransformersRunner(make())


def test_layers_without_attention_are_refused() -> None:
    model: Any = tiny("llama")
    model.model.layers[1].self_attn = nn.Identity()
    with pytest.raises(UnsupportedFeatureError, match=r"attention modules \{0: 1\} \(layer: how many\) for 2 layers"):
        TransformersRunner(model)


def test_backend_that_lacks_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBackend, "supports_softcap", False)
    monkeypatch.setattr(EagerBackend, "supports_sinks", False)
    for name, message in (("gemma2", "has no soft cap; use one of cpu, sdpa"), ("gpt-oss", "has no attention sinks")):
        with pytest.raises(UnsupportedFeatureError, match=message):
            Paged(TransformersRunner(tiny(name), attention="eager"))
