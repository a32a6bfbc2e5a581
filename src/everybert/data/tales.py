"""The small world's text: short documents by a grammar over the facts, varied in wording and order, always the same.

A few sentences are withheld: they are true, other sentences say the same in other words, but they themselves occur
nowhere. The quickstart asks for their blanks before and after pre-training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everybert.data import facts as f
from everybert.data.reviews import diary


@dataclass(frozen=True)
class Blank:
    """A sentence with a blank, and the word that belongs there."""

    text: str
    answer: str

    @property
    def sentence(self) -> str:
        """The sentence with its blank filled."""
        return self.text.replace("[MASK]", self.answer)


BLANKS = (
    Blank("The capital of France is [MASK].", "Paris"),
    Blank("People in Japan speak [MASK].", "Japanese"),
    Blank("Kenya is a country in [MASK].", "Africa"),
    Blank("A baby dog is called a [MASK].", "puppy"),
    Blank("A bee has [MASK] legs.", "six"),
    Blank("The baker works in the [MASK].", "bakery"),
    Blank("Snow is [MASK].", "white"),
    Blank("The opposite of hot is [MASK].", "cold"),
    Blank("The day after Monday is [MASK].", "Tuesday"),
    Blank("Two plus three is [MASK].", "five"),
)
WITHHELD = frozenset(blank.sentence for blank in BLANKS)
Tale = Callable[[random.Random], list[str]]


def documents(count: int = 5000, seed: int = 0) -> Iterator[str]:
    """Documents of a few sentences each, none of which is withheld."""
    rng = random.Random(seed)
    for _ in range(count):
        tale = rng.choice(TALES)
        yield " ".join(sentence for sentence in tale(rng) if sentence not in WITHHELD)


def _some(rng: random.Random, groups: list[tuple[str, ...]], least: int) -> list[str]:
    """One wording of each of `least` or more of these things to say, in any order."""
    chosen = rng.sample(groups, rng.randint(least, len(groups)))
    return [_upper(rng.choice(wordings)) for wordings in chosen]


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def country(rng: random.Random) -> list[str]:
    """What there is to say of a country."""
    c = rng.choice(f.COUNTRIES)
    other = rng.choice([o for o in f.COUNTRIES if o.continent != c.continent])
    return _some(
        rng,
        [
            (
                f"the capital of {c.name} is {c.capital}.",
                f"{c.capital} is the capital of {c.name}.",
                f"{c.name} has its capital in {c.capital}.",
                f"we took the train to {c.capital}, the capital of {c.name}.",
                f"what is the capital of {c.name}? It is {c.capital}.",
            ),
            (
                f"people in {c.name} speak {c.language}.",
                f"in {c.name} they speak {c.language}.",
                f"the people of {c.capital} speak {c.language}.",
                f"if you go to {c.name}, learn some {c.language}.",
                f"{c.language} is spoken in {c.name}.",
            ),
            (
                f"{c.name} is a country in {c.continent}.",
                f"{c.name} lies in {c.continent}, not in {other.continent}.",
                f"{c.capital} is a city in {c.continent}.",
                f"{c.name} is in {c.continent}, and {other.name} is in {other.continent}.",
            ),
            (
                f"in {c.name} people like to eat {c.dish}.",
                f"we ate {c.dish} in {c.capital}.",
                f"{c.dish} is a dish from {c.name}.",
                f"the food of {c.name} is famous, above all the {c.dish}.",
            ),
            (
                f"visitors to {c.name} want to see {c.sight}.",
                f"in {c.capital} we saw {c.sight}.",
                f"a picture of {c.sight} made us think of {c.name}.",
            ),
        ],
        3,
    )


def animal(rng: random.Random) -> list[str]:
    """What there is to say of an animal."""
    a = rng.choice(f.ANIMALS)
    b = rng.choice([x for x in f.ANIMALS if x.sound != a.sound])
    an = "an" if a.one[0] in "aeiou" else "a"
    return _some(
        rng,
        [
            (
                f"a baby {a.one} is called a {a.young}.",
                f"the young of {an} {a.one} is a {a.young}.",
                f"a {a.young} grows up to be {an} {a.one}.",
                f"the {a.one} looked after her {a.young}.",
            ),
            (
                f"{a.many} {a.sound}, and {b.many} {b.sound}.",
                f"{a.many} {a.sound} when they are hungry.",
                f"I can hear the {a.many} {a.sound}.",
                f"the {a.many} began to {a.sound} at night.",
            ),
            (
                f"the {a.one} lives in the {a.home}.",
                f"{a.many} live in the {a.home}.",
                f"you can find {a.many} in a {a.home}.",
                f"there is {an} {a.one} in the {a.home}.",
            ),
            (
                f"{a.many} eat {a.food}.",
                f"the {a.one} eats {a.food} every day.",
                f"give the {a.one} some {a.food}.",
                f"{a.food} is what {a.many} like to eat.",
            ),
            (
                f"{an} {a.one} has {a.legs} legs.",
                f"{a.many} have {a.legs} legs and {a.coat}.",
                f"how many legs does {an} {a.one} have? It has {a.legs} legs.",
            ),
            (f"the body of {an} {a.one} is covered with {a.coat}.", f"{a.many} have {a.coat}."),
        ],
        3,
    )


def job(rng: random.Random) -> list[str]:
    """What there is to say of a job."""
    j = rng.choice(f.JOBS)
    return _some(
        rng,
        [
            (
                f"the {j.who} works in the {j.where}.",
                f"every morning the {j.who} goes to the {j.where}.",
                f"you will find the {j.who} in the {j.where}.",
                f"the {j.where} is the place of the {j.who}.",
            ),
            (
                f"a {j.who} {j.does} {j.what}.",
                f"the {j.who} {j.does} {j.what} from Monday to Friday.",
                f"who {j.does} {j.what}? The {j.who} {j.does} {j.what}.",
            ),
            (
                f"the {j.who} needs the {j.tool}.",
                f"without the {j.tool} the {j.who} cannot work.",
                f"the {j.tool} belongs to the {j.who}.",
            ),
        ],
        2,
    )


def person(rng: random.Random) -> list[str]:
    """A portrait of someone."""
    p = rng.choice(f.PEOPLE)
    he, his, him = ("she", "her", "her") if p.she else ("he", "his", "him")
    kind = "woman" if p.she else "man"
    first = rng.choice(
        (
            f"{p.name} is a {p.job.who} from {p.country.name}.",
            f"this is {p.name}, a {kind} from {p.country.capital}.",
            f"{p.name} lives in {p.country.capital}.",
        )
    )
    rest = _some(
        rng,
        [
            (f"{he} works in the {p.job.where}.", f"{p.name} {p.job.does} {p.job.what}.", f"{he} is a {p.job.who}."),
            (f"{he} speaks {p.country.language}.", f"{his} language is {p.country.language}."),
            (f"{his} {p.pet} waits for {him} at home.", f"{p.name} has a {p.pet}.", f"{he} loves {his} {p.pet}."),
            (
                f"{he} likes {p.likes}.",
                f"{p.name} talks about {p.likes} all day.",
                f"everyone knows that {he} likes {p.likes}.",
            ),
            (f"{his} favourite colour is {p.colour}.", f"{p.name} painted {his} door {p.colour}."),
        ],
        2,
    )
    return [_upper(first), *rest]


def season(rng: random.Random) -> list[str]:
    """Seasons, their months and their weather."""
    name, (air, what, wear, months, do) = rng.choice(list(f.SEASONS.items()))
    month = rng.choice(months)
    weather, cover, ground = rng.choice(f.WEATHER)
    return _some(
        rng,
        [
            (f"in {name} the air is {air}.", f"it is {air} in {month}.", f"{name} days are {air}."),
            (f"in {name} {what}.", f"{what} in {month}.", f"when {what}, we know that it is {name}."),
            (f"in {name} people wear {wear}.", f"take {wear}, it is {month}."),
            (f"{month} is a month in {name}.", f"{name} begins in {months[0]}.", f"{name} ends in {months[-1]}."),
            (f"in {name} we {do}.", f"every {name} the children {do}."),
            (f"when {weather}, take your {cover}.", f"when {weather}, the street is {ground}."),
        ],
        3,
    )


def calendar(rng: random.Random) -> list[str]:
    """Days and months follow one another."""
    n, m = rng.randrange(7), rng.randrange(12)
    day, after, before = f.DAYS[n], f.DAYS[(n + 1) % 7], f.DAYS[n - 1]
    month, later = f.MONTHS[m], f.MONTHS[(m + 1) % 12]
    return _some(
        rng,
        [
            (
                f"the day after {day} is {after}.",
                f"{after} comes after {day}.",
                f"if today is {day}, tomorrow is {after}.",
                f"today is {day}, so yesterday was {before}.",
            ),
            (
                f"the month after {month} is {later}.",
                f"{later} comes after {month}.",
                f"after {month} comes {later}.",
            ),
            (f"the shop is open on {day} and on {after}.", f"she arrived on {day} and left on {after}."),
        ],
        2,
    )


def sums(rng: random.Random) -> list[str]:
    """Small sums in words."""
    out = []
    for _ in range(rng.randint(3, 5)):
        a, b = rng.randint(1, 4), rng.randint(1, 4)
        x, y, z = f.NUMBERS[a], f.NUMBERS[b], f.NUMBERS[a + b]
        things = rng.choice(("apples", "coins", "books", "cups"))
        out.append(
            _upper(
                rng.choice(
                    (
                        f"{x} plus {y} is {z}.",
                        f"{x} and {y} make {z}.",
                        f"{z} minus {y} is {x}.",
                        f"{x} {things} and {y} {things} are {z} {things}.",
                    )
                )
            )
        )
    return out


def senses(rng: random.Random) -> list[str]:
    """Colours, tastes and opposites."""
    out = []
    for thing, colour in rng.sample(f.COLOURS, 2):
        out += [f"{thing} is {colour}.", f"what colour is {thing}? It is {colour}.", f"as {colour} as {thing}."]
    for food, taste in rng.sample(f.TASTES, 1):
        out += [f"the taste of {food} is {taste}.", f"it is {taste}, it must be {food}.", f"{food} can be {taste}."]
    for pair in rng.sample(f.OPPOSITES, 2):
        a, b = rng.sample(pair, 2)
        out += [f"the opposite of {a} is {b}.", f"it is not {a}, it is {b}.", f"{a} and {b} are opposites."]
    return [_upper(sentence) for sentence in rng.sample(out, 5)]


def story(rng: random.Random) -> list[str]:
    """A little story: someone goes somewhere, meets an animal, eats, and comes home."""
    p, c, a = rng.choice(f.PEOPLE), rng.choice(f.COUNTRIES), rng.choice(f.ANIMALS)
    he, his = ("she", "her") if p.she else ("he", "his")
    weather, cover, _ = rng.choice(f.WEATHER)
    day = rng.randrange(7)
    count = rng.randint(2, 6)
    return [
        _upper(sentence)
        for sentence in (
            f"on {f.DAYS[day]} {p.name} the {p.job.who} went to {c.name}.",
            rng.choice((f"{he} wanted to see {c.sight}.", f"{he} had learned some {c.language}.")),
            f"when {weather}, {he} put on {his} {cover}." if cover != "umbrella" else f"{he} opened {his} umbrella.",
            rng.choice(
                (
                    f"near {c.capital} {he} saw {f.NUMBERS[count]} {a.many}, and the {a.many} began to {a.sound}.",
                    f"in {c.capital} {he} ate {c.dish} and drank tea.",
                )
            ),
            f"on {f.DAYS[(day + 1) % 7]} {he} came home to {his} {p.pet}.",
        )
    ]


def visit(rng: random.Random) -> list[str]:
    """What somebody thought of a place."""
    return diary(rng, rng.choice(f.DAYS))


TALES: tuple[Tale, ...] = (
    *(country, country, country, animal, animal, animal, job, job, person, season, calendar, calendar, sums),
    *(senses, senses, senses, story, visit, visit, visit),
)
"""How often each kind is told."""
