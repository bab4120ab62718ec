"""What the Triton attention kernels compile to, for GPUs that need not be there (see `compile_attention.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
"""Bytes that one program may have on an A100 and on an H200."""
STACK = {80: 320, 90: 32}
"""Bytes of registers that a thread may spill: what `tiles.py` says of each."""
FIXED = {"q_token", "q_head", "kv_block", "kv_token", "k_token", "k_head", "v_token", "v_head"}
"""Numbers that are the same in every step of a model."""


def compiled(*wanted: str, timeout: float) -> list[dict[str, Any]]:
    """Compile in a fresh interpreter of Python: in this one Triton may be interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(Path(__file__).with_name("compile_attention.py")), *wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: list[dict[str, Any]]) -> None:
    for kernel in found:
        arch = kernel["arch"]
        assert 0 <= kernel["shared"] <= SHARED_MEMORY[arch], kernel
        assert kernel["stack"] <= STACK[arch], kernel
        assert set(kernel["specialized"]) <= FIXED, kernel  # nothing that varies from step to step is compiled in


@pytest.mark.timeout(300)
def test_compiled_for_gpus() -> None:
    wanted = [
        "decode bf16 128 256 -@90",
        "decode bf16 80 48 wcsp@90",
        "varlen bf16 128 48 wcs@90",
        "varlen fp16 64 48 -@80",
        "merge 128@90",
        "write 128@90",
    ]
    found = compiled(*wanted, timeout=280)
    check(found)
    assert [f"{kernel['name']}@{kernel['arch']}" for kernel in found] == wanted
    # Two tiles of keys and of values in flight, which is what five stages are for.
    assert found[0]["shared"] >= 4 * 64 * 128 * 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_variant_is_compiled_for_gpus() -> None:
    found = compiled("all", timeout=7000)
    check(found)
    assert len(found) == 2 * (5 * 3 * 5 * 2 + 10)
