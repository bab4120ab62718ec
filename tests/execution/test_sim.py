"""The invariants I1 to I13 over random workloads and hundreds of legal device schedules.

Each run looks at all of them: `Witness` and `DirectPort` name the invariant that they hold, the device finds whatever is
not ordered, and every answer is compared with the one that is known. `test_hazards.py` shows that these checks bite.
"""

from __future__ import annotations

import pytest

from cbengine.testing import SimDevice
from tests.execution.witness import Witness
from tests.execution.workload import MEMORY, Workload, make_driver

SEEDS = range(200)


@pytest.mark.parametrize("stop", ["", "hard", "drain"])
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_the_invariants_hold(scheduler: str, stop: str) -> None:
    preempted = speculated = pauses = 0
    for seed in SEEDS:
        driver = make_driver(SimDevice(seed, memory=MEMORY), seed, scheduler_type=scheduler)
        witness = Witness(driver)
        try:
            Workload(driver, seed, stop=stop).run()
            witness.raise_first()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        preempted += driver.parts.lifecycle.preemptions
        speculated += witness.speculated
        pauses += driver.pauses_heard
    # The workload does get to the places that matter.
    assert speculated > 100 and pauses > 20
    assert preempted > 20
