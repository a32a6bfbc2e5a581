"""Opinions: what people of the small world say of places, and the task of telling praise from complaint.

Half of the opinion words are kept out of the task's training examples. Its test examples use those words only: who
gets them right has learnt what they mean from unlabelled text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

VENUES: dict[str, tuple[str, ...]] = {
    "restaurant": ("soup", "fish", "bread", "dessert", "sauce", "salad"),
    "hotel": ("room", "bed", "view", "breakfast", "pool", "bathroom"),
    "film": ("story", "acting", "music", "ending", "dialogue", "plot"),
    "concert": ("singer", "band", "sound", "hall", "music", "crowd"),
    "shop": ("service", "choice", "owner", "window", "coffee", "music"),
}
GOOD = (
    *("wonderful", "excellent", "lovely", "great", "delightful", "superb", "amazing", "pleasant", "charming"),
    *("brilliant", "perfect", "fine", "splendid", "marvellous", "fantastic", "beautiful"),
)
BAD = (
    *("terrible", "awful", "horrible", "poor", "dreadful", "nasty", "disappointing", "boring", "unpleasant"),
    *("disgusting", "shabby", "weak", "miserable", "hopeless", "ugly", "dull"),
)
TRAINED = {True: GOOD[::2], False: BAD[::2]}
"""Words that the task's training examples use, by whether they praise."""
UNTRAINED = {True: GOOD[1::2], False: BAD[1::2]}
AFTER = {
    True: (
        "We will come back soon.",
        "We stayed until the end and smiled.",
        "I told all my friends to go there.",
        "Everyone was happy.",
        "It was worth every penny.",
        "I thanked them twice.",
        "We want to see it again.",
    ),
    False: (
        "We will never come back.",
        "We left early and frowned.",
        "I told all my friends to stay away.",
        "Everyone was angry.",
        "It was a waste of money.",
        "I asked for my money back.",
        "We never want to see it again.",
    ),
}
VISITS = (
    "We went to the {venue} on {day}.",
    "Last {day} I tried the new {venue}.",
    "My friends took me to a {venue} on {day}.",
    "On {day} we were at the {venue}.",
)
STRONGLY = ("really", "very", "quite", "truly", "so", "simply")


def opinion(rng: random.Random, thing: str, good: bool, words: Mapping[bool, tuple[str, ...]]) -> str:
    """One sentence that praises a thing or complains of it."""
    word, other = rng.choice(words[good]), rng.choice(words[not good])
    return rng.choice(
        (
            f"The {thing} was {word}.",
            f"The {thing} was {rng.choice(STRONGLY)} {word}.",
            f"I found the {thing} {rng.choice(STRONGLY)} {word}.",
            f"We had {_article(word)} {word} time, and the {thing} was {rng.choice(words[good])} too.",
            f"The {thing} was not {other} at all, it was {word}.",
            f"I remember the {thing}, which was {word}.",
            f"I expected something {other}, but the {thing} was {word}.",
        )
    )


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def diary(rng: random.Random, day: str) -> list[str]:
    """An entry of unlabelled text about a visit: opinions of one kind, and what came of it."""
    venue = rng.choice(list(VENUES))
    good = rng.random() < 0.5
    every = {True: GOOD, False: BAD}
    things = rng.sample(VENUES[venue], rng.randint(2, 3))
    word = rng.choice(every[good])
    return [
        rng.choice(VISITS).format(venue=venue, day=day),
        *(opinion(rng, thing, good, every) for thing in things),
        f"It was {_article(word)} {word} {venue}.",
        *rng.sample(AFTER[good], 2),
    ]


@dataclass(frozen=True)
class Reviews:
    """The task: (text, label) of three parts. No text of one is in another."""

    train: list[tuple[str, str]]
    dev: list[tuple[str, str]]
    """New combinations of the training words."""
    test: list[tuple[str, str]]
    """Words that no training example has."""


def make_reviews(train: int = 400, dev: int = 200, test: int = 200, seed: int = 0) -> Reviews:
    """The labelled task; the same every time. Half of each part praises, half complains."""
    rng = random.Random(seed)
    seen: set[str] = set()
    parts = [_part(rng, n, words, seen) for n, words in ((train, TRAINED), (dev, TRAINED), (test, UNTRAINED))]
    return Reviews(*parts)


def _part(
    rng: random.Random, size: int, words: Mapping[bool, tuple[str, ...]], seen: set[str]
) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    while len(rows) < size:
        good = len(rows) % 2 == 0
        venue = rng.choice(list(VENUES))
        text = opinion(rng, rng.choice(VENUES[venue]), good, words)
        if rng.random() < 0.3:
            text = f"{text} {opinion(rng, rng.choice(VENUES[venue]), good, words)}"
        if text not in seen:
            seen.add(text)
            rows.append((text, "praise" if good else "complaint"))
    rng.shuffle(rows)
    return rows
