"""Programs that use the engine, run as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.project.source import ROOT

NOISE = (
    "never retrieved",
    "never awaited",
    "Exception ignored",
    "Task was destroyed",
    "Fatal Python error",
    "engine died",
    "cleaning up failed",
    "ResourceWarning",
    "RuntimeWarning",
    "terminate called",
)
"""What nobody wants to read when a program ends."""

HEADER = """
import atexit, threading, time

def at_the_very_end():
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("cbengine-")]
    print("ended", time.monotonic(), *left, flush=True)

# The first to register is the last to run: everybody else has cleaned up by then, and the interpreter takes itself down.
atexit.register(at_the_very_end)
import asyncio, sys
from cbengine import AsyncEngine
from cbengine.testing import FakeModel

PROMPT = list(range(2, 12))

def new_engine(**model):
    return AsyncEngine(FakeModel(**model), page_size=16, num_blocks=2000)

async def read(engine, number=0):
    async for token in engine.stream(PROMPT + [number + 2], max_new_tokens=3000, ignore_eos=True):
        if token.index == 3:
            print("ready", flush=True)
"""


@dataclass
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str
    seconds: float
    """From the signal, if one was sent, until everything was done but the interpreter's own end (with torch, a second)."""
    threads: list[str]
    """Threads of ours that were alive at that time: a daemon thread inside of torch may crash the process from here on."""

    @property
    def noise(self) -> list[str]:
        """Lines of stderr that nobody wants to read."""
        return [line for line in self.err.splitlines() if any(word in line for word in NOISE)]


def run(script: str, *, interrupt: bool = False, timeout: float = 60) -> Ended:
    """Run HEADER and `script`. `interrupt`: send it Ctrl-C once it has printed "ready".

    Raises `subprocess.TimeoutExpired` if it does not end.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::ResourceWarning"}
    process = subprocess.Popen(
        [sys.executable, "-c", HEADER + script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    sent = 0.0
    try:
        assert process.stdout is not None
        first = ""
        if interrupt:
            first = process.stdout.readline()
            assert first == "ready\n", first + process.communicate(timeout=timeout)[1]
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
    out, _, ended = (first + out).rpartition("ended ")
    at, *threads = ended.split()
    return Ended(process.returncode, out, err, float(at) - sent, threads)
