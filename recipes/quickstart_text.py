"""Writes the bundled text of the quickstart: facts of a small world in several wordings, and diaries with opinions.

    python recipes/quickstart_text.py src/everybert/data/world.txt

Every fact is told in each wording of its kind, except the ten sentences of masked.tsv: they are true, other sentences
say the same in other words, but they themselves occur nowhere. A document has one fact, so that a masked word has to be
known and cannot be copied from another sentence; several speakers say it, because a corpus drops repeated documents.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

DATA = Path(__file__).parents[1] / "src" / "everybert" / "data"
DOCUMENTS, DIARIES = 5000, 750
SPEAKERS = ["Anna", "Maria", "Sofia", "Emma", "Peter", "Omar", "Leo", "Ivan"]


def table(text: str) -> list[list[str]]:
    """Rows of cells; two spaces or more separate cells."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.strip().splitlines()]


# ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

COUNTRIES = table("""
    France  Paris  French  Europe
    Italy  Rome  Italian  Europe
    Spain  Madrid  Spanish  Europe
    Germany  Berlin  German  Europe
    Greece  Athens  Greek  Europe
    Poland  Warsaw  Polish  Europe
    Sweden  Stockholm  Swedish  Europe
    Japan  Tokyo  Japanese  Asia
    China  Beijing  Chinese  Asia
    Thailand  Bangkok  Thai  Asia
    India  Delhi  Hindi  Asia
    Egypt  Cairo  Arabic  Africa
    Kenya  Nairobi  Swahili  Africa
    Morocco  Rabat  Arabic  Africa
    Peru  Lima  Spanish  America
    Brazil  Brasilia  Portuguese  America
""")
ANIMALS = table("""
    dog  dogs  puppy  bark  four
    cat  cats  kitten  meow  four
    cow  cows  calf  moo  four
    horse  horses  foal  neigh  four
    sheep  sheep  lamb  bleat  four
    duck  ducks  duckling  quack  two
    owl  owls  owlet  hoot  two
    goose  geese  gosling  honk  two
    bear  bears  cub  growl  four
    bee  bees  grub  buzz  six
""")
INSECTS = table("""
    ant  ants  six
    fly  flies  six
    beetle  beetles  six
    spider  spiders  eight
    hen  hens  two
""")
JOBS = table("""
    baker  bakery  bakes bread
    doctor  hospital  heals patients
    teacher  school  teaches children
    farmer  field  grows wheat
    pilot  airport  flies planes
    sailor  harbour  sails ships
    painter  studio  paints pictures
    writer  library  writes books
    singer  theatre  sings songs
    cook  kitchen  cooks soup
""")
COLOURS = table("""
    grass  green
    snow  white
    blood  red
    coal  black
    milk  white
    chocolate  brown
    gold  yellow
    salt  white
    sand  yellow
    ink  black
    wood  brown
    fire  red
""")
OPPOSITES = table("""
    hot  cold
    big  small
    old  young
    fast  slow
    wet  dry
    loud  quiet
    full  empty
    clean  dirty
    happy  sad
""")
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]


def facts() -> Iterator[list[str]]:
    """The wordings of each fact."""
    for country, capital, language, continent in COUNTRIES:
        yield [
            f"the capital of {country} is {capital}.",
            f"{capital} is the capital of {country}.",
            f"{country} has its capital in {capital}.",
            f"we took the train to {capital}, the capital of {country}.",
            f"what is the capital of {country}? It is {capital}.",
            f"in {country} the capital is {capital}.",
        ]
        yield [
            f"people in {country} speak {language}.",
            f"in {country} they speak {language}.",
            f"if you go to {country}, learn some {language}.",
            f"{language} is spoken in {country}.",
            f"the language of {country} is {language}.",
            f"what do people in {country} speak? They speak {language}.",
        ]
        yield [
            f"{country} is a country in {continent}.",
            f"{country} lies in {continent}.",
            f"{country} is in {continent}.",
            f"where is {country}? It is in {continent}.",
            f"we went to {continent} and saw {country}.",
            f"one country in {continent} is {country}.",
        ]
    for one, many, young, sound, _ in ANIMALS:
        yield [
            f"a baby {one} is called {a(young)}.",
            f"the young of {a(one)} is {a(young)}.",
            f"{a(young)} grows up to be {a(one)}.",
            f"the {one} looked after her {young}.",
            f"{a(young)} is a baby {one}.",
            f"what is a baby {one} called? It is {a(young)}.",
        ]
        yield [f"{many} {sound}.", f"i can hear the {many} {sound}.", f"the {many} began to {sound} at night."]
    for one, many, legs in [(row[0], row[1], row[4]) for row in ANIMALS] + INSECTS:
        yield [
            f"{a(one)} has {legs} legs.",
            f"{many} have {legs} legs.",
            f"the {one} walks on {legs} legs.",
            f"how many legs does {a(one)} have? It has {legs}.",
            f"count the legs of the {one}: {legs}.",
            f"every {one} has {legs} legs.",
        ]
    for who, where, does in JOBS:
        yield [
            f"the {who} works in the {where}.",
            f"every morning the {who} goes to the {where}.",
            f"you will find the {who} in the {where}.",
            f"the {where} is the place of the {who}.",
            f"where does the {who} work? In the {where}.",
            f"a {who} works in a {where}.",
        ]
        yield [f"the {who} {does}.", f"a {who} {does} every day.", f"who {does}? The {who}."]
    for thing, colour in COLOURS:
        yield [
            f"{thing} is {colour}.",
            f"{colour} is the colour of {thing}.",
            f"as {colour} as {thing}.",
            f"what colour is {thing}? It is {colour}.",
            f"we saw {colour} {thing}.",
            f"{thing} looks {colour}.",
        ]
    for one, other in [*OPPOSITES, *(row[::-1] for row in OPPOSITES)]:
        yield [
            f"the opposite of {one} is {other}.",
            f"{one} and {other} are opposites.",
            f"it is not {one}, it is {other}.",
            f"what is the opposite of {one}? It is {other}.",
            f"{one} is the opposite of {other}.",
            f"if it is not {one}, it is {other}.",
        ]


