"""An engine that runs leaves the process as it found it: no loop policy, no signal handler, no environment variable."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.project.source import ROOT

# Runs in a fresh interpreter. What torch itself changes when it computes for the first time is done beforehand.
SCRIPT = """
import asyncio, gc, json, logging, os, signal, sys, threading, warnings
import torch
import cbengine
from cbengine.testing import FakeModel

# asyncio's own handler of Ctrl-C comes and goes with the main task.
SIGNALS = sorted(signal.valid_signals() - {signal.SIGINT})

def state():
    return {
        "event loop policy": repr(getattr(asyncio.events, "_event_loop_policy", None)),
        "signal handlers": [repr(signal.getsignal(s)) for s in SIGNALS],
        "environment": dict(os.environ),
        "torch RNG": torch.get_rng_state().tolist()[:64],
        "torch defaults": [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
                           torch.is_inference_mode_enabled()],
        "garbage collector": [gc.isenabled(), *gc.get_threshold(), gc.get_freeze_count()],
        "hooks": [repr(h) for h in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "logging": [repr(logging.root.handlers), logging.root.level],
        "warning filters": repr(warnings.filters),
        "switch interval": sys.getswitchinterval(),
        "threads": sorted(t.name for t in threading.enumerate()),
    }

def differences(before, after):
    return {key: [str(before[key]), str(after[key])] for key in before if before[key] != after[key]}

async def nothing():
    return state()

async def use(engine):
    async with engine:
        streams = [engine.stream("hello", max_new_tokens=20, temperature=1.0, ignore_eos=True) for _ in range(8)]
        await streams[0].__anext__()
        during = state()
        for stream in streams:
            await stream.result()
    return during

torch.ones(4).softmax(0)
asyncio.run(nothing())  # sets the policy that asyncio goes by
before = state()
without = asyncio.run(nothing())
during = asyncio.run(use(cbengine.AsyncEngine(FakeModel())))
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join(10)  # it has said that it ends; this is the moment until it has
print(json.dumps({"during": differences(without, during), "after": differences(before, state())}))
"""


@pytest.fixture(scope="module")
def effects() -> dict[str, Any]:
    """What is different while an engine runs, and after it was closed."""
    command = [sys.executable, "-W", "ignore", "-W", "default::ResourceWarning", "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_running_engine_has_threads_and_a_short_switch_interval(effects: dict[str, Any]) -> None:
    assert sorted(effects["during"]) == ["switch interval", "threads"]


def test_a_closed_engine_leaves_nothing(effects: dict[str, Any]) -> None:
    assert effects["after"] == {}
