"""The checks of `test_sim.py` bite: each hazard is found over seeds of that kind, by the check that is there for it."""

from __future__ import annotations

import re

import pytest

from cbengine.testing import SimDevice
from tests.execution.hazards import HAZARDS, Hazard
from tests.execution.witness import Witness
from tests.execution.workload import MEMORY, Workload, make_driver

SEEDS = range(72)
"""With two slots, a configuration comes back after 24 seeds (see `make_config`)."""


def _find(hazard: Hazard, seed: int, *, watched: bool = True) -> Exception | None:
    """What ends a run with the hazard. `watched=False`: without race check and witness, so by its effects alone."""
    dropped: set[tuple[str, str]] = set()
    device = SimDevice(seed, memory=MEMORY, check_races=watched, drop=lambda *call: call in dropped)
    driver = make_driver(device, seed, use_async_batching=True)
    hazard.plant(driver, dropped)
    witness = Witness(driver) if watched else None
    try:
        Workload(driver, seed, requests=10).run()
        if witness is not None:
            witness.raise_first()
    except Exception as error:  # whatever it is: the hazard was found
        return error
    return None


@pytest.mark.parametrize("name", list(HAZARDS))
def test_a_hazard_is_found_in_most_seeds(name: str) -> None:
    hazard, most = HAZARDS[name], len(SEEDS) // 2 + 1
    found: list[Exception] = []
    for seed in SEEDS:
        error = _find(hazard, seed)
        if error is not None:
            found.append(error)
        if len(found) == most:  # whatever the other seeds say
            break
    assert len(found) == most, f"found in {len(found)} of {len(SEEDS)} seeds"
    as_meant = [error for error in found if re.search(hazard.found_as, str(error))]
    assert len(as_meant) > len(found) / 2, [str(error) for error in found[:5]]


def test_every_invariant_has_a_hazard() -> None:
    assert {hazard.breaks for hazard in HAZARDS.values()} >= {f"I{n}" for n in (2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13)}
