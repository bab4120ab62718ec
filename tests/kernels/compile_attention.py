"""Compile the attention kernels for GPUs, without one. A program: where triton interprets kernels it does not compile them.

Its arguments are "all", or names of variants. Prints JSON: for each variant and architecture the bytes of shared memory and
of a thread's stack (registers that were spilled), and the arguments by whose values Triton tells compiled kernels apart.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cbengine.kernels.triton import decode, pages, tiles, varlen

ARCHITECTURES = (80, 90)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
POINTERS = dict.fromkeys(("tables", "context_lens", "query_starts", "blocks", "offsets"), "*i32")
POINTERS |= {"part_acc": "*fp32", "part_sums": "*fp32"}
STRIDES = ("q_token", "q_head", "kv_block", "kv_token", "k_token", "k_head", "v_token", "v_head")
NUMBERS = dict.fromkeys((*STRIDES, "table_stride", "num_tokens", "num_splits", "num_seqs", "window"), "i32")
NUMBERS |= {"scale": "fp32", "softcap": "fp32"}


def compile_kernel(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], tile: tiles.Tile, arch: int) -> dict:
    """What came out, with every stride and address divisible by 16, as they are in an engine."""
    signature, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else POINTERS.get(name) or NUMBERS.get(name) or "*" + NAMES[dtype]
        signature[name] = kind
        if name in STRIDES or (kind.startswith("*") and not kernel.params[i].do_not_specialize_on_alignment):
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, divisible)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=tile.options)
    return {"shared": made.metadata.shared, "stack": stack_bytes(made.asm["cubin"]), "specialized": specialized(kernel)}


def stack_bytes(cubin: bytes) -> int:
    """Bytes of local memory that a thread has, as the tool that comes with triton reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", shown))


def specialized(kernel: Any) -> list[str]:
    """Numbers and addresses whose values select another compiled kernel."""
    number = [p.name for p in kernel.params if p.name in NUMBERS and not p.do_not_specialize]
    address = [p.name for p in kernel.params if p.name in POINTERS and not p.do_not_specialize_on_alignment]
    return [name for name in (*number, *address) if name not in ("scale", "softcap", "part_acc", "part_sums")]


def attention(kind: str, dtype: torch.dtype, dim: int, page: int, flags: str) -> tuple[Any, dict[str, Any], tiles.Tile]:
    """Eight KV heads of four query heads. `flags` of w(indow), c(ap), s(inks), and p for the kernel that leaves parts."""
    group = 4
    constants: dict[str, Any] = {
        "G": group,
        "D": dim,
        "D_PAD": tiles.padded_dim(dim),
        "ROW": 8 * group * dim,
        "PAGE": page,
    }
    constants |= {"HAS_WINDOW": "w" in flags, "HAS_SOFTCAP": "c" in flags, "HAS_SINKS": "s" in flags, "UPCAST": False}
    if kind == "decode":
        tile = tiles.decode_tile(dtype, dim, group)
        constants["SPLIT"] = "p" in flags
    else:
        tile = tiles.varlen_tile(dtype, dim, group)
    constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.tokens}
    return decode.decode_kernel if kind == "decode" else varlen.varlen_kernel, constants, tile


def variants() -> dict[str, tuple[Any, torch.dtype, dict[str, Any], tiles.Tile]]:
    """Every variant by its name, such as "decode bf16 128 256 wcs"."""
    found = {}
    dims, sizes = (64, 80, 96, 128, 256), (48, 256)  # one entry of the table for each token, and for each tile
    for kind, flags in (("decode", "-"), ("decode", "wcs"), ("decode", "wcsp"), ("varlen", "-"), ("varlen", "wcs")):
        for dtype, dim, page in itertools.product(NAMES, dims, sizes):
            kernel, constants, tile = attention(kind, dtype, dim, page, flags)
            found[f"{kind} {NAMES[dtype]} {dim} {page} {flags}"] = (kernel, dtype, constants, tile)
    for dim in dims:
        constants = {"D": dim, "D_PAD": tiles.padded_dim(dim), "ROW": 32 * dim, "CHUNK": tiles.MERGE.tokens}
        merge = (decode.merge_kernel, torch.bfloat16, {**constants, "HAS_SINKS": True}, tiles.MERGE)
        found[f"merge {dim}"] = merge
        constants = {"HEADS": 8, "D": dim, "WIDTH_PAD": tiles.power_of_two(8 * dim)}
        found[f"write {dim}"] = (pages.write_kernel, torch.bfloat16, constants, tiles.Tile(1, 1, 4, 2))
    return found


def main() -> None:
    """Compile what the arguments name: "all", or variants, each with its architectures behind an @ if not for all."""
    known = variants()
    wanted = [f"{name}@{arch}" for name in known for arch in ARCHITECTURES] if sys.argv[1:] == ["all"] else sys.argv[1:]
    found = []
    for each in wanted:
        name, arch = each.rsplit("@", 1)
        found.append({"name": name, "arch": int(arch), **compile_kernel(*known[name], int(arch))})
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
