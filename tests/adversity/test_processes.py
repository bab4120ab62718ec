"""Programs end: by Ctrl-C, by an error, or because they are through, and whether or not anybody stopped the engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversity.scripts import Ended, forking, run

IN_A_BLOCK = """
async def main():
    async with new_engine(delay=0.002) as engine, asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(read(engine, number))
"""

WITHOUT_A_BLOCK = """
kept = []

async def main():
    engine = new_engine(delay=0.002)
    await engine.start()
    kept.extend(engine.stream(PROMPT + [n + 2], max_new_tokens=3000, ignore_eos=True) for n in range(8))
    await asyncio.gather(*[read(engine, number) for number in range(8)])
"""

RUN = "\nasyncio.run(main())\n"
RUN_UVLOOP = "\nimport uvloop\nwith asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner: runner.run(main())\n"


@pytest.fixture(scope="module", autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    if forking.cache_info().currsize:
        forking().communicate(timeout=30)
        forking.cache_clear()


def _interrupted(script: str, limit: float = 2.0, **options: bool) -> Ended:
    """Ctrl-C has to be obeyed within the limit; on a busy machine, at the second attempt at the latest."""
    ended = run(script, interrupt=True, **options)
    if ended.seconds > limit:
        ended = run(script, interrupt=True, **options)
    print(f"{ended.seconds:.3f} s from Ctrl-C to the end")
    assert ended.seconds < limit
    assert ended.threads == []
    return ended


@pytest.mark.parametrize(
    "script",
    [IN_A_BLOCK + RUN, WITHOUT_A_BLOCK + RUN, IN_A_BLOCK + RUN_UVLOOP],
    ids=["in a block", "without a block", "uvloop"],
)
def test_ctrl_c_ends_a_program_with_live_streams(script: str) -> None:
    ended = _interrupted(script)
    assert ended.code == -signal.SIGINT
    assert ended.noise == []
    assert ended.err.rstrip().endswith("KeyboardInterrupt")
    # asyncio.run shows the cancelled task and, after it, the KeyboardInterrupt; there is nothing of ours beside.
    assert ended.err.count("Traceback (most recent call last)") <= 2


def test_ctrl_c_ends_a_program_with_a_real_model(smollm2: Path) -> None:
    ended = _interrupted(
        f"""
async def main():
    async with AsyncEngine({str(smollm2)!r}, page_size=16, num_blocks=256) as engine, asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(talk(engine, number))

async def talk(engine, number):
    async for token in engine.stream(f"The number {{number}} is", max_new_tokens=900, ignore_eos=True):
        if number == 0 and token.index == 1:
            print("ready", flush=True)
{RUN}""",
        fresh=True,
    )
    assert ended.code == -signal.SIGINT
    assert ended.noise == []
    assert ended.err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_that_is_handled_leaves_silence() -> None:
    ended = _interrupted(f"""
{IN_A_BLOCK}
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("bye")
""")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("bye\n")


QUIET = {
    "never started": "engine = new_engine()",
    "never stopped": """
engine = new_engine()
async def main():
    await engine.start()
    print(len((await engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True)).token_ids))
asyncio.run(main())
""",
    "dropped in the middle of a stream": """
async def main():
    engine = new_engine(delay=0.002)
    await engine.start()
    stream = engine.stream(PROMPT, max_new_tokens=3000, ignore_eos=True)
    async for token in stream:
        if token.index == 2:
            break
    del engine, stream
asyncio.run(main())
""",
    "streams that outlive their loop, and the engine": """
kept = []
async def main():
    engine = new_engine(delay=0.002)
    await engine.start()
    kept.append(engine.stream(PROMPT, max_new_tokens=3000, ignore_eos=True))
    await kept[0].__anext__()
    kept.append(engine.stream("long text " * 1000))
    kept.append(engine)
asyncio.run(main())
""",
    "ended while a step is computed": """
kept = []
async def main():
    engine = new_engine(delay=0.5)
    await engine.start()
    kept.append(engine.stream(PROMPT, max_new_tokens=3000, ignore_eos=True))
    await asyncio.sleep(0.1)
asyncio.run(main())
""",
    "a loop in a daemon thread": """
import threading
engine = new_engine(delay=0.002)
seen = threading.Event()
async def main():
    await engine.start()
    async for token in engine.stream(PROMPT, max_new_tokens=3000, ignore_eos=True):
        seen.set()
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
assert seen.wait(20)
""",
}


@pytest.mark.parametrize("name", QUIET)
def test_a_program_that_is_through_ends(name: str) -> None:
    ended = run(QUIET[name])
    assert (ended.code, ended.err, ended.threads) == (0, "", [])


def test_exit_in_the_middle_of_a_stream() -> None:
    ended = run("""
async def main():
    engine = new_engine(delay=0.002)
    await engine.start()
    others = [asyncio.create_task(read(engine, number)) for number in range(4)]
    async for token in engine.stream(PROMPT, max_new_tokens=3000, ignore_eos=True):
        if token.index == 3:
            sys.exit(3)
asyncio.run(main())
""")
    assert (ended.code, ended.err, ended.threads) == (3, "", [])


def test_an_error_in_the_middle_of_a_stream_is_all_that_is_shown() -> None:
    ended = run("""
async def main():
    async with new_engine(delay=0.002) as engine:
        others = [asyncio.create_task(read(engine, number)) for number in range(4)]
        async for token in engine.stream(PROMPT, max_new_tokens=3000, ignore_eos=True):
            if token.index == 3:
                for other in others:
                    other.cancel()
                raise RuntimeError("mine")
asyncio.run(main())
""")
    assert ended.code == 1 and ended.noise == []
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.rstrip().endswith("RuntimeError: mine")
