"""Faster code in place of transformers' own: used where it computes the same, and nowhere else."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cbengine.attention import cpu
from cbengine.models import adapter, fuse
from cbengine.models.adapter import TransformersRunner
from cbengine.models.load import load
from tests.attention.packing import Work, step
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import NAMES, tiny

WHOLE = [
    "llama",
    "llama-mha",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo",
    "olmo2",
    "mistral-window",
    "gemma2",
    "gemma3-text",
]
"""Families that the kernels run from the embedding to the logits."""
PARTS = [name for name in NAMES if name not in WHOLE]


def kind_of(runner: TransformersRunner) -> str:
    return type(runner._fused).__name__


def answers(runner: TransformersRunner, prompts: list[list[int]], new: int = 6) -> list[list[int]]:
    return [request.tokens for request in Paged(runner).generate(prompts, new)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("owned", [False, True])
def test_every_family(name: str, owned: bool) -> None:
    model = tiny(name)
    prompts = prompts_of([3, 21, 9])
    expected = [reference(model, prompt, 6)[0] for prompt in prompts]
    before = weights(model)
    runner = TransformersRunner(model, owned=owned)
    assert answers(runner, prompts) == expected
    assert kind_of(runner) == ("FusedNative" if name in WHOLE else "FusedLinears")
    if not owned:
        assert same(weights(model), before)
        assert [reference(model, prompt, 6)[0] for prompt in prompts] == expected  # while it is served
    runner.release()
    assert answers(runner, prompts) == expected  # and served again
    runner.release()
    assert runner.model is model
    assert same(weights(model), before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert [reference(model, prompt, 6)[0] for prompt in prompts] == expected


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma3-text"])
def test_weights_are_held_once(name: str) -> None:
    """What a model of our own has given up takes no memory, and cannot be mistaken for weights."""
    model = tiny(name)
    runner = TransformersRunner(model, owned=True)
    Paged(runner)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert module.weight.untyped_storage().nbytes() == 4
            assert module.weight.isnan().all()
            rows = getattr(module, "out_features", None) or module.num_embeddings
            assert module.weight.shape == (rows, module.weight.shape[1])
    total = sum(p.numel() for p in model.parameters())
    assert total == sum(p.numel() for p in tiny(name).parameters())


def test_a_real_model_takes_the_memory_of_its_checkpoint(smollm2: Path) -> None:
    """Its weights once were 4 and 8 bits, and are kept as such: a fifth of what they take as float32, and the same."""
    loaded = load(smollm2, with_tokenizer=False)
    runner = loaded.runner
    total = sum(p.numel() for p in runner.model.parameters())
    before = weights(runner.model)
    Paged(runner, page_size=16, num_blocks=8)
    fused: Any = runner._fused
    assert fused._decoder.nbytes < total
    runner.release()
    assert same(weights(runner.model), before)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_in_half_precision_is_left_alone(name: str) -> None:
    model = tiny(name).to(torch.bfloat16)
    runner = TransformersRunner(model)
    Paged(runner)
    assert runner._fused is None


def test_another_backend_means_transformers_own_code() -> None:
    for attention in ("sdpa", "eager"):
        runner = TransformersRunner(tiny("llama"), attention=attention)
        Paged(runner)
        assert runner._fused is None


def own_attention(model: Any) -> None:
    class Scaled(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states * 1.5, *args, **kwargs)

    model.model.layers[0].self_attn.__class__ = Scaled


def own_forward(model: Any) -> None:
    plain = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: plain(x) * 0.5


def hook(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, output: output * 2)


def other_linear(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model.model.layers[1].self_attn.o_proj.__class__ = Doubled


class Sine(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.sin()


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = Sine()


def other_norm(model: Any) -> None:
    class Shifted(type(model.model.norm)):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.25

    model.model.norm.__class__ = Shifted


@pytest.mark.parametrize("change", [own_attention, own_forward, hook, other_linear, other_activation, other_norm])
def test_a_model_that_somebody_changed_runs_as_changed(change: Any) -> None:
    model = tiny("llama")
    prompts = prompts_of([3, 17])
    plain = [reference(model, prompt, 6)[0] for prompt in prompts]
    change(model)
    changed = [reference(model, prompt, 6)[0] for prompt in prompts]
    assert changed != plain
    runner = TransformersRunner(model)
    assert answers(runner, prompts) == changed
    assert kind_of(runner) == "FusedLinears"


@pytest.mark.parametrize("owned", [False, True])
def test_what_turns_out_different_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owned: bool
) -> None:
    """If we ever take a model for what it is not, the first comparison shows it, and everything is as before."""
    plain = fuse.recognise

    def wrong(*args: Any) -> Any:
        decoder = plain(*args)
        decoder.layers[1].attention.scale *= 1.01
        return decoder

    monkeypatch.setattr(fuse, "recognise", wrong)
    model = tiny("llama")
    prompts = prompts_of([3, 17])
    expected, before = [reference(model, prompt, 6)[0] for prompt in prompts], weights(model)
    runner = TransformersRunner(model, owned=owned)
    with caplog.at_level(logging.WARNING, "cbengine"):
        assert answers(runner, prompts) == expected
    assert kind_of(runner) == "FusedLinears"
    assert sum("faster code for it was not used" in record.message for record in caplog.records) == 1
    runner.release()
    assert same(weights(runner.model), before)


@pytest.mark.parametrize("name", WHOLE)
def test_without_kernels_torch_does_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fuse, cpu, adapter):
        if hasattr(module, "get_library"):
            monkeypatch.setattr(module, "get_library", lambda: None)
    model = tiny(name)
    prompts = prompts_of([3, 21])
    expected, before = [reference(model, prompt, 6)[0] for prompt in prompts], weights(model)
    runner = TransformersRunner(model, owned=True)
    assert answers(runner, prompts) == expected
    assert kind_of(runner) == "FusedTorch"
    runner.release()
    assert same(weights(model), before)


def test_training_a_served_model_goes_through_its_own_layers() -> None:
    """Linear layers that were replaced are themselves again where gradients are asked for."""
    model = tiny("mixtral")
    Paged(TransformersRunner(model))
    weight = model.model.layers[0].self_attn.q_proj.weight
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert weight.grad is not None and weight.grad.any()


def test_a_copy_of_a_served_model_computes_the_same() -> None:
    model: PreTrainedModel = tiny("mixtral")
    prompt = prompts_of([9])[0]
    expected = reference(model, prompt, 4)[0]
    Paged(TransformersRunner(model))
    assert reference(copy.deepcopy(model), prompt, 4)[0] == expected


def test_only_our_own_thread_is_taken_over() -> None:
    """Whoever drives a runner in a thread of theirs keeps torch's threads in it."""
    runner = TransformersRunner(tiny("llama"))
    paged = Paged(runner)
    seen: dict[str, int] = {}

    def work() -> None:
        torch.set_num_threads(2)
        runner.forward(step([], [Work(3, 3, [2], [4, 5, 6])]))
        seen[threading.current_thread().name] = torch.get_num_threads()

    for name in ("somebody", "cbengine-compute"):
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
    assert seen == {"somebody": 2, "cbengine-compute": 1}
    assert paged.runner is runner
