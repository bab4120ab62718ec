"""Engine-wide settings. Everything about one request is in `SamplingParams` or an argument of `stream`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

MIN_BATCH_TOKENS = 256
"""An inferred token budget never goes under this; an explicit one may."""

SCHEDULERS = ("fifo", "prefill_first")
ADMISSION = ("optimistic", "reserve")
PREEMPTION = ("auto", "swap", "recompute")
QUANTIZATION = ("int8",)
BACKPRESSURE = ("buffer", "pause", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of the engine, with its default. `None` means "found out at start"; `engine.config` then has it.

    Raises:
        ValueError: a value is outside what its field allows.
        TypeError: a value has the wrong type.
    """

    # --- the model -------------------------------------------------------------------------------------------------
    dtype: str | None = None
    """Weights and KV: "float32", "bfloat16", "float16" or "auto" (the checkpoint's). Default: float32 on a CPU, else "auto"."""
    device: str | None = None
    """"cpu", "cuda" (the first GPU) or "cuda:N". Default: where a model is that was built already, else the first GPU, else the
    CPU."""
    quantization: str | None = None
    """"int8": a CPU multiplies whole numbers of 8 bits in all linear layers, the output matrix among them: weights with a
    scale for each output, activations with one for each 64 elements, found anew for every token. All else stays float32:
    embedding, norms, attention, keys and values. It is not token-exact: on Python's documentation perplexity grows by 1.1 %
    (SmolLM2 135M; Gemma 3 270M: 0.5 %) and the likeliest next token is the same for 94 % (95 %) of the positions. For
    float32 models that the CPU kernels run as a whole; else an error says why. Their weights are dropped once they are
    quantised. None (default): no quantisation beyond the checkpoint's own."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together, in tokens. Default and upper bound: what the model was made for."""
    attention_backend: str | None = None
    """"flash3" and "flash2" (FlashAttention, where the package is installed; also by their names in transformers),
    "torch" (torch's own kernel over pages, from torch 2.12 on), "triton" (our own), all on CUDA; "cpu" (our own, float32);
    "sdpa" (gathers pages, anywhere) and "eager" (the slow reference). Default: the first of these that serves this model on
    this device; the log says why others do not. One that is named and cannot is an error."""
    auto_switch_to_flash: bool = True
    """Whether "flash3" and "flash2" are chosen where `attention_backend` is not set."""
    max_blocks_per_request: int | None = None
    """Decoding steps in which no request has more blocks take FlashAttention's fast path, which appends keys and values
    and attends in one kernel; others are computed like prefills. 0 turns it off. Default: enough for the longest request by
    the two hints that follow; without hints 32, growing."""
    max_prompt_length: int | None = None
    """A hint, in tokens: the longest prompt to be expected. Longer ones are served all the same."""
    max_generated_length: int | None = None
    """A hint, in tokens: the longest answer to be expected. Longer ones are served all the same."""

    # --- the cache -------------------------------------------------------------------------------------------------
    page_size: int | None = None
    """Tokens of one layer in a page, at least 4. Default: 256, and 32 on a CPU, where small pages cost nothing: requests share
    more of a common beginning, and a short one takes less memory."""
    num_blocks: int | None = None
    """Cache size in blocks (a block = one page for each layer). Default: from free memory."""
    max_memory_percent: float | None = None
    """Share of the free memory that the engine may take for cache and workspace, in (0, 1]. Default on a CPU: a quarter,
    and no more than 2 GiB, so that it starts on a laptop beside everything else; on a GPU: 0.9."""

    allow_block_sharing: bool = True
    """The prefix cache: pages that were computed once are used again by every request that begins with the same tokens
    (and has the same `cache_salt`). Only where all layers have full attention; a log line says so where it is off."""
    admission: str = "optimistic"
    """When a waiting request is let in: "optimistic" when its known tokens fit (it may have to give way later, see
    `preemption`), "reserve" when its longest possible answer fits too, so that nobody ever gives way."""
    preemption: str = "auto"
    """What becomes of a request that has to give its pages up for a while: "swap" copies them to the CPU pool and back,
    "recompute" computes them again, "auto" does what is cheaper by what both took lately. Without a CPU pool, or where it
    is full, they are computed again."""
    cpu_offload_space: float | None = 0.0
    """Size of the CPU pool for swapping, in GiB; 0 = none. None: `cpu_offload_space_safety_threshold` of the free RAM."""
    cpu_offload_space_safety_threshold: float = 0.8
    """Share of the free RAM that the CPU pool may take, in (0, 1]."""

    # --- the batch -------------------------------------------------------------------------------------------------
    max_batch_tokens: int | None = None
    """Query tokens in one step; a longer prompt is split over steps. Default: 8,192, or less where memory is short; on a CPU
    512, which keeps a step (and so the wait of everyone who decodes) short."""
    prefill_chunk: int | None = None
    """Most prompt tokens in a step that others decode in, the longer their context the fewer: it bounds how much a newcomer's
    prompt stretches the time between their tokens. For "fifo"; a step without decoding requests takes `max_batch_tokens`.
    Default: elsewhere than on a CPU `max_batch_tokens`; there it goes by who is held up and who waits: a whole prompt beside
    one or two that decode, 24 tokens beside sixteen, 1.5 for each in a crowd, up to 4 for each while many wait to be let in."""
    max_requests_per_batch: int | None = None
    """Requests in one step. Default: 1,024, on a CPU 256. Never more than `max_batch_tokens`."""
    scheduler_type: str = "fifo"
    """"fifo": decoding, then prefilling, then waiting, each by arrival. "prefill_first": prefills before decodes."""
    safety_margin: float | None = None
    """Share of the cache that must still be free *after* a waiting request has been let in beside running ones, in [0, 1]: room
    for those who run to grow, so that they rarely have to give way. A request that finds nobody running is let in all the
    same. Default: 0.15 for "fifo", 0.0 for "prefill_first"."""
    use_async_batching: bool | None = None
    """Two steps in flight: the next batch is prepared while the device computes this one. Default: yes."""

    # --- graphs ----------------------------------------------------------------------------------------------------
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    """Whether steps are replayed from CUDA graphs, which spares the host the launching of a model's kernels: for all steps, or
    separately for those with prompt tokens and those that only decode: (varlen, decode). Default: on a GPU, if the attention
    backend can be captured. On a CPU there are no graphs: True pads and checks as if there were, which is for tests."""
    q_padding_interval_size: int = 0
    """Steps with prompt tokens are padded up to a multiple of so many tokens, to fit a captured shape. 0: 64. Any other value
    asks for graphs."""
    kv_padding_interval_size: int = 0
    """Block tables of captured shapes reach to a multiple of so many tokens of context. 0: 16,384. Any other value asks for
    graphs."""
    max_cached_graphs: int = 64
    """Most shapes that are captured, all at start; a step that fits none of them runs without a graph."""

    # --- compiling -------------------------------------------------------------------------------------------------
    default_compile_level: int = 0
    """How far the model goes through `torch.compile`: 0 not at all, 1 once for all shapes, 2 as 1 and with the fastest of
    several kernels (minutes at start), 3 as 2 and for each padded shape (powers of two) when it is first met. What is compiled
    is transformers' own code: it then runs in place of this package's fused code, which on a CPU is faster."""
    varlen_compile_config: Any = None
    """For steps with prompt tokens, instead of the level: arguments of `torch.compile` (fullgraph, dynamic, backend, mode,
    options), as a mapping or as transformers' `CompileConfig`. Modes with CUDA graphs are taken without them: see
    `use_cuda_graph`."""
    decode_compile_config: Any = None
    """Likewise for steps that only decode."""

    # --- the queue -------------------------------------------------------------------------------------------------
    max_queue_size: int = 0
    """Most requests that may wait to be scheduled for the first time; then `QueueFullError`. 0 = no limit."""
    max_queued_tokens: int = 0
    """Most prompt tokens that may wait likewise. 0 = no limit."""

    # --- the readers -----------------------------------------------------------------------------------------------
    backpressure: str = "buffer"
    """When a reader falls behind: "buffer" lets its tokens wait in its stream (they are bounded by `max_new_tokens`, and
    the pages are free as soon as the answer ends), "pause" stops scheduling it at `stream_buffer` unread tokens until it
    reads on, "abort" ends it there. A request may choose its own."""
    stream_buffer: int = 64
    """Unread tokens at which "pause" and "abort" act. A few more may come: those of the steps in flight."""

    # --- the rest --------------------------------------------------------------------------------------------------
    seed: int | None = None
    """Makes requests that bring no seed of their own reproducible: the n-th request of an engine then always draws the
    same. Default: every request draws anew."""
    return_logprobs: bool = False
    """Report the log probability of each token of every answer, not only of those whose request asks for it (`logprobs`)."""
    per_request_processors: bool = True
    """Each request has its own sampling parameters. That is always so; both values are taken, so that scripts written for
    transformers, where it has to be asked for, need no change."""
    num_threads: int | None = None
    """Threads for one operation on a CPU. Default: torch's own choice."""

    def __post_init__(self) -> None:
        for name in ("dtype", "device", "attention_backend"):
            _check(isinstance(getattr(self, name), (str, type(None))), TypeError, name, self, "a string or None")
        kinds = (None, *QUANTIZATION)
        _check(self.quantization in kinds, ValueError, "quantization", self, f"None or {', '.join(QUANTIZATION)}")
        _integer(self, "page_size", 4, optional=True)
        for name in (
            "max_model_len",
            "num_blocks",
            "max_batch_tokens",
            "prefill_chunk",
            "max_requests_per_batch",
            "num_threads",
        ):
            _integer(self, name, 1, optional=True)
        _check_attention(self)
        _check_graphs(self)
        most = 8 * (os.cpu_count() or 8)
        few = self.num_threads is None or self.num_threads <= most
        _check(few, ValueError, "num_threads", self, f"at most {most}, eight for each core of this machine")
        _integer(self, "seed", 0, optional=True)
        _integer(self, "max_queue_size", 0)
        _integer(self, "max_queued_tokens", 0)
        _integer(self, "stream_buffer", 1)
        _check(self.stream_buffer <= sys.maxsize, ValueError, "stream_buffer", self, f"at most {sys.maxsize}")
        _check(self.backpressure in BACKPRESSURE, ValueError, "backpressure", self, f"one of {', '.join(BACKPRESSURE)}")
        _check(self.allow_block_sharing in (True, False), TypeError, "allow_block_sharing", self, "a bool")
        _check(self.admission in ADMISSION, ValueError, "admission", self, f"one of {', '.join(ADMISSION)}")
        _check(self.preemption in PREEMPTION, ValueError, "preemption", self, f"one of {', '.join(PREEMPTION)}")
        space = self.cpu_offload_space
        if space is not None:
            _check(_is_number(space) and space >= 0, ValueError, "cpu_offload_space", self, "at least 0 (GiB), or None")
        share = self.cpu_offload_space_safety_threshold
        _check(
            _is_number(share) and 0 < share <= 1, ValueError, "cpu_offload_space_safety_threshold", self, "in (0, 1]"
        )
        percent = self.max_memory_percent
        if percent is not None:
            _check(_is_number(percent) and 0 < percent <= 1, ValueError, "max_memory_percent", self, "in (0, 1]")
        margin = self.safety_margin
        if margin is not None:
            _check(_is_number(margin) and 0 <= margin <= 1, ValueError, "safety_margin", self, "in [0, 1]")
        _check(self.scheduler_type in SCHEDULERS, ValueError, "scheduler_type", self, f"one of {', '.join(SCHEDULERS)}")
        fits = self.prefill_chunk is None or self.scheduler_type == "fifo"
        _check(fits, ValueError, "prefill_chunk", self, 'left out unless scheduler_type is "fifo"')
        _check(self.use_async_batching in (True, False, None), TypeError, "use_async_batching", self, "a bool or None")
        for name in ("return_logprobs", "per_request_processors"):
            _check(isinstance(getattr(self, name), bool), TypeError, name, self, "a bool")

    def merged(self, overrides: Mapping[str, Any]) -> EngineConfig:
        """A copy with some fields replaced. Raises `TypeError` for a setting that does not exist."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise TypeError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return replace(self, **overrides) if overrides else self

    @property
    def margin(self) -> float:
        """`safety_margin` with its default."""
        if self.safety_margin is not None:
            return self.safety_margin
        return 0.15 if self.scheduler_type == "fifo" else 0.0


_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_COMPILE_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fullgraph": (lambda value: isinstance(value, bool), "a bool"),
    "dynamic": (lambda value: isinstance(value, (bool, type(None))), "a bool or None"),
    "backend": (lambda value: isinstance(value, str) or callable(value), "a backend's name or a callable"),
    "mode": (lambda value: value is None or value in _COMPILE_MODES, f"one of {', '.join(_COMPILE_MODES)}, or None"),
    "options": (lambda value: isinstance(value, (Mapping, type(None))), "a mapping or None"),
}


def compile_options(config: Any, name: str = "the compile config") -> dict[str, Any]:
    """The arguments of `torch.compile` that a mapping, or an object like transformers' `CompileConfig`, holds.

    Raises:
        TypeError: it is neither.
        ValueError: an argument that does not exist, or has a value that it cannot have. `mode` and `options` exclude each
            other; of a `CompileConfig`, whose mode always has a value, `options` count.
    """
    given: dict[str, Any]
    if isinstance(config, Mapping):
        given = {str(option): value for option, value in cast("Mapping[Any, Any]", config).items()}
    else:
        given = {option: getattr(config, option) for option in _COMPILE_OPTIONS if hasattr(config, option)}
        if not given:
            raise TypeError(f"{name} must be a mapping, transformers' CompileConfig or None, got {config!r}")
        if given.get("options") is not None:
            given.pop("mode", None)
    unknown = sorted(set(given) - set(_COMPILE_OPTIONS))
    if unknown:
        raise ValueError(f"{name} has {', '.join(unknown)}; torch.compile takes {', '.join(_COMPILE_OPTIONS)}")
    for option, value in given.items():
        fits, allowed = _COMPILE_OPTIONS[option]
        if not fits(value):
            raise ValueError(f"{option} in {name} must be {allowed}, got {value!r}")
    if given.get("mode") is not None and given.get("options") is not None:
        raise ValueError(f"{name} has both mode and options; torch.compile takes one of them")
    return given


def _check_attention(config: EngineConfig) -> None:
    name = "auto_switch_to_flash"
    _check(isinstance(getattr(config, name), bool), TypeError, name, config, "a bool")
    _integer(config, "max_blocks_per_request", 0, optional=True)
    for name in ("max_prompt_length", "max_generated_length"):
        _integer(config, name, 1, optional=True)


def _check_graphs(config: EngineConfig) -> None:
    _integer(config, "q_padding_interval_size", 0)
    _integer(config, "kv_padding_interval_size", 0)
    _integer(config, "max_cached_graphs", 1)
    name = "use_cuda_graph"
    graph = getattr(config, name)
    _check(
        graph is None or isinstance(graph, bool) or graph in [(a, b) for a in (True, False) for b in (True, False)],
        TypeError,
        name,
        config,
        "a bool, a pair of bools (varlen, decode) or None",
    )
    _integer(config, "default_compile_level", 0)
    _check(config.default_compile_level <= 3, ValueError, "default_compile_level", config, "0, 1, 2 or 3")
    for name in ("varlen_compile_config", "decode_compile_config"):
        if getattr(config, name) is not None:
            compile_options(getattr(config, name), name)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(ok: bool, error: type[Exception], name: str, config: EngineConfig, allowed: str) -> None:
    if not ok:
        raise error(f"{name} must be {allowed}, got {getattr(config, name)!r}")


def _integer(config: EngineConfig, name: str, low: int, *, optional: bool = False) -> None:
    value: object = getattr(config, name)
    if value is None and optional:
        return
    kind = "an integer or None" if optional else "an integer"
    integer = value if isinstance(value, int) and not isinstance(value, bool) else None
    _check(integer is not None, TypeError, name, config, kind)
    _check(integer is not None and integer >= low, ValueError, name, config, f"at least {low}")
