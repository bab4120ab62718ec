"""Running the engines in turns, each in a process of its own that is measured from outside."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ROOT, EngineSpec
from benchmarks.peers.protocol import EVENTS
from cbengine.cli.measures import Figures, Record, differing, figures
from cbengine.cli.monitor import DISTURBED, Load, Monitor, busy_seconds
from cbengine.cli.workload import Workload, save

_PATIENCE = 1800.0  # seconds that a runner may be silent


class RunnerError(RuntimeError):
    """A runner ended or fell silent; the message has the end of what it printed."""


@dataclass(slots=True)
class Outcome:
    """One workload, served by one engine in one round."""

    engine: EngineSpec
    workload: Workload
    round: int
    records: list[Record]
    figures: Figures
    load: Load
    peak_bytes: int
    """Of all of its processes since it was started, loading included."""
    start_seconds: float
    version: str
    settings: dict[str, Any]
    differing: int | None = None
    """Requests whose tokens are others than the first engine's in its first round; None while those are not known."""

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "engine": self.engine.name,
            "precision": self.engine.precision,
            "workload": self.workload.name,
            "round": self.round,
            **asdict(self.figures),
            "peak_bytes": self.peak_bytes,
            "serving_peak_bytes": self.load.peak_bytes,
            "own_cores": self.load.own_cores,
            "other_cores": self.load.other_cores,
            "disturbed": self.load.disturbed,
            "start_seconds": self.start_seconds,
            "differing": self.differing,
            "version": self.version,
            "settings": self.settings,
        }


class Runner:
    """A runner's process, as a context manager. Ends it when left."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        read, write = os.pipe()
        os.set_blocking(read, False)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    list(command),
                    cwd=ROOT,
                    env=environment | {EVENTS: str(write)},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write,),
                )
        finally:
            os.close(write)
        self._read = read
        self._selector = selectors.DefaultSelector()
        self._selector.register(read, selectors.EVENT_READ)
        self._pending = b""
        self.monitor = Monitor(self._process.pid, also_ours=os.getpid())

    def __enter__(self) -> Runner:
        self.monitor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.monitor.__exit__(None, None, None)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # no more jobs
            self._process.wait(30 if error[0] is None else 0)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._selector.close()
        os.close(self._read)

    def expect(self, event: str) -> dict[str, Any]:
        """Wait until it says `event`. Raises `RunnerError`."""
        end = time.monotonic() + _PATIENCE
        while b"\n" not in self._pending:
            if self._selector.select(1.0):
                data = os.read(self._read, 65536)
                self._pending += data
                if not data and b"\n" not in self._pending:
                    raise RunnerError(self._failure(f"closed its events before {event!r}"))
            elif self._process.poll() is not None:
                raise RunnerError(self._failure(f"ended with status {self._process.returncode} before {event!r}"))
            elif time.monotonic() > end:
                raise RunnerError(self._failure(f"did not say {event!r} within {_PATIENCE:.0f} s"))
        line, _, self._pending = self._pending.partition(b"\n")
        said = json.loads(line)
        if said["event"] != event:
            raise RunnerError(self._failure(f"said {said['event']!r}, not {event!r}"))
        return said

    def serve(self, workload: Path, out: Path) -> Load:
        """Let it serve a workload, and write what its clients saw."""
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps({"workload": str(workload), "out": str(out)}) + "\n").encode())
        self._process.stdin.flush()
        self.expect("begin")
        self.monitor.begin()
        self.expect("end")
        load = self.monitor.end()
        self.expect("done")
        return load

    def _failure(self, what: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n".join([f"the runner {what}; the end of {self._log}:", *lines])


@dataclass(slots=True)
class Plan:
    """What to run, and how."""

    engines: Sequence[EngineSpec]
    workloads: Sequence[Workload]
    model: Path
    folders: dict[str, Path]
    threads: int
    threads_given: bool
    options: dict[str, dict[str, str]]
    """Options of runners, by the engine's name."""
    rounds: int
    retries: int
    """How often a disturbed run is repeated."""
    scratch: Path
    report: Callable[[Outcome], object]
    """Called with every outcome as it comes."""
    log: Callable[[str], object] = print


