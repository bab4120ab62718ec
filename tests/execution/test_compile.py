"""torch.compile: what the settings mean, how often it compiles, and that the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from cbengine import AsyncEngine, EngineConfig
from cbengine.errors import UnsupportedFeatureError
from cbengine.execution.compile import LEVELS, CompilePlan
from cbengine.models.adapter import TransformersRunner
from cbengine.models.compiled import HANDLE
from cbengine.testing import FakeModel
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import tiny

PROMPTS = prompts_of([3, 13, 1])
SMALL: dict[str, Any] = {"page_size": 4, "num_blocks": 40, "max_batch_tokens": 16}


class Compiler:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, program: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return program.forward


def plan(**settings: Any) -> CompilePlan | None:
    return CompilePlan.of(EngineConfig(**settings))


def test_levels() -> None:
    assert plan() is None and plan(default_compile_level=0) is None
    for level in (1, 2, 3):
        assert plan(default_compile_level=level) == CompilePlan(LEVELS[level], LEVELS[level])
    assert [options and options["dynamic"] for options in LEVELS] == [None, True, True, False]
    assert all(options is None or "fullgraph" not in options for options in LEVELS)


def test_a_path_of_its_own() -> None:
    assert plan(varlen_compile_config={"backend": "eager"}) == CompilePlan({"backend": "eager"}, None)
    mixed = plan(default_compile_level=1, decode_compile_config={"backend": "eager", "dynamic": None})
    assert mixed == CompilePlan(LEVELS[1], {"backend": "eager"})


def test_graphs_are_the_engines_own() -> None:
    found = plan(decode_compile_config=CompileConfig())  # whose mode is "reduce-overhead"
    assert found is not None and found.varlen is None
    assert found.decode == {"fullgraph": False, "backend": "inductor", "mode": "default"}
    options = {"triton.cudagraphs": True, "max_autotune": True}
    found = plan(varlen_compile_config=CompileConfig(options=options))
    assert found is not None and found.varlen is not None and "mode" not in found.varlen
    assert found.varlen["options"] == {"triton.cudagraphs": False, "max_autotune": True}
    assert options["triton.cudagraphs"]
    found = plan(varlen_compile_config={"mode": "max-autotune"})
    assert found == CompilePlan({"mode": "max-autotune-no-cudagraphs"}, None)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"default_compile_level": 4}, ValueError, "0, 1, 2 or 3"),
        ({"default_compile_level": -1}, ValueError, "at least 0"),
        ({"default_compile_level": True}, TypeError, "integer"),
        ({"default_compile_level": None}, TypeError, "integer"),
        ({"varlen_compile_config": {"fullgrap": True}}, ValueError, "has fullgrap; torch.compile takes fullgraph"),
        (
            {"decode_compile_config": {"mode": "fast"}},
            ValueError,
            "mode in decode_compile_config must be one of default",
        ),
        ({"decode_compile_config": {"dynamic": 1}}, ValueError, "a bool or None, got 1"),
        ({"decode_compile_config": {"mode": "default", "options": {}}}, ValueError, "takes one of them"),
        ({"varlen_compile_config": 1}, TypeError, "must be a mapping, transformers' CompileConfig or None"),
        ({"varlen_compile_config": SimpleNamespace(backend=3)}, ValueError, "backend in varlen_compile_config"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        EngineConfig(**settings)


class Breaking(torch.nn.Module):
    """An activation that torch cannot trace through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.nn.functional.silu(x)


