"""Steps are planned late: whoever comes while one runs is in the next one."""

from __future__ import annotations

import pytest

from cbengine.config import EngineConfig
from cbengine.devices.inline import InlineDevice
from cbengine.execution.forecast import Forecast
from cbengine.testing import FakeModel
from tests.support.driver import Driver

SIZES = {"num_blocks": 64, "page_size": 4, "max_batch_tokens": 64, "max_requests_per_batch": 4}


def make_forecast() -> Forecast:
    forecast = Forecast()
    for seconds in (0.050, 0.040, 0.060):
        forecast.saw(4, 0, seconds)
    return forecast


def test_nothing_is_known_at_first() -> None:
    assert Forecast().wait(4, 0) == 0
    assert Forecast().wait(0, 100) == 0


def test_a_step_is_thought_to_end_before_the_shortest_of_its_kind() -> None:
    assert 0.5 * 0.040 < make_forecast().wait(4, 0) < 0.040


def test_more_rows_take_at_least_as_long_as_fewer() -> None:
    forecast = make_forecast()
    assert forecast.wait(6, 0) == forecast.wait(4, 0)
    assert forecast.wait(3, 0) == 0
    assert forecast.wait(100, 0) == 0


def test_old_steps_are_forgotten() -> None:
    forecast = make_forecast()
    for _ in range(4):
        forecast.saw(4, 0, 0.020)
    assert forecast.wait(4, 0) < 0.020
    for _ in range(4):
        forecast.saw(4, 0, 0.080)
    assert forecast.wait(4, 0) > 0.040


def test_prompts_cost_by_the_token() -> None:
    forecast = make_forecast()
    assert forecast.wait(4, 100) == 0  # how much they cost is not known yet
    forecast.saw(4, 100, 0.140)
    assert 0.1 < forecast.wait(4, 100) < 0.140
    assert 0.2 < forecast.wait(4, 200) < 0.240
    forecast.saw(4, 100, 0.090)
    assert forecast.wait(4, 100) < 0.090


def test_tiny_prompts_say_nothing_about_long_ones() -> None:
    """Reading the weights once is most of such a step."""
    forecast = Forecast()
    for _ in range(9):
        forecast.saw(0, 1, 0.006)
    assert forecast.wait(0, 250) == 0
    forecast.saw(0, 250, 0.27)
    for _ in range(9):
        forecast.saw(0, 1, 0.006)
    assert 0.2 < forecast.wait(0, 250) < 0.27


def test_prompts_alone() -> None:
    forecast = Forecast()
    forecast.saw(0, 100, 0.1)
    assert 0.15 < forecast.wait(0, 200) < 0.2


def test_time_to_plan_is_left() -> None:
    forecast = make_forecast()
    before = forecast.wait(4, 0)
    forecast.launched(0.005)
    assert forecast.wait(4, 0) == pytest.approx(before - 0.010)
    forecast.launched(0.1)
    assert forecast.wait(4, 0) == 0


def make_driver(monkeypatch: pytest.MonkeyPatch, **settings: object) -> Driver:
    """A loop that expects each step to take ten seconds."""
    monkeypatch.setattr(Forecast, "wait", lambda *_: 10.0)
    merged = {**SIZES, "use_async_batching": True, **settings}
    return Driver(FakeModel(max_model_len=64), InlineDevice(), EngineConfig().merged(merged))


def test_a_newcomer_joins_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(monkeypatch)
    pipeline, deadlines = driver.parts.pipeline, []

    def doze(deadline: float) -> None:
        if not deadlines:
            driver.submit([4, 5, 6], max_new_tokens=4)
        deadlines.append(deadline)

    monkeypatch.setattr(pipeline, "doze", doze)
    driver.submit([1, 2, 3], max_new_tokens=20)
    driver.turn()
    first = pipeline.oldest()
    driver.turn()
    assert deadlines[0] == pytest.approx(first.at + 10)
    assert driver.driven[1].request.row >= 0, "who came during the first step is not in the second"
    driver.run()
    driver.check()


@pytest.mark.parametrize("why", ["", "one slot", "somebody waits", "no row is free", "paused", "stopping"])
def test_no_time_is_lost_where_nobody_could_join(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    driver = make_driver(monkeypatch, use_async_batching=why != "one slot")
    dozed: list[float] = []
    monkeypatch.setattr(driver.parts.pipeline, "doze", dozed.append)
    for _ in range(5 if why == "somebody waits" else 1):
        driver.submit([1, 2, 3], max_new_tokens=20)
    driver.turn()
    if why == "no row is free":
        monkeypatch.setattr(type(driver.parts.rows), "num_free", 0)
    elif why in ("paused", "stopping"):
        driver.pause() if why == "paused" else driver.stop(drain=False)
        driver.turn()  # only after its sleep does it hear of that
        dozed.clear()
    driver.turn()
    assert bool(dozed) == (not why)
