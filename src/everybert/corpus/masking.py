"""Masked tokens: which tokens of a pack the model has to predict, and the generator that draws them.

The generator has no state: every random number is a hash of a key (made of the seed, the epoch, the example, …) and
an index. So it is the same in every worker and rank, in any order, and with any version of numpy.

The masking strategies (tokens, whole words, spans, collocations) differ only in their units: runs of tokens that are
masked together. A mask depends on the example's key and on the positions within the example, not on its pack.

Legend: T tokens in the pack, B sequences, P parts, U units, R runs of words, K tiles, M masked, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from everybert.corpus.shards import ExampleLayout, offsets, ranges
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.corpus.pmi import Phrases

# ── the generator ───────────────────────────────────────────────────────────────────────────────────────────

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / golden ratio, odd: its multiples visit all 64-bit numbers


def _uint64(x: ArrayLike) -> np.ndarray:
    if isinstance(x, int):
        return np.full((1,), x & ((1 << 64) - 1), dtype=np.uint64)  # arrays wrap silently, numpy scalars warn
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)


def bits(key: ArrayLike, index: ArrayLike) -> np.ndarray:
    """uint64: number `index` of the SplitMix64 stream (Steele et al. 2014) that starts at `key`. Shapes broadcast."""
    z = _uint64(key) + (_uint64(index) + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def make_key(*words: ArrayLike) -> np.ndarray:
    """uint64 key of a tuple of integers or integer arrays. The order matters."""
    key = _uint64(0)
    for word in words:
        key = bits(key ^ _uint64(word), 0)
    return key


def uniform(key: ArrayLike, index: ArrayLike) -> np.ndarray:
    """float64 in [0, 1) with 53 random bits."""
    return (bits(key, index) >> np.uint64(11)) * 2.0**-53


def below(key: ArrayLike, index: ArrayLike, limit: ArrayLike) -> np.ndarray:
    """int64 in 0 … limit − 1, equally likely (to one part in 2⁵³ / limit)."""
    return (uniform(key, index) * np.asarray(limit)).astype(np.int64)


def permutation(key: ArrayLike, n: int) -> np.ndarray:
    """int64: a random order of the numbers 0 … n − 1."""
    return np.argsort(bits(key, np.arange(n)), kind="stable")


# ── masks ───────────────────────────────────────────────────────────────────────────────────────────────────

Strategy = Literal["token", "word", "span", "pmi"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class MaskingConfig:
    """Which tokens the model predicts."""

    rate: float = 0.15
    """Share of the text's tokens that are predicted (special tokens do not count)."""
    strategy: Strategy = "token"
    """token; word: whole words; span: SpanBERT's runs of words; pmi: collocations of the corpus, else words."""
    mask_share: float = 0.8
    """Share of the predicted tokens that are replaced by the mask token."""
    random_share: float = 0.1
    """Share of the predicted tokens that are replaced by a random token. The rest stay unchanged."""
    replacement: Literal["uniform", "unigram"] = "uniform"
    """Distribution of random tokens: uniform, or their frequency in the corpus."""
    static_duplicates: int | None = None
    """None: new masks every epoch. N: the examples of epoch e are those of epoch e mod N, as in BERT (10)."""
    span_p: float = 0.2
    """Parameter of the geometric distribution of span lengths, in words."""
    span_max: int = 10
    """Longest span, in words."""

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise EverybertError(f"masking strategy {self.strategy!r} is unknown: it is {', '.join(STRATEGIES)}")
        if self.replacement not in ("uniform", "unigram"):
            raise EverybertError(f"replacement {self.replacement!r} is unknown: choose uniform or unigram")
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1 + 1e-9:
            raise EverybertError("mask_share and random_share must not be negative nor exceed 1 together")
        if self.static_duplicates is not None and self.static_duplicates < 1:
            raise EverybertError("static_duplicates counts the fixed copies: give 1 or more, or leave it out")
        if not (0 < self.span_p < 1 and self.span_max >= 1):
            raise EverybertError("span_p must lie between 0 and 1, and span_max be 1 or more")
        self.check_rate(self.rate)

    def check_rate(self, rate: float) -> None:
        """Raise an error for a rate that cannot be met: spans leave a word between them."""
        length = np.arange(1, self.span_max + 1)
        mean = length @ self.span_lengths()
        most = 0.9 * mean / (mean + 1) if self.strategy == "span" else 1
        if not 0 < rate <= most:
            raise EverybertError(f"a masking rate of {rate} must be above 0 and at most {most:.2f}")

    def span_lengths(self) -> np.ndarray:
        """P(ℓ) ∝ p (1 − p)^(ℓ − 1), ℓ = 1 … span_max (Joshi et al. 2020, section 3.1)."""
        weight = (1 - self.span_p) ** np.arange(self.span_max)
        return weight / weight.sum()