def run_rounds(plan: Plan) -> list[Outcome]:
    """Run every engine with every workload, in turns, another one first in each round."""
    outcomes: list[Outcome] = []
    truth: dict[str, list[Record]] = {}
    quick = [engine for engine in plan.engines if not engine.slow_start]
    slow = [engine for engine in plan.engines if engine.slow_start]
    for number in range(plan.rounds):
        turns = quick[number % len(quick) :] + quick[: number % len(quick)] if quick else []
        groups = [(engine, [workload]) for workload in plan.workloads for engine in turns]
        groups += [(engine, list(plan.workloads)) for engine in slow]
        for engine, workloads in groups:
            for outcome in _measure(plan, engine, workloads, number + 1):
                name = outcome.workload.name
                if engine.name == plan.engines[0].name:
                    truth.setdefault(name, outcome.records)
                outcomes.append(outcome)
                _compare(outcomes, truth)
                plan.report(outcome)
    return outcomes


def _compare(outcomes: Sequence[Outcome], truth: dict[str, list[Record]]) -> None:
    """Count whose tokens are others than the first engine's, as soon as those are known."""
    for outcome in outcomes:
        known = truth.get(outcome.workload.name)
        if outcome.differing is None and known is not None:
            outcome.differing = differing(known, outcome.records)


def _measure(plan: Plan, engine: EngineSpec, workloads: list[Workload], number: int) -> list[Outcome]:
    """One process; again for the workloads during which somebody else was busy, as often as the plan allows."""
    kept: dict[str, Outcome] = {}
    left = workloads
    for attempt in range(plan.retries + 1):
        if plan.retries:
            _wait_for_quiet(plan.log)
        try:
            found = _serve(plan, engine, left, number)
        except RunnerError as error:
            plan.log(f"{engine.name}: {error}")
            break
        for outcome in found:
            best = kept.get(outcome.workload.name)
            if best is None or outcome.load.other_cores < best.load.other_cores:
                kept[outcome.workload.name] = outcome
        left = [outcome.workload for outcome in kept.values() if outcome.load.disturbed]
        if not left:
            break
        if attempt < plan.retries:
            plan.log(f"{engine.name}: disturbed in {', '.join(workload.name for workload in left)}; once more")
    return list(kept.values())


def _serve(plan: Plan, engine: EngineSpec, workloads: Sequence[Workload], number: int) -> list[Outcome]:
    plan.log(f"round {number}: {engine.name}: {', '.join(workload.name for workload in workloads)} ...")
    longest = max(workload.longest for workload in plan.workloads)
    extra = dict(plan.options.get(engine.name, {}))
    if plan.threads_given and engine.module == "run_cbengine":
        extra["threads_given"] = "1"
    model = engine.model(plan.model, plan.folders)
    command = engine.command(model, plan.threads, longest, plan.folders, extra)
    outcomes: list[Outcome] = []
    with Runner(command, engine.environment(plan.threads, plan.folders), plan.scratch / f"{engine.name}.log") as runner:
        ready = runner.expect("ready")
        for workload in workloads:
            asked, answered = (
                plan.scratch / f"{workload.name}.json",
                plan.scratch / f"{engine.name}-{workload.name}.out",
            )
            save(workload, asked)
            load = runner.serve(asked, answered)
            records = [Record(**record) for record in json.loads(answered.read_text(encoding="utf-8"))]
            outcomes.append(
                Outcome(
                    engine=engine,
                    workload=workload,
                    round=number,
                    records=records,
                    figures=figures(workload, records),
                    load=load,
                    peak_bytes=runner.monitor.peak_bytes,
                    start_seconds=ready["start_seconds"],
                    version=ready["version"],
                    settings=ready["settings"],
                )
            )
    return outcomes


def _wait_for_quiet(log: Callable[[str], object], seconds: float = 120.0) -> None:
    """Wait until the machine has nothing to do for three seconds, or for so long at most."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before, start = busy_seconds(), time.monotonic()
        time.sleep(3.0)
        if (busy_seconds() - before) / (time.monotonic() - start) <= DISTURBED:
            return
    log(f"the machine was not quiet within {seconds:.0f} s")
