"""The uniform numbers: even, unrelated, and a function of (seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest

from cbengine.execution.noise import derive_seed, uniforms

N = 200_000


def by_position(n: int = N, seed: int = 3) -> np.ndarray:
    return uniforms(np.full(n, seed, np.uint64), np.arange(n))


def by_seed(n: int = N, position: int = 3) -> np.ndarray:
    return uniforms(np.arange(n, dtype=np.uint64), np.full(n, position))


def by_sibling(n: int = 20_000) -> np.ndarray:
    """The first tokens of many requests' second answers, and of many answers of one request."""
    seeds = [derive_seed(i, 1) for i in range(n // 2)] + [derive_seed(77, i) for i in range(n // 2)]
    return uniforms(np.array(seeds, np.uint64), np.zeros(n, np.int64))


SEQUENCES = pytest.mark.parametrize("sequence", [by_position, by_seed, by_sibling])


@SEQUENCES
@pytest.mark.parametrize("shift", [16, 8, 0], ids=["high bits", "middle bits", "low bits"])
def test_every_byte_is_even(sequence, shift: int) -> None:  # type: ignore[no-untyped-def]
    numbers = (sequence().astype(np.float64) * 2**24).astype(np.int64)
    counts = np.bincount((numbers >> shift) & 255, minlength=256)
    expected = len(numbers) / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 255) < 4 * (2 * 255) ** 0.5  # not too uneven, and not too even


@SEQUENCES
def test_neighbours_are_unrelated(sequence) -> None:  # type: ignore[no-untyped-def]
    numbers = sequence().astype(np.float64)
    for lag in (1, 2, 3, 64):
        correlation = float(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1])
        assert abs(correlation) < 4 / len(numbers) ** 0.5


@SEQUENCES
def test_pairs_of_neighbours_are_even(sequence) -> None:  # type: ignore[no-untyped-def]
    cells = (sequence()[: N // 2 * 2] * 16).astype(np.int64)
    counts = np.bincount(cells[::2] * 16 + cells[1::2], minlength=256)
    expected = len(cells) / 2 / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 255) < 4 * (2 * 255) ** 0.5


def test_seeds_and_positions_are_not_interchangeable() -> None:
    rows, columns = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    grid = uniforms(rows.ravel(), columns.ravel())
    # 90,000 numbers out of 2**24 meet about 240 times by chance; a symmetry would make them meet 45,000 times.
    assert len(grid) - len(np.unique(grid)) < 350


def test_in_zero_to_one_in_steps_of_float32() -> None:
    numbers = by_position()
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.array_equal(numbers * 2**24, np.floor(numbers * 2**24))
    # Two of the positions at which seed 0 meets the ends.
    ends = uniforms(np.zeros(2, np.uint64), np.array([7_925_055, 26_683_238]))
    assert ends.tolist() == [0.0, 1.0 - 2.0**-24]


def test_depends_on_nothing_but_seed_and_position() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 500, np.uint64)
    positions = rng.integers(0, 2**40, 500)
    together = uniforms(seeds, positions)
    order = rng.permutation(500)
    assert np.array_equal(uniforms(seeds[order], positions[order]), together[order])
    for i in range(0, 500, 50):
        assert uniforms(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    before = np.random.get_state(legacy=False)
    uniforms(seeds, positions)
    assert str(np.random.get_state(legacy=False)) == str(before)
    assert uniforms(seeds[:0], positions[:0]).shape == (0,)


def test_arguments_are_left_alone() -> None:
    seeds, positions = np.arange(5, dtype=np.uint64), np.arange(5)
    uniforms(seeds, positions)
    assert seeds.tolist() == positions.tolist() == [0, 1, 2, 3, 4]


def test_the_numbers_never_change() -> None:
    """A seed written down today gives the same answer with every later version."""
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    expected = [0.6524484753608704, 0.7012121081352234, 0.3681895136833191, 0.15403342247009277]
    assert uniforms(seeds, np.array([0, 1, 0, 5])).tolist() == expected
    assert derive_seed(0, 1) == 6312006425206895752
    assert derive_seed(12345, 2) == 10538363429553719414


def test_siblings() -> None:
    assert derive_seed(2**64 - 1, 0) == 2**64 - 1
    for seed in (0, 1, 2**63, 2**64 - 1):
        seeds = [derive_seed(seed, i) for i in range(2000)]
        assert len(set(seeds)) == 2000
        assert all(0 <= s < 2**64 for s in seeds)
    assert len({derive_seed(seed, i) for seed in range(200) for i in range(1, 20)}) == 200 * 19
