"""What a GPU does with this engine, against transformers' continuous batching and against the floor of the machine itself.

    python benchmarks/gpu.py [--seconds 240] [--shapes qwen3-0.6b llama3-8b gemma3-1b] [--batches 1 16 64 256] [--out FOLDER]

Random weights in the shapes of published models, made on the spot, in bfloat16; nothing is downloaded. Measured are: decoded
tokens a second at fixed batches; prompt tokens a second; how long the device waits between two steps (marks in its own
stream); the engine thread's time for a step; TTFT and ITL under Poisson arrivals; all that with one step in flight instead
of two, and without graphs; and transformers over the same model object. Prints a table, writes `gpu.json` and, where
matplotlib is installed, `gpu.png`. What there is no time for is left out, and said.

CBENGINE_GPU_DRYRUN=cpu runs everything on the CPU at sizes that mean nothing, to see that the code is right.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[1])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from benchmarks.gpu_parts import ours, peer  # noqa: E402
from benchmarks.gpu_parts.machine import Clock, Machine, Rates, measure_rates  # noqa: E402
from benchmarks.gpu_parts.report import Row, aims, table, write  # noqa: E402
from benchmarks.gpu_parts.shapes import SHAPES, build  # noqa: E402

_MARGIN = 15.0
"""Seconds that starting an engine and one measurement may take."""

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "async off": {"use_async_batching": False},
    "graphs off": {"use_cuda_graph": False},
}


class Benchmark:
    """All measurements, each of them only if there is time."""

    def __init__(self, machine: Machine, clock: Clock, batches: Sequence[int]) -> None:
        self.machine = machine
        self.clock = clock
        self.batches = batches
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        clock.say(f"{machine.name}: measuring its rates")
        self.rates: Rates = measure_rates(machine)

    def run(self, shapes: Sequence[str]) -> None:
        """Everything, model by model: what matters most first."""
        for shape in shapes:
            if not self._may(shape, 2 * _MARGIN):
                continue
            self.clock.say(f"{shape}: making the model")
            model = build(shape, self.machine)
            self._guarded(shape, "default", lambda m=model, s=shape: self._serve(m, s, "default", self.batches))
            middle = [batch for batch in self.batches if 1 < batch <= 64][-1:]
            self._peer(model, shape, middle)
            if shape == shapes[0]:
                for way in ("async off", "graphs off"):
                    few = [batch for batch in self.batches if batch in (1, *middle)]
                    self._guarded(shape, way, lambda m=model, s=shape, w=way, f=few: self._serve(m, s, w, f))
            del model
            self.machine.settle()

    def _may(self, what: str, seconds: float = _MARGIN) -> bool:
        if self.clock.left >= seconds or self.machine.dry:
            return True
        self.left_out.append(what)
        self.clock.say(f"{what}: left out, there is no time for it")
        return False

    def _guarded(self, shape: str, how: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it; what goes wrong is a row of the table, and the rest goes on."""
        if not self._may(f"{shape}, {how}"):
            return
        try:
            asyncio.run(make())
        except Exception as error:
            traceback.print_exc()
            self.rows.append(Row(shape, how, "failed", 0, note=f"{type(error).__name__}: {error}"[:200]))
        self.machine.settle()

    async def _serve(self, model: Any, shape: str, how: str, batches: Sequence[int]) -> None:
        self.clock.say(f"{shape}, {how}: starting the engine")
        async with ours.engine_for(model, self.machine, **WAYS[how]) as engine:
            self.clock.say(f"{shape}, {how}: attention {engine.config.attention_backend}, {engine.memory_plan}")
            await ours.ask(engine, ours.random_prompts(model, 2, 16, 7), 4)
            meter = ours.StepMeter(engine, self.machine)
            for batch in batches:
                if self._may(f"{shape}, {how}: decode at {batch}", 5.0):
                    self.clock.say(f"{shape}, {how}: decode at {batch}")
                    row = Row(shape, how, "decode", batch, note=str(engine.config.attention_backend))
                    self.rows.append(await ours.decode(engine, model, self.machine, self.rates, row, meter))
            if self._may(f"{shape}, {how}: prompts", 5.0):
                self.clock.say(f"{shape}, {how}: prompts")
                row = Row(shape, how, "prefill", self.machine.size(16, 2))
                self.rows.append(await ours.prefill(engine, model, self.machine, self.rates, row))
            if how != "graphs off" and self._may(f"{shape}, {how}: Poisson arrivals", 12.0):
                self.clock.say(f"{shape}, {how}: Poisson arrivals")
                rate = self.machine.size(12.0 if "8b" in shape else 24.0, 50.0)
                row = Row(shape, how, "poisson", self.machine.size(round(5 * rate), 4))
                self.rows.append(await ours.poisson(engine, model, self.machine, row, rate))

    def _peer(self, model: Any, shape: str, batches: Sequence[int]) -> None:
        for batch in batches:
            for tuning in peer.TUNINGS:
                what = f"{shape}, transformers ({tuning}): decode at {batch}"
                if not self._may(what, 2 * _MARGIN):
                    continue
                self.clock.say(what)
                try:
                    self.rows.append(
                        peer.decode(model, self.machine, Row(shape, "transformers", "decode", batch), tuning)
                    )
                except Exception as error:
                    note = f"{tuning}: {type(error).__name__}: {error}"[:200]
                    self.rows.append(Row(shape, "transformers", "failed", batch, note=note))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (default: 240)")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.png (default: a new one)")
    args = parser.parse_args()
    clock, machine = Clock(args.seconds), Machine.here()
    if machine is None:
        print("no CUDA device that this Python's torch can use: nothing was measured", file=sys.stderr)
        return 2
    benchmark = Benchmark(machine, clock, args.batches if not machine.dry else [1, 3])
    folder = args.out or Path(tempfile.mkdtemp(prefix="cbengine-gpu-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever cuts this short gets what there is
    try:
        benchmark.run(args.shapes)
    finally:
        _show(benchmark, folder)
    failed = [row for row in benchmark.rows if row.what == "failed" and row.how != "transformers"]
    return 1 if failed else 0


def _show(benchmark: Benchmark, folder: Path) -> None:
    machine, rates = benchmark.machine, benchmark.rates
    copies, products = rates.bandwidth / 1e9, rates.matmul / 1e12
    print(f"{machine.name}: copies at {copies:,.0f} GB/s, matrix products at {products:,.1f} TFLOP/s")
    print(table(benchmark.rows))
    for line in [*aims(benchmark.rows), *(f"left out: {what}" for what in benchmark.left_out)]:
        print(line)
    for path in write(folder, machine, rates, benchmark.rows, benchmark.left_out):
        print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
