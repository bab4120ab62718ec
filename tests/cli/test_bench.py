"""`cbengine bench`: workloads, what is made of what clients saw, the floor, and the command itself."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from cbengine import AsyncEngine
from cbengine.cli import main
from cbengine.cli.bench import FORMAT, Result, as_json, make_workloads, measure, read
from cbengine.cli.bench_plot import draw, require_matplotlib
from cbengine.cli.bench_report import comparison, table
from cbengine.cli.failures import CommandError
from cbengine.cli.floor import Rates, floor, parameters
from cbengine.cli.measures import Record, differing, figures, percentile
from cbengine.cli.monitor import Load, Monitor
from cbengine.cli.workload import DECODERS, LONG_PROMPT, NAMES, SHARED_PREFIX, Item, Workload, load, make, save
from cbengine.testing import FakeModel

IDS = [i * 7919 % 49_999 for i in range(20_000)]


# --- workloads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_makes_the_same_workload(name: str) -> None:
    one, other = make(name, IDS, seed=3), make(name, IDS, seed=3)
    assert one == other != make(name, IDS, seed=4)
    assert len(one.items) == (DECODERS + 1 if name == "long" else 64)


def test_shapes_of_the_workloads() -> None:
    offline = make("offline", IDS)
    assert all(16 <= len(i.prompt) <= 512 and 8 <= i.max_new_tokens <= 256 for i in offline.items)
    assert offline.at_once and 4000 < offline.prompt_tokens < 14_000 and 2000 < offline.output_tokens < 8000
    prefix = make("prefix", IDS)
    assert len({tuple(item.prompt[:SHARED_PREFIX]) for item in prefix.items}) == 1
    assert len({tuple(item.prompt) for item in prefix.items}) == 64
    poisson = make("poisson", IDS, rate=2)
    times = [item.arrival_s for item in poisson.items]
    assert poisson.name == "poisson-2" and times[0] == 0 and times == sorted(times) and 20 < times[-1] < 50
    long = make("long", IDS)
    (late,) = [item for item in long.items if item.after_tokens]
    assert len(late.prompt) == LONG_PROMPT and not long.at_once


def test_workloads_have_hardly_a_prompt_in_common() -> None:
    made = [make("offline", IDS), make("prefix", IDS), make("poisson", IDS, rate=1), make("poisson", IDS, rate=2)]
    beginnings = [{tuple(item.prompt[:16]) for item in workload.items} for workload in made]
    assert sum(len(a & b) for i, a in enumerate(beginnings) for b in beginnings[:i]) <= 4


@pytest.mark.parametrize("name", NAMES)
def test_workloads_fit_a_small_model(name: str) -> None:
    assert make(name, IDS, max_len=512).longest <= 512


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("of-fline", {}, "use offline, prefix, poisson, long, or a file"),
        ("offline", {"requests": 0}, "at least one request"),
        ("poisson", {"rate": 0.0}, "rate above 0"),
        ("poisson", {"rate": float("nan")}, "rate above 0"),
        ("offline", {"max_len": 100}, "a model of 400, got 20000 and 100"),
    ],
)
def test_workloads_that_cannot_be_made(name: str, options: dict[str, float], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        make(name, IDS, **options)  # type: ignore[arg-type]


def test_a_workload_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for name in NAMES:
        workload = make(name, IDS, requests=3)
        save(workload, path)
        assert load(path) == workload
    path.write_text(json.dumps([{"prompt": [1, 2], "max_new_tokens": 3, "arrival_s": 0.5}]), encoding="utf-8")
    assert load(path) == Workload("mine", [Item([1, 2], 3, 0.5)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '[{"prompt": [], "max_new_tokens": 1}]',
        '[{"prompt": [1], "max_new_tokens": 0}]',
        '[{"prompt": [1]}]',
        '[{"prompt": [1], "max_new_tokens": 4, "after_tokens": 1}]',
        '[{"prompt": "text", "max_new_tokens": 1}]',
        '[{"prompt": [1, true], "max_new_tokens": 1}]',
        '[{"prompt": [1], "max_new_tokens": 2.5}]',
        '[{"prompt": [1], "max_new_tokens": 1, "arrival_s": "soon"}]',
        '[{"prompt": [1], "max_new_tokens": 1, "arrival_s": NaN}]',
        '[{"prompt": [1], "max_new_tokens": 1, "after_tokens": -1}]',
        '[{"prompt": [1], "max_new_tokens": 4}, {"prompt": [1], "max_new_tokens": 4, "after_tokens": 5}]',
    ],
)
def test_files_that_are_no_workload(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match=r"bad\.json"):
        load(path)
    with pytest.raises(CommandError, match="gone"):
        load(tmp_path / "gone")


def test_the_name_of_a_workload_can_be_part_of_a_file_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save(Workload("../a b/c", [Item([1], 1)]), path)
    assert load(path).name == "..-a-b-c"


def test_the_first_requests_of_a_workload() -> None:
    long = make("long", IDS)
    assert make("offline", IDS).first(5).items == make("offline", IDS).items[:5]
    assert long.first(2).items == [*long.items[:2], long.items[-1]]


# --- figures -----------------------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(range(101), 99) == 99
    assert percentile([1, 2], 99) == 2


def test_figures_of_two_clients() -> None:
    workload = Workload("w", [Item([1] * 10, 3), Item([2] * 10, 2)])
    records = [Record(0.0, [1.0, 2.0, 4.0], [5, 6, 7]), Record(0.5, [3.0, 3.5, 5.0], [5, 6, 8])]
    found = figures(workload, records)
    assert (found.wall, found.output_tokens, found.output_rate, found.total_rate) == (5.0, 6, 1.2, 5.2)
    assert (found.ttft_p50, found.ttft_p99, found.itl_p99, found.wrong_length) == (1.0, 2.5, 2.0, 1)
    assert found.beside_itl_p99 is None
    assert differing(records, [records[0], Record(0.5, [1.0], [5])]) == 1


def test_gaps_around_a_long_prompt() -> None:
    workload = Workload("long", [Item([1], 5), Item([2], 4), Item([3] * 99, 1, after_tokens=2)])
    decoders = [Record(0, [1, 3, 4, 9, 10], [0] * 5), Record(0, [2, 3, 5, 9], [0] * 4)]
    found = figures(workload, [*decoders, Record(4.5, [9.0], [0])])
    # All decode from 2 on, and it comes at 4.5: one gap lies wholly between, and another (from 2 to 3).
    assert (found.quiet_itl_p50, found.quiet_itl_p99) == (1, 1)
    assert found.beside_itl_p99 == 5  # 4 to 9, which its prompt was computed in; 3 to 5 and 5 to 9 are shorter


# --- the floor -----------------------------------------------------------------------------------------------------------


def test_the_floor_of_a_toy() -> None:
    spec = FakeModel(windows=(None, 4)).spec  # two layers, one head of dimension 2 or so, counted below
    layers, head = parameters(spec)
    dim, kv_heads = spec.layers[0].head_dim, spec.layers[0].num_kv_heads
    assert head == spec.hidden_size * spec.vocab_size
    assert layers == 2 * spec.hidden_size * (2 * dim + 2 * kv_heads * dim + 3 * spec.intermediate_size)
    workload = Workload("w", [Item([1] * 6, 3)])
    rates = Rates(bandwidth=1000.0, gemm=500.0, threads=1)
    found = floor(workload, spec, rates, steps=3, computed=6, bytes_per_weight=2.0)
    full, window = (1 + 2 + 3 + 4 + 5 + 6, 7 + 8), (1 + 2 + 3 + 4 + 4 + 4, 4 + 4)
    after_attention = spec.hidden_size * (dim + 3 * spec.intermediate_size)  # not for the prompt's first five tokens
    products = 2 * layers * (6 + 2) - 2 * after_attention * 5 + 2 * head * 3
    assert found.operations == products + 4 * dim * (sum(full) + sum(window))
    assert found.kv_bytes == 2 * kv_heads * dim * 4 * (full[1] + window[1] + 2 * (6 + 3))
    assert found.weight_bytes == 2 * (layers + head)
    assert found.memory_seconds == pytest.approx((3 * found.weight_bytes + found.kv_bytes) / 1000)
    assert found.seconds == found.memory_seconds + found.operations / 500
    assert any(f"{found.seconds / 100:.0%} of the floor" in line for line in found.derivation(100.0))


# --- the monitor ---------------------------------------------------------------------------------------------------------


def test_the_monitor_sees_this_process_and_its_children() -> None:
    with Monitor() as monitor:
        monitor.begin()
        alone = monitor.end()
        child = psutil.Popen(
            [sys.executable, "-c", "x = bytearray(80 * 2**20); print(flush=True); input()"], stdin=-1, stdout=-1
        )
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        monitor.begin()
        both = monitor.end()
        child.communicate(b"\n")
    assert both.peak_bytes > alone.peak_bytes + 60 * 2**20
    assert monitor.peak_bytes >= both.peak_bytes
    assert both.own_cores >= 0 and Load(1, 1, 1, 0.06).disturbed and not Load(1, 1, 1, 0.04).disturbed


# --- the command -----------------------------------------------------------------------------------------------------------


def test_everything_is_measured(tmp_path: Path) -> None:
    workloads = [
        Workload("small", [Item([3 + i, 5, 7], 6 + i) for i in range(4)]),
        Workload("late", [Item([9, 8], 12), Item([9, 7], 12, 0.01), Item([4] * 40, 2, after_tokens=5)]),
    ]

    async def run() -> Result:
        with Monitor() as monitor:
            async with AsyncEngine(FakeModel(eos_token_ids=()), num_blocks=64, page_size=16) as engine:
                runs = await measure(engine, workloads, monitor, trace=tmp_path / "trace.json")
                return Result("fake", engine.config, runs)

    result = asyncio.run(run())
    small, late = result.runs
    for one in result.runs:
        assert [len(r.ids) for r in one.records] == [item.max_new_tokens for item in one.workload.items]
        assert one.figures.wrong_length == 0 and one.figures.output_rate > 0 and one.lag_p99 is not None
        assert one.steps >= 6 and one.host_us_per_token > 0 and one.peak_bytes > 50 * 2**20
        assert one.steps_to_free is not None and 0 <= one.steps_to_free <= 2
        trace = json.loads((tmp_path / f"trace-{one.workload.name}.json").read_text(encoding="utf-8"))
        assert len([event for event in trace["traceEvents"] if event["name"] == "step"]) == one.steps
    assert small.computed == 12 and late.figures.quiet_itl_p50 is not None
    first = late.records[2]
    assert first.submit >= max(record.times[4] for record in late.records[:2])

    path = tmp_path / "out.json"
    path.write_text(json.dumps(as_json(result)), encoding="utf-8")
    earlier = read(path)
    assert earlier["small"]["output_rate"] == small.figures.output_rate
    assert [next(iter(column.cells)) for column in comparison(result.runs, earlier).columns[1:]] == ["1.00", "1.00"]
    assert len(table(result.runs).columns) == 3
    draw(result.runs, tmp_path / "out.png", "fake")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CommandError, match="odd"):
        draw(result.runs, tmp_path / "out.odd", "fake")


def test_workloads_that_the_engine_cannot_take(tmp_path: Path) -> None:
    save(Workload("large", [Item([1] * 200, 10)]), tmp_path / "large.json")
    args = Namespace(workload=[str(tmp_path / "large.json")], rate=[1.0], requests=4, seed=0)

    async def run() -> None:
        async with AsyncEngine(FakeModel(max_model_len=128), num_blocks=64, page_size=16) as engine:
            make_workloads(args, engine)

    with pytest.raises(CommandError, match="sequences of 210 tokens; this engine takes 128"):
        asyncio.run(run())


def test_the_command_with_a_real_model(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, out = tmp_path / "mine.json", tmp_path / "out.json"
    save(Workload("mine", [Item([504, 3575, 282, 4649, 314], 4), Item([504, 2241], 3)]), mine)
    options = ["--set", "num_blocks=64", "--num-threads", "1"]
    assert main(["bench", str(smollm2), "--workload", str(mine), "--json", str(out), *options]) == 0
    shown = capsys.readouterr().out
    for words in ("output tokens/s", "share of the floor", "GFLOP/s", "num_threads=1", "peak memory"):
        assert words in shown
    written = json.loads(out.read_text(encoding="utf-8"))
    (one,) = written["runs"]
    assert written["format"] == FORMAT and one["output_tokens"] == 7 and 0 < one["floor"]["weight_bytes"] < 300e6
    assert one["floor"]["seconds"] > 0 and written["rates"]["bandwidth"] > 0


@pytest.mark.parametrize(
    ("option", "file", "says"),
    [
        ("--json", "gone/out.json", "--json .*: there is no folder .*gone; make it"),
        ("--trace", "gone/out.json", "--trace .*: there is no folder"),
        ("--plot", "gone/out.png", "--plot .*: there is no folder"),
        ("--json", "", "--json .*: that is a folder"),
        ("--plot", "out.odd", "--plot .*: no kind of picture that can be written; use one of .*png"),
        ("--workload", "gone", "none of the workloads offline, prefix, poisson, long, and no workload"),
    ],
)
def test_wrong_files_are_found_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, file: str, says: str
) -> None:
    assert main(["bench", str(tmp_path / "no-model"), option, str(tmp_path / file)]) == 1
    errors = capsys.readouterr()
    assert re.search(says, errors.err) and "Loading" not in errors.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv", [["--requests", "0"], ["--requests", "2.5"], ["--rate", "0"], ["--rate", "1", "nan"], ["--rate", "-1"]]
)
def test_numbers_that_make_no_sense(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "model", *argv])
    assert f"argument {argv[0]}: must be a " in capsys.readouterr().err


def test_a_request_that_the_engine_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several clients fail at once, as a group."""
    save(Workload("odd", [Item([5], 1), Item([9999], 1), Item([9999], 1), Item([6], 1)]), tmp_path / "odd.json")
    engine = AsyncEngine(FakeModel(), num_blocks=64, page_size=16)
    monkeypatch.setattr("cbengine.cli.bench.make_engine", lambda args: engine)
    assert main(["bench", "fake", "--workload", str(tmp_path / "odd.json")]) == 1
    assert "cbengine: token id 9999 is not in the vocabulary" in capsys.readouterr().err


def test_files_that_are_no_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    for text, says in (
        ("[]", "no JSON of"),
        ('{"format": 0, "runs": []}', "has format 0"),
        ('{"runs": []}', "no JSON of"),
    ):
        path.write_text(text, encoding="utf-8")
        assert main(["bench", str(tmp_path), "--compare", str(path)]) == 1
        assert says in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install 'cbengine\[bench\]'"):
        require_matplotlib()
