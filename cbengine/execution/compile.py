"""What of a model goes through torch.compile: from the settings to the arguments of `torch.compile` for each kind of step.

Compiled is the forward that transformers has, in one piece, with our attention as one opaque operation in it
(`cbengine.models.compiled`), so a model that is compiled is not run by our own fused code. Steps that only decode and steps
with prompt tokens are compiled separately, each with its own arguments. All of it happens at start, on the stream that
steps run on; where shapes are dynamic, no later step compiles anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cbengine.config import EngineConfig, compile_options
from cbengine.devices.base import Device
from cbengine.errors import CBEngineError, UnsupportedFeatureError
from cbengine.models.base import ModelRunner

# As in transformers: 2 and 3 try kernels out, and 3 makes one program for each shape.
LEVELS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"dynamic": True, "mode": "default"},
    {"dynamic": True, "mode": "max-autotune-no-cudagraphs"},
    {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
)
# Inductor's own CUDA graphs would be replayed within ours, and belong to the thread that made them.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """Arguments of `torch.compile` for steps with prompt tokens and for steps that only decode; None: not compiled."""

    varlen: dict[str, Any] | None
    decode: dict[str, Any] | None

    @classmethod
    def of(cls, config: EngineConfig) -> CompilePlan | None:
        """A path's own config, or else what the level says; None if nothing is to be compiled."""
        level = LEVELS[config.default_compile_level]
        paths = (config.varlen_compile_config, config.decode_compile_config)
        varlen, decode = (level if own is None else _without_graphs(compile_options(own)) for own in paths)
        return None if varlen is decode is None else cls(varlen, decode)


def _without_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same without inductor's CUDA graphs; those of the engine are `use_cuda_graph`'s."""
    changed = {name: value for name, value in options.items() if value is not None}
    if "mode" in changed:
        changed["mode"] = _WITHOUT_GRAPHS.get(changed["mode"], changed["mode"])
    if changed.get("options", {}).get("triton.cudagraphs"):
        changed["options"] = {**changed["options"], "triton.cudagraphs": False}
    return changed


def prepare(config: EngineConfig, runner: ModelRunner) -> bool:
    """Tell the runner what to compile; before `bind`. Whether there is anything.

    Raises:
        UnsupportedFeatureError: the runner has no forward that could be compiled.
    """
    plan = CompilePlan.of(config)
    compile_with = getattr(runner, "compile_with", None)
    if compile_with is not None:
        compile_with(*((None, None) if plan is None else (plan.varlen, plan.decode)))
    elif plan is not None:
        raise UnsupportedFeatureError(
            f"default_compile_level={config.default_compile_level}: {type(runner).__name__} has nothing to compile; models of "
            "transformers have. Leave default_compile_level, varlen_compile_config and decode_compile_config out"
        )
    return plan is not None


def warm_up(runner: Any, device: Device) -> None:
    """Compile everything, on the stream that steps run on. After `bind`; blocks for seconds, or minutes at levels 2 and 3.

    Raises:
        UnsupportedFeatureError: the model cannot be compiled that way, `__cause__` says why.
    """
    compute, done = device.stream("compute"), device.event("compiled")
    device.launch(compute, runner.warm_up, name="compile")
    device.record(done, compute)
    try:
        done.synchronize()
    except (CBEngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
        raise UnsupportedFeatureError(
            f"{runner.spec.name} could not be compiled ({type(error).__name__}: {said}); set default_compile_level=0 and "
            "leave varlen_compile_config and decode_compile_config out, or try another backend or fullgraph=False there"
        ) from error
