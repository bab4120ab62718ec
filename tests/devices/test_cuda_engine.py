"""An engine on a GPU that is a stand-in, through the public API; and how a model and its memory plan get to a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cbengine import AsyncEngine
from cbengine.cache.sizing import MemoryPlan, plan_memory
from cbengine.config import EngineConfig
from cbengine.devices import cuda
from cbengine.devices.base import MemoryInfo
from cbengine.devices.choose import make_device
from cbengine.errors import UnsupportedFeatureError
from cbengine.loading import device_for
from cbengine.models.adapter import TransformersRunner
from cbengine.models.load import load
from cbengine.testing import FakeModel
from tests.devices.fake_cuda import FakeCuda
from tests.models.tiny import tiny

SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "num_blocks": 40,
    "max_batch_tokens": 16,
    "max_requests_per_batch": 4,
    "safety_margin": 0.0,
}


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[FakeCuda]:
    """Two GPUs; the runtimes of the devices that are made."""
    made: list[FakeCuda] = []

    def make(index: int) -> FakeCuda:
        made.append(FakeCuda(index=index))
        return made[-1]

    monkeypatch.setattr(cuda, "count", lambda: 2)
    monkeypatch.setattr(cuda, "CudaRuntime", make)
    return made


def test_an_engine_answers_from_graphs_and_gives_everything_back(runtimes: list[FakeCuda]) -> None:
    asyncio.run(_answer_from_graphs(runtimes))


async def _answer_from_graphs(runtimes: list[FakeCuda]) -> None:
    model = FakeModel(max_model_len=64)
    prompts = [[2, 3, 4], [5] * 9, [6, 7]]
    async with AsyncEngine(model, device="cuda:1", **SETTINGS) as engine:
        answers = await engine.generate_batch(prompts, max_new_tokens=6, ignore_eos=True)
        assert engine.config.device == "cuda:1" and engine.config.use_cuda_graph == (True, True)
        (runtime,) = runtimes
        assert engine.stats().graphs == len(runtime.graphs) == len(runtime.captures) > 3
        pool = next(tensor for tensor in runtime._keep if tensor.untyped_storage().nbytes() == _pool_bytes(engine))
    meant = [model.reference(prompt, 6, ignore_eos=True) for prompt in prompts]
    assert [list(answer.token_ids) for answer in answers] == meant
    assert runtime.current_device == 1 and sum(graph.replays for graph in runtime.graphs) > 5
    assert pool.untyped_storage().nbytes() == 0 and not any(graph.alive for graph in runtime.graphs)


def _pool_bytes(engine: AsyncEngine) -> int:
    return engine.memory_plan.kv_bytes


def test_an_engine_starts_again_on_a_device_of_its_own(runtimes: list[FakeCuda]) -> None:
    asyncio.run(_start_again(runtimes))


async def _start_again(runtimes: list[FakeCuda]) -> None:
    model = FakeModel(max_model_len=64)
    engine = AsyncEngine(model, device="cuda", use_cuda_graph=False, **SETTINGS)
    for _ in range(2):
        await engine.start()
        assert len((await engine.generate([2, 3], max_new_tokens=3, ignore_eos=True)).token_ids) == 3
        await engine.stop()
    await engine.aclose()
    assert len(runtimes) == 2 and not any(runtime.captures for runtime in runtimes)


@pytest.mark.usefixtures("runtimes")
def test_a_model_says_where_it_is() -> None:
    """The default is where a model is that was built already, and the first GPU for one that has to be loaded."""
    model = tiny("llama")
    assert device_for(model, EngineConfig()) == device_for(TransformersRunner(model), EngineConfig()) == "cpu"
    assert device_for(FakeModel(), EngineConfig()) == "cpu"
    assert device_for("a/name", EngineConfig()) == device_for(Path("folder"), EngineConfig()) == "cuda:0"
    assert device_for("a/name", EngineConfig(device="cuda:1")) == "cuda:1"
    with pytest.raises(UnsupportedFeatureError, match="'cuda:7' is not here"):
        make_device(EngineConfig(device="cuda:7"))


def test_weights_go_straight_to_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read shard by shard to where they are wanted, and never all in RAM first."""
    tiny("llama").save_pretrained(tmp_path)
    real, asked = AutoModelForCausalLM.from_pretrained, dict[str, Any]()

    def from_pretrained(source: str, **options: Any) -> Any:
        asked.update(options)
        return real(source, dtype=options["dtype"])

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr("transformers.PreTrainedModel.device", property(lambda _: torch.device("cuda", 1)))
    monkeypatch.setattr("cbengine.models.load.TransformersRunner", lambda network, **_: network)
    load(str(tmp_path), device="cuda:1")
    assert asked["device_map"] == {"": torch.device("cuda", 1)} and asked["dtype"] == "auto"
    asked.clear()
    load(str(tmp_path), device="cuda:1", device_map="auto")
    assert asked["device_map"] == "auto"


# --- the memory plan (C3) ------------------------------------------------------------------------------------------


def _plan(**settings: Any) -> MemoryPlan:
    memory = MemoryInfo(total=80 << 30, free=64 << 30)
    spec = TransformersRunner(tiny("llama")).spec
    return plan_memory(spec, EngineConfig(**settings), memory, on_cpu=False)


def test_graphs_are_part_of_the_plan() -> None:
    with_graphs, without, few = _plan(), _plan(use_cuda_graph=False), _plan(max_cached_graphs=2)
    assert with_graphs.graph_bytes > few.graph_bytes > 0 and without.graph_bytes == 0
    assert with_graphs.parts()["graphs"] == with_graphs.graph_bytes
    taken = with_graphs.total_bytes - with_graphs.kv_bytes - (without.total_bytes - without.kv_bytes)
    assert taken == with_graphs.graph_bytes


def test_a_gpu_is_used_by_nine_tenths() -> None:
    most = 64 << 30
    assert _plan(max_memory_percent=0.5, max_requests_per_batch=8, num_blocks=None).total_bytes <= most // 2
    assert _plan().total_bytes <= 0.9 * most
    assert _plan().max_batch_tokens == 8192 and _plan().max_requests == 1024