class PackText(NamedTuple):
    """The tokens of a pack and the positions of its text between the special tokens."""

    tokens_T: np.ndarray
    sequence_offsets_B1: np.ndarray
    part_start_P: np.ndarray
    """Index in the pack of each part's first token."""
    part_length_P: np.ndarray
    part_sequence_P: np.ndarray


class Units(NamedTuple):
    """Runs of tokens that are masked together, in the order of the pack."""

    start_U: np.ndarray
    size_U: np.ndarray
    sequence_U: np.ndarray


class Masked(NamedTuple):
    """A masked pack."""

    tokens_T: np.ndarray
    """The model's input."""
    index_M: np.ndarray
    """int64 positions to predict, increasing."""
    label_M: np.ndarray
    """int64 original tokens at these positions."""
    unit_start_M: np.ndarray
    """int64 first position of the unit."""
    unit_stop_M: np.ndarray
    """int64 position after its end. The boundary objective reads the positions start − 1 and stop of a span."""


class Masker:
    """Masks packs. Holds the tables of its strategy."""

    def __init__(
        self,
        config: MaskingConfig,
        layout: ExampleLayout,
        unigram: np.ndarray | None = None,
        phrases: "Phrases | None" = None,
    ):
        self.config, self.layout = config, layout
        if config.strategy == "pmi" and phrases is None:
            raise EverybertError("pmi masking needs collocations: run `everybert corpus build` with --pmi")
        self.phrases = phrases if config.strategy == "pmi" else None
        self.ordinary = np.flatnonzero(~layout.special_V)
        self.cumulative: np.ndarray | None = None
        if config.replacement == "unigram":
            if unigram is None:
                raise EverybertError("unigram replacements need the token counts of the corpus")
            self.cumulative = np.cumsum(unigram[self.ordinary])
        lengths = config.span_lengths()
        self.span_cdf = np.cumsum(lengths)[:-1]  # the last is 1 up to rounding
        # A renewal process at a random time: the rest r of a tile (a span and the word after it) has
        # P(r) ∝ P(tile ≥ r), so that every position of a sequence is equally likely to be in a span.
        at_least = np.append(1.0, np.cumsum(lengths[::-1])[::-1])
        self.first_cdf = np.cumsum(at_least / at_least.sum())[:-1]

    def __call__(self, text: PackText, key_B: np.ndarray, rate: float | None = None) -> Masked:
        """Mask a pack; each sequence has its own key. `rate` replaces the configured one."""
        rate = self.config.rate if rate is None else rate
        self.config.check_rate(rate)
        units, text_B = self.units(text, key_B)
        chosen = choose_units(units, text.sequence_offsets_B1, key_B, text_B * rate)
        start, size = units.start_U[chosen], units.size_U[chosen]
        index = ranges(start, size)
        sequence = np.repeat(units.sequence_U[chosen], size)
        unit_start = np.repeat(start, size)
        label = text.tokens_T[index]
        # SpanBERT draws mask, random or unchanged once per span; BERT draws it for each token.
        place = (unit_start if self.config.strategy == "span" else index) - text.sequence_offsets_B1[sequence]
        draw = uniform(make_key(key_B, 2)[sequence], place)
        tokens = text.tokens_T.copy()
        tokens[index[draw < self.config.mask_share]] = self.layout.mask_id
        random = (draw >= self.config.mask_share) & (draw < self.config.mask_share + self.config.random_share)
        at = index[random] - text.sequence_offsets_B1[sequence[random]]
        tokens[index[random]] = self.replacements(make_key(key_B, 3)[sequence[random]], at)
        return Masked(tokens, index, label, unit_start, unit_start + np.repeat(size, size))

    def replacements(self, key: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Random tokens, never special ones."""
        if self.cumulative is None:
            return self.ordinary[below(key, index, len(self.ordinary))]
        draw = below(key, index, self.cumulative[-1])
        return self.ordinary[np.searchsorted(self.cumulative, draw, side="right")]

    def units(self, text: PackText, key_B: np.ndarray) -> tuple[Units, np.ndarray]:
        """The units of a pack, and the number of tokens in each sequence that may be masked."""
        place = ranges(text.part_start_P, text.part_length_P)
        token = text.tokens_T[place]
        special = self.layout.special_V[token]
        begins_unit = np.ones(len(place), bool)
        if self.config.strategy != "token":
            begins_unit = ~self.layout.continues_V[token] | special
            begins_unit[1:] |= special[:-1] | (np.diff(place) > 1)
            begins_unit[:1] = True
        if self.phrases is not None:
            begins_unit = self.phrases.join(token, begins_unit, np.append(np.diff(place) > 1, True))
        begin = np.flatnonzero(begins_unit)
        size = np.diff(np.append(begin, len(place)))
        ordinary = ~special[begin]
        begin, size = begin[ordinary], size[ordinary]
        sequence = np.repeat(text.part_sequence_P, text.part_length_P)[begin]
        units = Units(place[begin], size, sequence)
        text_B = np.bincount(sequence, size, minlength=len(key_B))
        if self.config.strategy == "span":
            units = self.spans(units, text.sequence_offsets_B1, key_B)
        return units, text_B

    def spans(self, words: Units, sequence_offsets_B1: np.ndarray, key_B: np.ndarray) -> Units:
        """Tile each run of words with spans of geometric length, one word apart.

        Example: a run of ten words, and the lengths 2, 3, 1, 4, … drawn for its tiles, each a span and the word after
        it. The tiles begin at words 0, 3, 7 and 9; the spans are the words 0–1, 3–5, 7 and 9 (of four, one is left).
        The words between them (2, 6, 8) are in no unit, so this mask leaves them as they are.
        """
        end_U = words.start_U + words.size_U
        first_R = np.flatnonzero(words.start_U != np.append(-1, end_U)[:-1])  # the run's first word
        words_R = np.diff(np.append(first_R, len(end_U)))
        sequence_R = words.sequence_U[first_R]
        key_R = make_key(make_key(key_B, 4)[sequence_R], words.start_U[first_R] - sequence_offsets_B1[sequence_R])
        tiles_R = words_R // 2 + 2  # enough: all but the first have two words or more
        number_K = ranges(np.zeros_like(tiles_R), tiles_R)  # of the tile in its run
        draw_K = uniform(np.repeat(key_R, tiles_R), number_K)
        first_length_K, length_K = np.searchsorted(self.first_cdf, draw_K), np.searchsorted(self.span_cdf, draw_K) + 1
        length_K = np.where(number_K == 0, first_length_K, length_K)
        begin_K = offsets(length_K + 1)[:-1]
        begin_K -= np.repeat(begin_K[number_K == 0], tiles_R)  # the words of the run before the tile
        length_K = np.minimum(length_K, np.repeat(words_R, tiles_R) - begin_K)
        real = length_K > 0
        first_U = (np.repeat(first_R, tiles_R) + begin_K)[real]
        start_U = words.start_U[first_U]
        return Units(start_U, end_U[first_U + length_K[real] - 1] - start_U, words.sequence_U[first_U])


def next_tokens(text: PackText, reverse: bool) -> Masked:
    """The targets of a causal model: nothing is masked; the target of a token is the next (reverse: previous) one."""
    edge = text.sequence_offsets_B1[:-1] if reverse else text.sequence_offsets_B1[1:] - 1
    index = np.delete(np.arange(len(text.tokens_T)), edge)
    return Masked(text.tokens_T, index, text.tokens_T[index + (-1 if reverse else 1)], index, index + 1)


def choose_units(units: Units, sequence_offsets_B1: np.ndarray, key_B: np.ndarray, budget_B: np.ndarray) -> np.ndarray:
    """Indices of the units to mask: `budget_B` tokens of each sequence, up to one unit more or less.

    The units of a sequence are placed on a circle in random order, the circle is rotated at random, and the units
    that begin in the arc from 0 to the budget are taken. So every unit is equally likely, long or short; the
    expected number of tokens is exactly the budget; the number of single tokens is the budget rounded up or
    down; and a higher rate only adds units to those of a lower rate.
    """
    sequence, size = units.sequence_U, units.size_U
    shuffle = bits(make_key(key_B, 0)[sequence], units.start_U - sequence_offsets_B1[sequence])
    order = np.argsort((sequence.astype(np.uint64) << np.uint64(44)) | (shuffle >> np.uint64(20)))
    before = offsets(size[order])[:-1]  # order moves units within their sequence only
    total_B = np.bincount(sequence, size, minlength=len(key_B))
    before = before - offsets(total_B.astype(np.int64))[sequence]
    turned = before + (uniform(make_key(key_B, 1), 0) * total_B)[sequence]
    turned -= np.where(turned >= total_B[sequence], total_B[sequence], 0)
    return np.sort(order[turned < budget_B[sequence]])
