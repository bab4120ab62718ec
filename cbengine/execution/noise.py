"""The randomness of sampling, as a pure function of (seed, position).

There is no generator and no state: the number that decides the token at a position depends on the request's seed and on
that position alone, so it is the same alone, in a crowd, after a preemption or on a prefix hit, and no global generator
is read or moved. Host code: numpy and plain integers, any thread.

The hash is the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014) with Stafford's "variant 13" multipliers, used twice: once over the seed, which scatters neighbouring seeds
over all of the 64-bit state, and once over that state plus a multiple of the golden ratio for the position, which is
SplitMix64's own sequence started there. SplitMix64 passes BigCrush, each of the two steps is a bijection of 64 bits, and one
number a token is drawn, so a stream uses a few thousand of the 2**64 states: two requests would have to start within that
distance of each other to share numbers. It is no cryptographic generator: whoever knows the seed knows the draws.
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
    """The seed of sibling `index` of a request with this seed, in [0, 2**64). Sibling 0 keeps the request's own seed,
    so it says what the same request with `n=1` says. Siblings of one request never share a seed by construction, but
    for number 0, which meets another with a chance of 2**-64."""
    if index == 0:
        return seed
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
