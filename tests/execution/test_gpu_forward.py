"""The whole step as a GPU would run it, without one: shapes, dtypes and devices on torch's meta device, and graphs of real
models over a stand-in that replays exactly what was captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cbengine.config import EngineConfig
from cbengine.devices.cuda import CudaDevice
from cbengine.execution.host_reads import NoHostReads
from cbengine.models import adapter
from cbengine.models.adapter import TransformersRunner
from cbengine.sampling import SamplingParams
from cbengine.scheduling.edit import LogitEdit, pack_mask
from tests.devices.fake_cuda import FakeCuda
from tests.execution.fake_gpu import FakeGpu
from tests.execution.table_attention import TableBackend
from tests.models.tiny import VOCAB, tiny
from tests.support.driver import Driven, Driver

PROMPTS = [[5, 6, 7], list(range(3, 25)), [9], list(range(40, 49)), [11, 12]]


@pytest.fixture
def table_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "choose", lambda *_: TableBackend())


def _runner(model: PreTrainedModel) -> TransformersRunner:
    """Transformers' own forward over `TableBackend`."""
    runner = TransformersRunner(model)
    runner._may_fuse = False
    return runner


def _on_meta(model: Any) -> PreTrainedModel:
    return model.to("meta")


def _driver(runner: TransformersRunner, device: Any, **settings: Any) -> Driver:
    sizes = {"page_size": 8, "num_blocks": 60, "max_batch_tokens": 24, "max_requests_per_batch": 6, "max_model_len": 96}
    return Driver(runner, device, EngineConfig(**{**sizes, "safety_margin": 0.0, **settings}))  # type: ignore[arg-type]


# --- no contents ---------------------------------------------------------------------------------------------------


ASKED: list[tuple[dict[str, Any], Callable[[], LogitEdit] | None]] = [
    ({"temperature": 0.0}, None),
    ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 1}, None),
    ({"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}, None),
    ({"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}, None),
    (
        {"temperature": 0.0, "min_new_tokens": 2},
        lambda: LogitEdit(np.array([4], np.int32), np.array([2.0], np.float32), allowed=pack_mask([4, 5, 6], VOCAB)),
    ),
]


def _submit_all(driver: Driver) -> list[Driven]:
    driven = []
    for prompt, (sampling, edit) in zip(PROMPTS, ASKED, strict=True):
        one = driver.submit(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True, **sampling), expected=())
        if edit is not None:
            one.request.edit = edit()
        driven.append(one)
    return driven


@pytest.mark.parametrize("name", ["llama", "gemma3-text"])
@pytest.mark.usefixtures("table_attention")
def test_a_step_fits_a_gpu_and_reads_nothing_of_it(name: str) -> None:
    """I13, over prompts, chunks and decodes, with everything that a request can ask for."""
    device = FakeGpu()
    runner = _runner(_on_meta(tiny(name).bfloat16()))
    assert runner.spec.kv_dtype is torch.bfloat16
    driver = _driver(runner, device)
    driven = _submit_all(driver)
    driver.run()
    runner.release()
    assert [one.buffer.error for one in driven] == [None] * len(driven)
    assert [len(one.buffer.ids) for one in driven] == [3] * len(driven)
    assert device.ran.count("step") >= 4 and "load penalties" in device.ran


@pytest.mark.usefixtures("table_attention")
def test_a_tensor_of_the_host_in_a_step_is_found() -> None:
    """The check above bites: a constant that was left on the host, a value that is looked at."""
    runner = _runner(_on_meta(tiny("llama")))
    driver = _driver(runner, FakeGpu())
    forward, faults = runner.forward, [lambda x: x + torch.ones(VOCAB), lambda x: x if x.sum() > 0 else -x]
    for fault, message in zip(faults, ("on the expected device", "makes the host wait"), strict=True):
        runner.forward = lambda inputs, fault=fault: fault(forward(inputs))  # type: ignore[method-assign]
        broken = driver.submit([5, 6, 7], max_new_tokens=2, expected=())
        driver.run()
        assert message in str(broken.buffer.error)
    runner.release()


# --- real models in graphs -----------------------------------------------------------------------------------------


def _answers(model: PreTrainedModel, device: Any, **settings: Any) -> tuple[list[list[int]], Driver]:
    driver = _driver(_runner(model), device, **settings)
    greedy = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.0)
    driven = [driver.submit(prompt, greedy, expected=()) for prompt in PROMPTS]
    driver.run()
    assert [one.buffer.error for one in driven] == [None] * len(driven)
    return [list(one.buffer.ids) for one in driven], driver


def _generate(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=VOCAB
    )  # none ends it
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3-text", "qwen3"])
def test_graphs_of_a_model_say_what_generate_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention and windows: prompts in chunks and decodes, all of them from graphs."""
    model = tiny(name)
    meant = [_generate(model, prompt) for prompt in PROMPTS]
    monkeypatch.setattr(adapter, "choose", lambda *_: TableBackend())
    runtime = FakeCuda()
    said, driver = _answers(model, CudaDevice(runtime=runtime), q_padding_interval_size=12)
    assert sum(graph.replays for graph in runtime.graphs) == driver.parts.counters.steps >= 8
    assert said == meant
    driver.parts.pipeline.drain()
    driver.model.release()


@pytest.mark.usefixtures("table_attention")
def test_a_model_is_asked_for_no_mask_and_makes_nobody_wait() -> None:
    """transformers looks for packed sequences among the positions where it is given no mask, and the host waits for that."""
    runner = _runner(tiny("llama"))
    driver = _driver(runner, CudaDevice(runtime=FakeCuda()), use_cuda_graph=False)
    forward = runner.forward

    def watched(inputs: Any) -> torch.Tensor:
        with NoHostReads():
            return forward(inputs)

    runner.forward = watched
    one = driver.submit([5, 6, 7], max_new_tokens=3, ignore_eos=True, expected=())
    driver.run()
    assert one.buffer.error is None and len(one.buffer.ids) == 3
    runner.release()
