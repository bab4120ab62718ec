"""Which backend serves a model, and what is said where one does not."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from cbengine import EngineConfig
from cbengine.attention import AttentionSettings, available, choose
from cbengine.attention import base as attention_base
from cbengine.attention import flash as attention_flash
from cbengine.attention import torch_native as attention_torch
from cbengine.attention import triton as attention_triton
from cbengine.attention.cpu import CpuBackend
from cbengine.attention.eager import EagerBackend
from cbengine.attention.flash import Flash2Backend, Flash3Backend, FlashBackend
from cbengine.attention.sdpa import SdpaBackend
from cbengine.attention.settings import DEFAULT_BLOCKS_PER_REQUEST, DecodeWidth
from cbengine.cache.sizing import plan_memory
from cbengine.devices.base import MemoryInfo
from cbengine.errors import InvalidRequestError, UnsupportedFeatureError
from cbengine.models.adapter import TransformersRunner
from cbengine.models.base import LayerSpec, ModelSpec
from tests.models.tiny import tiny
from tests.support.flash_double import HALF, install

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def spec(window: int | None = None, dtype: torch.dtype = torch.float32, dim: int = 8) -> ModelSpec:
    kind = "full_attention" if window is None else "sliding_attention"
    layers = (LayerSpec(kind, 1, dim, window),)
    return ModelSpec("toy", layers, 1, 8, 8, 16, 64, dtype, 0, (), {})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200 and both versions of FlashAttention, as far as the choice can see."""
    install(monkeypatch)
    device_of(monkeypatch, (9, 0))


def device_of(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    for module in (attention_base, attention_flash, attention_torch, attention_triton):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability, raising=False)


def test_on_a_cpu() -> None:
    assert available() == ["cpu", "eager", "flash2", "flash3", "sdpa", "torch", "triton"]
    assert isinstance(choose(None, CPU, spec()), CpuBackend)
    half = replace(spec(), kv_dtype=torch.bfloat16)
    assert isinstance(choose(None, CPU, half), SdpaBackend)
    with pytest.raises(
        UnsupportedFeatureError, match=r"'cpu' cannot serve toy on cpu: it computes in float32, not in bfloat16"
    ):
        choose("cpu", CPU, half)
    assert isinstance(choose("eager", CPU, spec(7)), EagerBackend)
    assert choose("sdpa", CPU, spec()) is not choose("sdpa", CPU, spec())
    with pytest.raises(InvalidRequestError, match=r"unknown attention backend 'flash'.*cpu, eager, flash2, flash3"):
        choose("flash", CPU, spec())
    with pytest.raises(
        UnsupportedFeatureError, match=r"'flash2' cannot serve toy on cpu: it runs on cuda, not on cpu.*use one of"
    ):
        choose("flash2", CPU, half)


def test_what_the_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SdpaBackend, "supports_window", False)
    assert isinstance(choose("sdpa", CPU, spec()), SdpaBackend)
    with pytest.raises(UnsupportedFeatureError, match=r"has no sliding window; use one of cpu, eager"):
        choose("sdpa", CPU, spec(7))


BF16 = spec(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "model", "chosen", "reasons"),
    [
        (AttentionSettings(), BF16, "flash3", []),
        (AttentionSettings(auto_switch_to_flash=False), BF16, "torch", []),
        (AttentionSettings("flash_attention_2"), BF16, "flash2", []),
        (AttentionSettings("paged|flash_attention_3"), BF16, "flash3", []),
        (AttentionSettings(page_size=16), BF16, "flash3", []),
        (AttentionSettings(), replace(BF16, softcap=30.0), "flash3", []),
        (AttentionSettings("sdpa"), replace(BF16, softcap=30.0), "sdpa", []),
        (AttentionSettings(), replace(spec(dim=512), kv_dtype=torch.float16), "sdpa", ["multiple of 8 up to 256, not 512"]),
    ],
)  # fmt: skip
def test_on_a_hopper(
    hopper: None,
    caplog: pytest.LogCaptureFixture,
    settings: AttentionSettings,
    model: ModelSpec,
    chosen: str,
    reasons: list[str],
) -> None:
    with caplog.at_level(logging.INFO, "cbengine"):
        assert choose(settings, CUDA, model).name == chosen
    for reason in reasons:
        assert reason in caplog.text


