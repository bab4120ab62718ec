"""Programs that use the engine, run as processes of their own.

To import torch takes seconds. One process has done it, and forks for each program: the program then runs, and ends, as the
main program of the child.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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


FORKING = """
def next_program():
    import json, os
    for line in sys.stdin:
        program = json.loads(line)
        if (pid := os.fork()) == 0:
            for number, (name, flags) in enumerate(program["files"]):
                os.dup2(os.open(name, flags), number)
            return program["script"]
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)

exec(compile(next_program(), "<string>", "exec"))
"""
"""Comes after HEADER: runs each program that its input names, one after the other, and prints its pid and its exit code."""


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


def run(script: str, *, interrupt: bool = False, fresh: bool = False, timeout: float = 60) -> Ended:
    """Run HEADER and `script`. `interrupt`: send it Ctrl-C once it has printed "ready". `fresh`: in a new interpreter.

    Raises `subprocess.TimeoutExpired` if it does not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = Fresh(script, Path(folder)) if fresh or sys.platform != "linux" else Forked(script, Path(folder))
        killer = threading.Timer(timeout, os.kill, (process.pid, signal.SIGKILL))
        killer.start()
        sent = 0.0
        try:
            with process.out:
                first = ""
                if interrupt:
                    first = process.out.readline()
                    if first == "ready\n":
                        sent = time.monotonic()
                        os.kill(process.pid, signal.SIGINT)
                out = first + process.out.read()
                code = process.wait()
        finally:
            killer.cancel()
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(script, timeout, out)
        err = (Path(folder) / "err").read_text(encoding="utf-8")
    assert sent or not interrupt, out + err
    out, _, ended = out.rpartition("ended ")
    at, *threads = ended.split()
    return Ended(code, out, err, float(at) - sent, threads)


class Fresh:
    """A program in a new interpreter. What it says on stderr goes to `err` in the folder."""

    def __init__(self, script: str, folder: Path) -> None:
        with (folder / "err").open("wb") as err:
            self._process = start(HEADER + script, stderr=err)
        assert self._process.stdout is not None
        self.pid, self.out, self.wait = self._process.pid, self._process.stdout, self._process.wait


class Forked:
    """The same in a child of a process that has imported everything."""

    def __init__(self, script: str, folder: Path) -> None:
        os.mkfifo(folder / "out")
        files = [(os.devnull, os.O_RDONLY), (str(folder / "out"), os.O_WRONLY)]
        files.append((str(folder / "err"), os.O_WRONLY | os.O_CREAT))
        parent = forking()
        assert parent.stdin is not None and parent.stdout is not None
        print(json.dumps({"script": script, "files": files}), file=parent.stdin, flush=True)
        self._said = parent.stdout
        self.pid = int(self._said.readline())
        self.out: IO[str] = (folder / "out").open(encoding="utf-8")

    def wait(self) -> int:
        return int(self._said.readline())


@functools.cache
def forking() -> subprocess.Popen[str]:
    """The parent of all `Forked`. It ends with its input, that is, with this process."""
    return start(HEADER + FORKING, stdin=subprocess.PIPE)


def start(script: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::ResourceWarning"}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **options)