def made_of(name: str) -> Any:
    """A tiny model; "broken" is a Llama with a graph break in its first layer."""
    model: Any = tiny("llama" if name == "broken" else name)
    if name == "broken":
        model.model.layers[0].mlp.act_fn = Breaking()
    return model


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3-text", "qwen3-moe", "gpt-oss", "broken")]


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_one_program_for_each_path_whatever_the_shape(name: str) -> None:
    model = made_of(name)
    expected = [reference(model, prompt, 5)[0] for prompt in PROMPTS]
    varlen, decode, whole = Compiler(), Compiler(), name != "broken"
    runner = TransformersRunner(model)
    runner.compile_with({"backend": varlen, "dynamic": True, "fullgraph": whole}, {"backend": decode, "dynamic": True})
    paged = Paged(runner)
    assert runner._fused is None and (varlen.count, decode.count) == (0, 0)
    runner.warm_up()
    made = (varlen.count, decode.count)
    assert made == (1, 1) if whole else min(made) > 1
    assert [request.tokens for request in paged.generate(PROMPTS, 5)] == expected
    assert (varlen.count, decode.count) == made
    assert [reference(model, prompt, 5)[0] for prompt in PROMPTS] == expected  # by somebody else, meanwhile
    runner.release()
    assert not any(hasattr(module, HANDLE) for module in model.modules())
    assert [reference(model, prompt, 5)[0] for prompt in PROMPTS] == expected


def test_static_shapes_are_powers_of_two_and_a_path_may_stay_as_it_is() -> None:
    model, decode = tiny("llama"), Compiler()
    runner = TransformersRunner(model)
    runner.compile_with(None, {"backend": decode, "dynamic": False})
    paged = Paged(runner)
    runner.warm_up()
    assert decode.count == 1
    prompts = prompts_of([2, 3, 4, 5, 6])
    expected = [reference(model, prompt, 4)[0] for prompt in prompts]
    assert [request.tokens for request in paged.generate(prompts, 4, budget=40)] == expected
    assert decode.count <= 3  # 2, 4 and 8 tokens


def test_compiled_after_it_was_fused_and_the_other_way_round() -> None:
    model, compiler = tiny("llama"), Compiler()
    expected = [reference(model, prompt, 4)[0] for prompt in PROMPTS]
    runner = TransformersRunner(model, owned=True)
    options = {"backend": compiler, "dynamic": True}
    for paths in ((None, None), (options, options), (None, None)):
        runner.compile_with(*paths)
        assert [request.tokens for request in Paged(runner).generate(PROMPTS, 4)] == expected
        assert (runner._fused is None) == (paths[0] is not None)
        runner.release()
    assert compiler.count >= 1


@pytest.mark.aio("asyncio")
async def test_an_engine_that_compiles() -> None:
    model, compiler = tiny("llama"), Compiler()
    expected = reference(model, PROMPTS[1], 6)[0][len(PROMPTS[1]) :]
    config = {"backend": compiler, "dynamic": True, "fullgraph": True}
    settings = {"varlen_compile_config": config, "decode_compile_config": config, **SMALL}
    async with AsyncEngine(model, **settings) as engine:
        made = compiler.count
        assert made == 2
        answer = await engine.generate(PROMPTS[1], max_new_tokens=6, temperature=0, ignore_eos=True)
        assert list(answer.token_ids) == expected
        assert compiler.count == made


def refuses(program: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    raise RuntimeError("this compiler compiles nothing")


@pytest.mark.aio("asyncio")
@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("llama", {"decode_compile_config": {"backend": refuses}}, "could not be compiled .*compiles nothing"),
        ("broken", {"varlen_compile_config": {"backend": "eager", "fullgraph": True}}, "set default_compile_level=0"),
        ("", {"default_compile_level": 1}, "FakeModel has nothing to compile"),
    ],
)
async def test_a_failure_is_told_at_start(model: str, settings: dict[str, Any], says: str) -> None:
    engine = AsyncEngine(made_of(model) if model else FakeModel(), **settings, **SMALL)
    with pytest.raises(UnsupportedFeatureError, match=says):
        await engine.start()
    await engine.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by inductor itself
@pytest.mark.aio("asyncio", timeout=850.0)
@pytest.mark.parametrize("level", [1])
async def test_inductor(level: int) -> None:
    model = tiny("llama")
    expected = reference(model, PROMPTS[1], 6)[0][len(PROMPTS[1]) :]
    async with AsyncEngine(model, default_compile_level=level, **SMALL) as engine:
        answer = await engine.generate(PROMPTS[1], max_new_tokens=6, temperature=0, ignore_eos=True)
        assert list(answer.token_ids) == expected