def test_older_devices_and_smaller_pages(
    hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device_of(monkeypatch, (8, 0))
    with caplog.at_level(logging.INFO, "cbengine"):
        assert choose(None, CUDA, BF16).name == "flash2"
    assert "toy: not attention backend 'flash3', which is not for devices of compute capability 8.0" in caplog.text
    with pytest.raises(UnsupportedFeatureError, match=r"a multiple of 256 tokens, not of 16: leave page_size out"):
        choose(AttentionSettings("flash2", page_size=16), CUDA, BF16)
    with pytest.raises(UnsupportedFeatureError, match=r"not for devices of compute capability 7\.5.*use one of"):
        device_of(monkeypatch, (7, 5))
        choose("flash2", CUDA, BF16)


def test_packages_that_cannot_be_used(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there; without the functions (flash-attn-4 brings a package of that name); built for another torch; stripped."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(UnsupportedFeatureError, match="needs a newer flash-attn"):
        choose("flash2", CUDA, BF16)
    flags = {"FLASHATTENTION_DISABLE_LOCAL": True, "FLASHATTENTION_DISABLE_FP16": True}
    config = ModuleType("flash_attn_config")
    config.__dict__["CONFIG"] = {"build_flags": flags}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    assert choose(None, CUDA, BF16).name == "flash3"
    with pytest.raises(UnsupportedFeatureError, match="built without LOCAL, FP16"):
        choose("flash3", CUDA, spec(7, torch.float16))
    monkeypatch.setattr(Flash2Backend, "modules", ("cbengine_no_such_package",))
    with pytest.raises(UnsupportedFeatureError, match="needs the package flash-attn, which is not installed"):
        choose("flash2", CUDA, BF16)

    def broken(cls: type[FlashBackend]) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(Flash3Backend, "_module", classmethod(broken))
    with pytest.raises(UnsupportedFeatureError, match=r"cannot be imported .*undefined symbol"):
        choose("flash3", CUDA, BF16)


def test_sinks_and_soft_caps_of_real_configs(hopper: None) -> None:
    """What a model needs is known before the cache is made, from its config and its modules."""
    for name, softcap, sinks in (("gpt-oss", None, True), ("gemma2", 2.0, False), ("llama", None, False)):
        runner = TransformersRunner(tiny(name), attention="sdpa")
        assert (runner.spec.softcap, runner.spec.has_sinks) == (softcap, sinks)
        served = replace(runner.spec, kv_dtype=torch.bfloat16)
        assert (Flash3Backend.shortcomings(served, CUDA) == ["has no attention sinks"]) is sinks


def test_settings_of_the_engine() -> None:
    config = EngineConfig(
        attention_backend="flash2", page_size=512, auto_switch_to_flash=False, max_blocks_per_request=0, max_prompt_length=9
    )  # fmt: skip
    assert AttentionSettings.of(config) == AttentionSettings("flash2", 512, False, 0, 9)
    wrongs: list[dict[str, Any]] = [
        {"max_blocks_per_request": -1},
        {"max_prompt_length": 0},
        {"max_generated_length": 0},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least"):
            EngineConfig(**wrong)
    with pytest.raises(TypeError, match="auto_switch_to_flash must be a bool"):
        EngineConfig(auto_switch_to_flash="yes")  # type: ignore[arg-type]


def test_default_page_size_adapts_and_a_chosen_one_does_not() -> None:
    memory = MemoryInfo(1 << 30, 1 << 30)

    def page_size(**settings: Any) -> int:
        return plan_memory(spec(), EngineConfig(**settings), memory, on_cpu=True, page_size_multiple=256).page_size

    assert page_size() == 256
    assert page_size(page_size=512) == 512
    with pytest.raises(ValueError, match=r"page_size=300 does not suit.*set page_size to 256, leave it out"):
        page_size(page_size=300)


def test_width_of_the_fast_path() -> None:
    grows = DecodeWidth.of(AttentionSettings(), 256)
    assert (grows.blocks, grows.admits(32), grows.blocks) == (DEFAULT_BLOCKS_PER_REQUEST, True, 32)
    assert (grows.admits(33), grows.blocks) == (True, 64)
    hinted = DecodeWidth.of(AttentionSettings(max_prompt_length=1000, max_generated_length=100), 256)
    assert (hinted.blocks, hinted.admits(6), hinted.admits(7)) == (6, True, False)
    # One hint alone says nothing about the longest request; an explicit width counts before any.
    assert DecodeWidth.of(AttentionSettings(max_prompt_length=1000), 256).grows
    chosen = DecodeWidth.of(
        AttentionSettings(max_blocks_per_request=2, max_prompt_length=9, max_generated_length=9), 256
    )
    assert (chosen.admits(2), chosen.admits(3)) == (True, False)
    assert not DecodeWidth.of(AttentionSettings(max_blocks_per_request=0), 256).admits(1)


def test_a_width_without_a_fast_path_is_mentioned(hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    for name, blocks, mentioned in (("sdpa", 4, True), ("sdpa", 0, False), ("flash2", 4, False)):
        caplog.clear()
        choose(AttentionSettings(name, max_blocks_per_request=blocks), CUDA, BF16)
        assert ("max_blocks_per_request=4 changes nothing: attention backend 'sdpa'" in caplog.text) is mentioned


def test_declared_capabilities() -> None:
    for kind in (Flash2Backend, Flash3Backend, attention_torch.TorchBackend):
        assert kind.capturable and kind.paged_decode and kind.paged_prefill and kind.supports_window
        assert kind.dtypes == HALF and kind.devices == ("cuda",)
    assert (Flash2Backend.page_size_multiple, Flash3Backend.page_size_multiple) == (256, 1)
    assert not SdpaBackend.capturable and not EagerBackend.paged_decode
