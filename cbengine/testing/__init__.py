"""For testing what you build on cbengine: no checkpoint, no GPU, milliseconds a test, and answers that are known.

`FakeModel` takes the place of a model. It is deterministic, reads its cache as a real one does, and `reference` tells
what it answers:

    from cbengine import AsyncEngine
    from cbengine.testing import FakeModel

    async def test_my_bot_streams_the_whole_answer():
        model = FakeModel()
        async with AsyncEngine(model=model) as engine:
            said = [tok.id async for tok in engine.stream("hello", max_new_tokens=20)]
        assert said == model.reference(model.tokenizer.encode("hello"), max_new_tokens=20)

A slow model, and one that breaks:

    FakeModel(delay=0.05)             # each step takes 50 ms: time to cancel, to time out, to fall behind

    def fault(inputs):                # runs at the head of every step
        raise RuntimeError("planted")

    FakeModel(fault=fault)            # how does my app take RequestFailedError?

Its text is made by `FakeTokenizer`, one character a token. `FakeModel(free=True)` costs nothing at all, for measuring
everything around it.

`SimDevice` is a device that runs its streams in a seeded legal order and raises `RaceError` where two operations are
not ordered, and `SimDeadlock` where the host waits for ever. It is for those who change the engine or write a device.
"""

from __future__ import annotations

from cbengine.testing.fake_model import FakeModel
from cbengine.testing.fake_tokenizer import FakeTokenizer
from cbengine.testing.races import RaceError
from cbengine.testing.sim import SimDeadlock, SimDevice

__all__ = ["FakeModel", "FakeTokenizer", "RaceError", "SimDeadlock", "SimDevice"]