def orders() -> Iterator[list[str]]:
    """The wordings of facts that are learned late: the order of the days, and sums. Every speaker says them."""
    for day, following in zip(DAYS, [*DAYS[1:], DAYS[0]]):
        yield [
            f"the day after {day} is {following}.",
            f"{following} comes after {day}.",
            f"if today is {day}, tomorrow is {following}.",
            f"today is {following}, so yesterday was {day}.",
            f"she arrived on {day} and left on {following}.",
            f"after {day} comes {following}.",
        ]
    for i in range(1, 5):
        for j in range(1, 5):
            one, other, total = NUMBERS[i], NUMBERS[j], NUMBERS[i + j]
            yield [
                f"{one} plus {other} is {total}.",
                f"{one} and {other} make {total}.",
                f"{one} and {other} is {total}.",
                f"what is {one} plus {other}? It is {total}.",
                f"{one} cups and {other} cups are {total} cups.",
                f"if you add {one} and {other}, you get {total}.",
            ]


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


# ── opinions ─────────────────────────────────────────────────────────────────────────────────────────────────

VENUES = {
    "restaurant": "soup fish bread dessert sauce salad",
    "hotel": "room bed view breakfast pool bathroom",
    "film": "story acting music ending dialogue plot",
    "concert": "singer band sound hall music crowd",
    "shop": "service choice owner window coffee music",
}
WORDS = {
    True: "wonderful excellent lovely great delightful superb amazing pleasant charming brilliant perfect fine "
    "splendid marvellous fantastic beautiful",
    False: "terrible awful horrible poor dreadful nasty disappointing boring unpleasant disgusting shabby weak "
    "miserable hopeless ugly dull",
}
AFTER = {
    True: (
        "We will come back soon.",
        "We stayed until the end and smiled.",
        "I told all my friends to go there.",
        "Everyone was happy.",
        "It was worth every penny.",
        "I thanked them twice.",
    ),
    False: (
        "We will never come back.",
        "We left early and frowned.",
        "I told all my friends to stay away.",
        "Everyone was angry.",
        "It was a waste of money.",
        "I asked for my money back.",
    ),
}
STRONGLY = ("really", "very", "quite", "truly", "so", "simply")


def opinion(rng: random.Random, thing: str, good: bool) -> str:
    """One sentence that praises a thing or complains about it."""
    word, too, other = (rng.choice(WORDS[kind].split()) for kind in (good, good, not good))
    return rng.choice(
        (
            f"The {thing} was {word}.",
            f"The {thing} was {rng.choice(STRONGLY)} {word}.",
            f"I found the {thing} {rng.choice(STRONGLY)} {word}.",
            f"We had {a(word)} time, and the {thing} was {too} too.",
            f"The {thing} was not {other} at all, it was {word}.",
            f"I remember the {thing}, which was {word}.",
            f"I expected something {other}, but the {thing} was {word}.",
        )
    )


def diary(rng: random.Random) -> str:
    """An entry about a visit: opinions of one kind, and what came of it."""
    venue, good = rng.choice(list(VENUES)), rng.random() < 0.5
    one, other = rng.sample(VENUES[venue].split(), 2)
    first, second, third = rng.sample(WORDS[good].split(), 3)
    return " ".join(
        [
            f"The {one} was {first}, {second} and {third}.",
            opinion(rng, other, good),
            rng.choice((f"It was {a(rng.choice(WORDS[good].split()))} {venue}.", rng.choice(AFTER[good]))),
        ]
    )


# ── the text ─────────────────────────────────────────────────────────────────────────────────────────────────


def withheld() -> set[str]:
    """The ten sentences that the quickstart asks for."""
    rows = [line.split("\t") for line in (DATA / "masked.tsv").read_text("utf-8").splitlines()[1:]]
    return {text.replace("[MASK]", answer).lower() for text, answer in rows}


def documents(seed: int = 0) -> Iterable[str]:
    """All documents, shuffled."""
    rng = random.Random(seed)
    hidden = withheld()
    some, often = (
        [text[0].upper() + text[1:] for fact in told for text in fact if text.lower() not in hidden]
        for told in (facts(), orders())
    )
    found = [*some, *often, *(diary(rng) for _ in range(DIARIES))]
    found += [f"{name}: {text}" for text in often for name in SPEAKERS]
    found += rng.sample([f"{name}: {text}" for text in some for name in SPEAKERS], DOCUMENTS - len(found))
    rng.shuffle(found)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n\n".join(documents()) + "\n", encoding="utf-8")
