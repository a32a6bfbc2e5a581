"""What is true in the small world: tables of facts that its text never contradicts, so that blanks have answers."""

from __future__ import annotations

from typing import NamedTuple


def table(text: str) -> list[list[str]]:
    """Rows of cells; cells are separated by two spaces or more, so that a cell may hold single ones."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.strip().splitlines()]


class Country(NamedTuple):
    """A country as the text knows it."""

    name: str
    capital: str
    language: str
    continent: str
    dish: str
    sight: str


COUNTRIES = [
    Country(*row)
    for row in table("""
    France    Paris       French      Europe  onion soup     the Louvre
    Italy     Rome        Italian     Europe  pizza          the Colosseum
    Spain     Madrid      Spanish     Europe  paella         the Prado
    Germany   Berlin      German      Europe  sausages       the Wall
    Greece    Athens      Greek       Europe  olives         the Parthenon
    Poland    Warsaw      Polish      Europe  dumplings      the old town
    Sweden    Stockholm   Swedish     Europe  meatballs      the royal palace
    Japan     Tokyo       Japanese    Asia    sushi          the fish market
    China     Beijing     Chinese     Asia    noodles        the Great Wall
    Thailand  Bangkok     Thai        Asia    curry          the golden temple
    Egypt     Cairo       Arabic      Africa  bean stew      the pyramids
    Kenya     Nairobi     Swahili     Africa  maize          the wide plains
    Peru      Lima        Spanish     America  potatoes      the high ruins
    Brazil    Brasilia    Portuguese  America  black beans   the great river
    """)
]


class Animal(NamedTuple):
    """An animal: singular, plural, its young, what it does to make a sound, where it lives, eats, wears, moves."""

    one: str
    many: str
    young: str
    sound: str
    home: str
    food: str
    coat: str
    legs: str


ANIMALS = [
    Animal(*row)
    for row in table("""
    dog       dogs       puppy     bark    house    bones    fur       four
    cat       cats       kitten    meow    house    fish     fur       four
    cow       cows       calf      moo     barn     grass    hair      four
    horse     horses     foal      neigh   stable   hay      hair      four
    sheep     sheep      lamb      bleat   field    grass    wool      four
    duck      ducks      duckling  quack   pond     bread    feathers  two
    owl       owls       owlet     hoot    tree     mice     feathers  two
    wolf      wolves     pup       howl    forest   meat     fur       four
    bear      bears      cub       growl   cave     honey    fur       four
    frog      frogs      tadpole   croak   pond     flies    skin      four
    bee       bees       grub      buzz    hive     nectar   hair      six
    """)
]


class Job(NamedTuple):
    """A job: who, where, what is done, to what, with what."""

    who: str
    where: str
    does: str
    what: str
    tool: str


JOBS = [
    Job(*row)
    for row in table("""
    baker       bakery      bakes     bread       oven
    doctor      hospital    heals     patients    needle
    teacher     school      teaches   children    chalk
    farmer      farm        grows     wheat       tractor
    pilot       airport     flies     planes      radio
    sailor      harbour     sails     ships       rope
    painter     studio      paints    pictures    brush
    writer      library     writes    books       pen
    singer      theatre     sings     songs       microphone
    fisherman   lake        catches   fish        net
    """)
]

COLOURS = table("""
    grass  green
    snow  white
    blood  red
    the sky  blue
    a lemon  yellow
    chocolate  brown
    a tomato  red
    coal  black
    milk  white
    a leaf  green
""")

TASTES = table("""
    lemons  sour
    honey  sweet
    coffee  bitter
    chillies  hot
    chocolate  sweet
""")

SEASONS = {
    "winter": ("cold", "it snows", "a warm coat", ("December", "January", "February"), "ski"),
    "spring": ("mild", "flowers open", "a light jacket", ("March", "April", "May"), "plant seeds"),
    "summer": ("hot", "the sun shines", "a straw hat", ("June", "July", "August"), "swim"),
    "autumn": ("windy", "leaves fall", "long boots", ("September", "October", "November"), "pick apples"),
}
WEATHER = table("""
    it rains  umbrella  wet
    it snows  scarf  white
    the sun shines  hat  dry
    the wind blows  coat  cool
""")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(month for _, _, _, months, _ in SEASONS.values() for month in months)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
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


class Person(NamedTuple):
    """Someone in the small world; the text says the same of them every time."""

    name: str
    she: bool
    job: Job
    country: Country
    pet: str
    likes: str
    colour: str


_PEOPLE = table("""
    Anna    baker      dog    music     red
    Maria   doctor     cat    chess     blue
    Sofia   pilot      horse  books     green
    Emma    painter    owl    flowers   yellow
    Peter   farmer     sheep  football  brown
    Omar    writer     cat    coffee    blue
    Leo     singer     snake  poems     pink
    Ivan    fisherman  bear   boats     white
""")
PEOPLE = [
    Person(name, i < 4, next(j for j in JOBS if j.who == job), COUNTRIES[(i * 3) % len(COUNTRIES)], pet, likes, colour)
    for i, (name, job, pet, likes, colour) in enumerate(_PEOPLE)
]
