"""The randomness of sampling, as a pure function of (seed, position).

There is no generator and no state: the number that decides the token at a position depends on the request's seed and on
that position alone, so it is the same alone, in a crowd, after a preemption or on a prefix hit, and no global generator
is read or moved. Host code: numpy and plain integers, any thread.

The hash is the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014, with Stafford's "variant 13" multipliers), used twice: over the seed, which scatters neighbouring seeds
over all 64-bit states, and over that state plus the position times the golden ratio, which is SplitMix64's own sequence
started there. Why it is good enough: SplitMix64 passes BigCrush, both steps are bijections of 64 bits (so positions of
one seed never repeat a state), and a request takes one number a token, a few thousand of 2**64 states: two requests
would have to start within that distance of each other to share numbers. It is not a cryptographic generator: whoever
knows the seed knows the draws.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: multiples of it visit every state
_SIBLING = 0xD1B54A32D192ED03  # another odd constant, so that seeds of siblings are no points of the parent's sequence
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The uniform number in [0, 1) that belongs to each (seed, position).

    Args:
        seeds: uint64 [N].
        positions: int64 [N], the index of the token to be drawn in its own sequence.

    Returns:
        float32 [N], multiples of 2**-24: every value is exact in float32 and the largest is 1 - 2**-24.
    """
    state = _mix_array(seeds.astype(np.uint64) + np.uint64(_GOLDEN))
    state += (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    # The upper 24 bits are the best mixed ones, and as many as a float32 in [0, 1) can hold evenly spaced.
    return (_mix_array(state) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def derive_seed(seed: int, index: int) -> int:
    """The seed of sibling `index` (from 0) of whatever has this seed: an int in [0, 2**64).

    Sibling 0 keeps the seed itself, so that the first of n answers is the answer that n=1 gives. The others differ from
    each other by construction, and from the seed but for a chance of 2**-64.
    """
    if index == 0:
        return seed & _MASK
    return _mix(_mix(seed ^ _SIBLING) + index * _SIBLING)


def _mix_array(z: np.ndarray) -> np.ndarray:
    # Array arithmetic on uint64 wraps without a warning; scalars would warn, so `z` is always an array here.
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return z ^ (z >> np.uint64(31))


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
    return z ^ (z >> 31)
