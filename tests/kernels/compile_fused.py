"""Compiles the fused Triton kernels for GPUs, in a process without the interpreter; needs no GPU.

With the argument "few" it compiles one kernel of each kind for one architecture, else all for all. Prints one JSON list of
[kernel, architecture, bytes of shared memory, bytes of machine code, arguments that differ from step to step and select
another compiled kernel all the same].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cbengine.kernels.triton import activation, norm, rope, sampling

ARCHITECTURES = (80, 90)
Variant = tuple[str, Any, dict[str, str], dict[str, Any]]
VARYING = {
    "slots": ("tokens", "seqs", "width", "table_stride", "starts_ptr", "positions_ptr", "tables_ptr", "offsets_ptr"),
    "rope": ("blocks_ptr", "offsets_ptr"),
    "sampling": ("temperature_ptr", "min_p_ptr", "uniform_ptr", "logits_ptr"),
}
"""By the first word of a kernel's name: numbers, and addresses that may be any multiple of 4."""


def join_variant(name: str, dtype: str, width: int, **flags: Any) -> Variant:
    constants = {
        f"{side}{flag}": False
        for side in ("AFTER", "BEFORE")
        for flag in ("", "_WEIGHT", "_SHIFT", "_FIRST", "_CENTER")
    }
    pointers = dict.fromkeys(("residual_ptr", "x_ptr", "after_ptr", "before_ptr", "total_ptr", "out_ptr"), f"*{dtype}")
    numbers = {"x_stride": "i32", "out_stride": "i32", "after_eps": "fp32", "before_eps": "fp32", "width": "i32"}
    block = triton.next_power_of_2(width)
    return (name, norm._join_kernel, {**pointers, **numbers}, {**constants, "ADD": True, "BLOCK": block, **flags})


def rope_variant(name: str, dtype: str, angles: str, shape: tuple[int, int, int, int], **flags: Any) -> Variant:
    queries, keys, dim, rotary = shape
    half_block = triton.next_power_of_2(rotary // 2)
    pointers = dict.fromkeys(
        ("qkv_ptr", "query_norm_ptr", "key_norm_ptr", "query_ptr", "key_ptr", "value_ptr"), f"*{dtype}"
    )
    pointers |= {"cos_ptr": f"*{angles}", "sin_ptr": f"*{angles}", "blocks_ptr": "*i32", "offsets_ptr": "*i32"}
    numbers = dict.fromkeys(("qkv_stride", "angle_stride", "block_stride", "page_stride", "head_stride"), "i32")
    numbers |= dict.fromkeys(("query_eps", "key_eps", "clip"), "fp32")
    rest = dim - rotary
    constants = {
        **dict.fromkeys(("CLIP", "NORM", "SHIFT", "FIRST"), False),
        "QUERIES": queries,
        "KEYS": keys,
        "DIM": dim,
        "HALF": rotary // 2,
        "HALF_BLOCK": half_block,
        "ROUND": angles == dtype != "fp32",
        "HEADS_BLOCK": min(triton.next_power_of_2(queries + 2 * keys), max(1, 1024 // half_block)),
        "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0,
    }
    return (name, rope._rope_kernel, {**pointers, **numbers}, {**constants, **flags})


def sampling_variants() -> list[Variant]:
    """A vocabulary of 151,936."""
    types = dict.fromkeys(
        ("temperature_ptr", "min_p_ptr", "uniform_ptr", "best_ptr", "scores_ptr", "score_ptr"), "*fp32"
    )
    types |= dict.fromkeys(("keys_ptr", "index_ptr", "token_ptr", "out_ptr"), "*i32")
    types |= {"logits_ptr": "*bf16", "weights_ptr": "*fp64", "sums_ptr": "*fp64", "shift": "fp32"}
    kernels = {
        "best": (sampling._best_kernel, {"SPLITS": 32, "TILE": 1024}),
        "pick": (sampling._pick_kernel, {"SPLITS": 32}),
        "weigh": (sampling._weigh_kernel, {"MIN_P": True, "STORE": True, "SIZE": 1024}),
        "draw": (sampling._draw_kernel, {"MIN_P": True, "STORED": False, "SIZE": 1024, "BLOCKS": 256}),
    }
    return [
        (f"sampling {name}", kernel, {key: types.get(key, "i32") for key in kernel.arg_names}, constants)
        for name, (kernel, constants) in kernels.items()
    ]


def variants() -> list[Variant]:
    """The shapes of Llama-3-8B, Qwen3, Gemma 3, Phi-3 and OLMo."""
    llama = {"BEFORE": True, "BEFORE_WEIGHT": True, "BEFORE_FIRST": True}
    gemma = {f"{side}{flag}": True for side in ("AFTER", "BEFORE") for flag in ("", "_WEIGHT", "_SHIFT")}
    slots = dict.fromkeys(("starts_ptr", "positions_ptr", "tables_ptr", "blocks_ptr", "offsets_ptr"), "*i32")
    slots |= dict.fromkeys(("tokens", "seqs", "width", "table_stride"), "i32")
    gated = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32", "width": "i32"}
    return [
        join_variant("join llama bf16", "bf16", 4096, **llama),
        join_variant("join gemma fp32", "fp32", 2560, **gemma),
        join_variant("join olmo fp16", "fp16", 8192, BEFORE=True, BEFORE_CENTER=True),
        rope_variant("rope llama bf16", "bf16", "bf16", (32, 8, 128, 128)),
        rope_variant("rope qwen3 bf16", "bf16", "bf16", (16, 8, 128, 128), NORM=True, FIRST=True),
        rope_variant("rope gemma fp32", "fp32", "fp32", (4, 1, 256, 256), NORM=True, SHIFT=True),
        rope_variant("rope phi fp16", "fp16", "fp16", (24, 8, 128, 96)),
        rope_variant("rope olmo bf16", "bf16", "fp32", (32, 32, 128, 128), CLIP=True),
        ("slots", rope._slots_kernel, slots, {"PAGE": 256, "RESERVED": 1, "BLOCK": 128}),
        *((f"gated {kind}", activation._gated_kernel, gated, {"KIND": kind, "BLOCK": 1024}) for kind in range(3)),
        *sampling_variants(),
    ]


def told_apart(name: str, kernel: Any) -> list[str]:
    """What varies and is compiled in: under load, a step with another value would wait for a compilation."""
    found = []
    for parameter in kernel.params:
        if parameter.name in VARYING.get(name.split()[0], ()):
            address = parameter.name.endswith("_ptr")
            free = parameter.do_not_specialize_on_alignment if address else parameter.do_not_specialize
            found += [] if free else [parameter.name]
    return found


FEW = ("join llama bf16", "rope qwen3 bf16", "slots", "gated 0", "sampling draw")


def main(few: bool) -> None:
    """Compile, and print what came out."""
    found = []
    for name, kernel, arguments, constants in variants():
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        for architecture in ARCHITECTURES[few:] if name in FEW or not few else ():
            source = ASTSource(kernel, {key: signature[key] for key in kernel.arg_names}, constants)
            made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
            code = len(made.asm["cubin"])
            found.append([name, architecture, made.metadata.shared, code, told_apart(name, kernel)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] == ["few"])
