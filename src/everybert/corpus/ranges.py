"""Two small tools for arrays of runs."""

import numpy as np


def offsets(counts: np.ndarray) -> np.ndarray:
    """int64 running sum that begins with 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: the numbers starts[i] … starts[i] + counts[i] − 1 for every i, end to end."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)
