"""The comparison with other engines: driving runners in turns, and what is made of their figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers.__main__ import main, runner_options, venvs
from benchmarks.peers.engines import ENGINES, EngineSpec
from benchmarks.peers.report import Spread, plot, ratios, show
from benchmarks.peers.rounds import Outcome, Plan, run_rounds
from cbengine.cli.failures import CommandError
from cbengine.cli.workload import Item, Workload

WORKLOADS = [
    Workload("small", [Item([100], 5), Item([200, 3], 2, 0.02)]),
    Workload("late", [Item([100], 6), Item([300], 8), Item([200] * 9, 2, after_tokens=4)]),
]


class Echo(EngineSpec):
    """`tests/peers/echo.py` in one of its modes."""

    def command(self, model: Path, threads: int, longest: int, folders: Any, extra: dict[str, str]) -> list[str]:
        mode = (self.options | extra)["mode"]
        fixed = [f"--model={model}", f"--threads={threads}", f"--max-len={longest}"]
        return [sys.executable, "-m", "tests.peers.echo", *fixed, f"--mode={mode}"]


def plan(tmp_path: Path, engines: list[EngineSpec], rounds: int, log: list[str], **options: Any) -> Plan:
    return Plan(
        engines=engines,
        workloads=WORKLOADS,
        model=tmp_path,
        folders={},
        threads=1,
        threads_given=False,
        options={},
        rounds=rounds,
        retries=0,
        scratch=tmp_path,
        report=lambda outcome: None,
        log=log.append,
        **options,
    )


def test_engines_take_turns(tmp_path: Path) -> None:
    log: list[str] = []
    loop, coroutines = Echo("cbengine", "", options={"mode": "loop"}), Echo("other", "", options={"mode": "async"})
    slow = Echo("slow", "", options={"mode": "async"}, slow_start=True)
    outcomes = run_rounds(plan(tmp_path, [loop, coroutines, slow], 2, log))
    order = [(one.round, one.engine.name, one.workload.name) for one in outcomes]
    assert order == [
        *[(1, name, workload) for workload in ("small", "late") for name in ("cbengine", "other")],
        (1, "slow", "small"),
        (1, "slow", "late"),
        *[(2, name, workload) for workload in ("small", "late") for name in ("other", "cbengine")],
        (2, "slow", "small"),
        (2, "slow", "late"),
    ]
    for one in outcomes:
        assert [r.ids for r in one.records] == [
            [item.prompt[0] + n for n in range(item.max_new_tokens)] for item in one.workload.items
        ]
        assert one.differing == 0 and one.figures.wrong_length == 0 and one.version == "1.0"
        assert one.peak_bytes > 2**20 and one.start_seconds >= 0
        if one.workload.name == "late":
            assert one.records[2].submit >= max(record.times[3] for record in one.records[:2])
    assert len([line for line in log if "slow" in line]) == 2  # one process a round


def test_a_runner_that_ends_leaves_the_others_alone(tmp_path: Path) -> None:
    log: list[str] = []
    broken, good = Echo("other", "", options={"mode": "broken"}), Echo("cbengine", "", options={"mode": "loop"})
    outcomes = run_rounds(plan(tmp_path, [broken, good], 1, log))
    assert [one.engine.name for one in outcomes] == ["cbengine", "cbengine"]
    assert [one.differing for one in outcomes] == [None, None]  # the first engine's tokens are not known
    assert any("before 'end'" in line and "out of order" in line for line in log)


def row(engine: str, number: int, rate: float, ttft: float, **more: Any) -> dict[str, Any]:
    known = {"engine": engine, "precision": "fp32", "workload": "offline", "round": number, "output_rate": rate}
    known |= {"ttft_p50": ttft, "ttft_p99": None, "itl_p50": 0.02, "itl_p99": 0.04, "quiet_itl_p50": None}
    known |= {"beside_itl_p99": None, "peak_bytes": 2**30, "start_seconds": 2.0, "other_cores": 0.01}
    return known | {"disturbed": False, "differing": 0, "wrong_length": 0} | more


RESULT = {
    "model": "some/model",
    "threads": 2,
    "runs": [
        row("cbengine", 1, 200.0, 0.25),
        row("openvino", 1, 100.0, 0.75, differing=3),
        row("cbengine", 2, 150.0, 0.4, other_cores=0.2, disturbed=True),
        row("openvino", 2, 150.0, 0.4),
        row("cbengine-int8", 1, 300.0, 0.1, precision="int8"),
        row("openvino-int8", 1, 200.0, 0.1, precision="int8"),
    ],
}


def test_ratios_are_made_round_by_round_and_above_one_is_better() -> None:
    rows: Any = RESULT["runs"]
    assert ratios(rows, "offline", "openvino", "output_rate") == Spread(1.5, 1.0, 2.0)
    assert ratios(rows, "offline", "openvino", "ttft_p50") == Spread(2.0, 1.0, 3.0)
    assert ratios(rows, "offline", "openvino-int8", "output_rate") == Spread(1.5, 1.5, 1.5)
    assert ratios(rows, "offline", "openvino", "ttft_p99") is None
    assert ratios(rows, "prefix", "openvino", "output_rate") is None


def test_the_report(tmp_path: Path) -> None:
    console = Console(record=True, width=200, quiet=False, file=(tmp_path / "out").open("w"))
    show(RESULT, console)
    shown = console.export_text()
    console.file.close()
    for words in ("some/model, 2 threads", "175.0 (150.0 to 200.0)", "1.50 (1.00 to 2.00)", "2 / 1", "0.20"):
        assert words in shown
    plot(RESULT, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_runners() -> None:
    assert runner_options(["openvino.max_batch_tokens=256", "openvino.cache_gb=1", "vllm.block_size=64"]) == {
        "openvino": {"max_batch_tokens": "256", "cache_gb": "1"},
        "vllm": {"block_size": "64"},
    }
    for wrong in ("openvino", "openvino=3", "nobody.x=1", ".x=1"):
        with pytest.raises(CommandError, match=r"ENGINE\.NAME=VALUE"):
            runner_options([wrong])
    assert venvs(["vllm=v"]) == {"vllm": Path("v").resolve()}
    for wrong in ("other=x", "vllm", "vllm="):
        with pytest.raises(CommandError, match="--venv needs"):
            venvs([wrong])


def test_what_a_runner_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    folders = {"vllm": tmp_path, "openvino": tmp_path}
    ours, theirs = ENGINES["cbengine"].environment(2, folders), ENGINES["vllm"].environment(2, folders)
    assert "OMP_NUM_THREADS" not in ours and "GOMP_SPINCOUNT" not in ours and ours["PATH"] == os.environ["PATH"]
    assert theirs["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and theirs["LD_PRELOAD"].endswith("libiomp5.so")
    command = ENGINES["cbengine-int8"].command(Path("m"), 2, 100, folders, {})
    assert command[0] == sys.executable and command[-1] == "--quantization=int8"
    assert ENGINES["openvino"].command(Path("m"), 2, 100, folders, {"cache_gb": "1"})[-1] == "--cache-gb=1"


def test_the_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbed run is repeated, and the quietest one kept."""
    import benchmarks.peers.rounds as rounds

    waits: list[int] = []
    others = iter([0.5, 0.2, 0.3])
    monkeypatch.setattr(rounds, "_wait_for_quiet", lambda log: waits.append(1))

    def serve(made: Plan, engine: EngineSpec, workloads: list[Workload], number: int) -> list[Outcome]:
        load = rounds.Load(1.0, 1, 1.0, next(others))
        found = rounds.figures(WORKLOADS[0], [rounds.Record(0.0, [1.0] * 5, [1] * 5), rounds.Record(0.0, [1.0], [1])])
        return [Outcome(engine, workloads[0], number, [], found, load, 1, 1.0, "1", {})]

    monkeypatch.setattr(rounds, "_serve", serve)
    made = plan(tmp_path, [Echo("cbengine", "")], 1, [])
    made.workloads, made.retries = WORKLOADS[:1], 2
    (outcome,) = run_rounds(made)
    assert (outcome.load.other_cores, len(waits)) == (0.2, 3)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--show", "{tmp}/gone"], "gone: no JSON of"),
        (["--show", "{tmp}"], "no JSON of"),
        (["--show", "{tmp}/list.json"], "no JSON of"),
        (["--model", "{tmp}", "--engines", "cbengine"], "no folder with a model"),
        (["--model", "random-llama", "--tokenizer", "{tmp}/gone"], "no such folder|no folder with a model"),
        (["--model", "{tmp}", "--json", "{tmp}/gone/out.json"], "there is no folder .*gone; make it"),
        (["--model", "{tmp}", "--plot", "{tmp}/out.odd"], "use one of .*png"),
        (["--model", "{tmp}", "--workload", "nope"], "none of the workloads offline, prefix"),
    ],
)
def test_what_cannot_be_done_is_said_in_words_before_anything_is_measured(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["peers", *(word.format(tmp=tmp_path) for word in argv)])
    with pytest.raises(SystemExit, match=says):
        main()


@pytest.mark.parametrize("argv", [["--requests", "0"], ["--rate", "-1"], ["--rounds", "0"], ["--threads", "0"]])
def test_numbers_that_make_no_sense(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--model", "m", *argv])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"argument {argv[0]}: must be a " in capsys.readouterr().err
