"""One workload, measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cbengine.cli.clients import Progress, ask
from cbengine.cli.floor import Floor
from cbengine.cli.measures import Figures, Record, figures
from cbengine.cli.monitor import Load, LoopLag, Monitor
from cbengine.cli.workload import Workload
from cbengine.engine import AsyncEngine
from cbengine.observe.timeline import Shares, Timeline


@dataclass(slots=True)
class Run:
    """What came out of a workload."""

    workload: Workload
    records: list[Record]
    figures: Figures
    load: Load
    peak_bytes: int
    """Of the process and its children since the command started, loading included."""
    lag_p99: float | None
    """Of the event loop that the clients ran on, seconds."""
    timeline: Timeline
    shares: Shares
    """Of the steps that only decode."""
    host_seconds: float
    """That the engine thread worked."""
    steps: int
    computed: int
    """Prompt tokens computed, that is, not found in the prefix cache."""
    floor: Floor | None = None
    """None where requests arrive over time, so that the machine is out of work now and then."""
    steps_to_free: int | None = None

    @property
    def host_us_per_token(self) -> float:
        return self.host_seconds * 1e6 / max(1, self.figures.output_tokens)

    @property
    def floor_share(self) -> float | None:
        """Share of the floor that was reached: 1 is all that the machine can do."""
        return None if self.floor is None else self.floor.seconds / self.figures.wall

    def values(self) -> dict[str, Any]:
        """For JSON: the figures, flat, under the names that the fields have here."""
        values: dict[str, Any] = {"name": self.workload.name, "requests": len(self.workload.items)}
        values |= {"prompt_tokens": self.workload.prompt_tokens, "computed_prompt_tokens": self.computed}
        values |= asdict(self.figures)
        values |= {
            "peak_bytes": self.peak_bytes,
            "own_cores": self.load.own_cores,
            "other_cores": self.load.other_cores,
            "disturbed": self.load.disturbed,
            "loop_lag_p99": self.lag_p99,
            "host_us_per_token": self.host_us_per_token,
            "decode_steps": asdict(self.shares),
            "waited_share": self.shares.waited_share,
            "steps": self.steps,
            "steps_to_free": self.steps_to_free,
            "floor_share": self.floor_share,
        }
        if self.floor is not None:
            values["floor"] = asdict(self.floor) | {"seconds": self.floor.seconds}
            values["floor"]["overlapped_seconds"] = self.floor.overlapped_seconds
        return values


async def serve(engine: AsyncEngine, workload: Workload, monitor: Monitor, progress: Progress | None = None) -> Run:
    """Run `workload` on a started engine and measure it. Raises what a request raises."""
    before = engine.stats()
    with engine.timeline() as timeline:
        async with LoopLag() as lag:
            monitor.begin()
            records = await ask(engine, workload, progress)
            load = monitor.end()
    after = engine.stats()
    return Run(
        workload=workload,
        records=records,
        figures=figures(workload, records),
        load=load,
        peak_bytes=monitor.peak_bytes,
        lag_p99=lag.p99,
        timeline=timeline,
        shares=timeline.shares(),
        host_seconds=timeline.host_seconds(),
        steps=after.steps - before.steps,
        computed=after.prompt_tokens - before.prompt_tokens,
    )
