"""Randomness without state: every draw is a hash of what it is for.

A draw is named by its key (made of the seed, the epoch, the example, …) and its index, so it is the same on
whichever worker or rank it is made, in whatever order, and with any version of numpy.
"""

import numpy as np
from numpy.typing import ArrayLike

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / golden ratio, odd: multiples of it visit all 64-bit numbers
LOW_64 = (1 << 64) - 1


def _finalise(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uint64(x: ArrayLike) -> np.ndarray:
    if isinstance(x, int):
        x = x & LOW_64
        return np.full((1,), x, dtype=np.uint64)  # arrays wrap silently where numpy scalars warn
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)


def bits(key: ArrayLike, index: ArrayLike) -> np.ndarray:
    """uint64: number `index` of the SplitMix64 stream that starts at `key`. Shapes broadcast."""
    return _finalise(_uint64(key) + (_uint64(index) + np.uint64(1)) * GOLDEN)


def make_key(*words: ArrayLike) -> np.ndarray:
    """uint64 key of a tuple of integers or integer arrays; another order gives another key."""
    key = _uint64(0)
    for word in words:
        key = bits(key ^ _uint64(word), 0)
    return key


def uniform(key: ArrayLike, index: ArrayLike) -> np.ndarray:
    """float64 in [0, 1), 53 bits of it random."""
    return (bits(key, index) >> np.uint64(11)) * 2.0**-53


def below(key: ArrayLike, index: ArrayLike, limit: ArrayLike) -> np.ndarray:
    """int64 in 0 … limit − 1, equally likely (to one part in 2⁵³ / limit)."""
    return (uniform(key, index) * np.asarray(limit)).astype(np.int64)


def permutation(key: ArrayLike, n: int) -> np.ndarray:
    """int64: the numbers 0 … n − 1 in an order of their own for each key."""
    return np.argsort(bits(key, np.arange(n)), kind="stable")
