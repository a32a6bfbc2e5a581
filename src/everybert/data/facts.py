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
    Portugal  Lisbon      Portuguese  Europe  grilled fish   the old trams
    Greece    Athens      Greek       Europe  olives         the Parthenon
    Poland    Warsaw      Polish      Europe  dumplings      the old town
    Hungary   Budapest    Hungarian   Europe  goulash        the warm baths
    Finland   Helsinki    Finnish     Europe  rye bread      the white cathedral
    Sweden    Stockholm   Swedish     Europe  meatballs      the royal palace
    Norway    Oslo        Norwegian   Europe  salmon         the opera house
    Ireland   Dublin      English     Europe  stew           the long bridge
    Turkey    Ankara      Turkish     Asia    kebab          the castle
    Japan     Tokyo       Japanese    Asia    sushi          the fish market
    China     Beijing     Chinese     Asia    noodles        the Great Wall
    Korea     Seoul       Korean      Asia    kimchi         the five palaces
    Thailand  Bangkok     Thai        Asia    curry          the golden temple
    Vietnam   Hanoi       Vietnamese  Asia    rice soup      the lake
    Egypt     Cairo       Arabic      Africa  bean stew      the pyramids
    Kenya     Nairobi     Swahili     Africa  maize          the wide plains
    Ghana     Accra       English     Africa  fried rice     the long beach
    Morocco   Rabat       Arabic      Africa  couscous       the red walls
    Peru      Lima        Spanish     America  potatoes      the high ruins
    Brazil    Brasilia    Portuguese  America  black beans   the great river
    Mexico    Mexico City  Spanish    America  tacos         the sun stone
    Canada    Ottawa      English     America  pancakes      the frozen canal
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
    pig       pigs       piglet    grunt   farm     apples   skin      four
    hen       hens       chick     cluck   farm     corn     feathers  two
    duck      ducks      duckling  quack   pond     bread    feathers  two
    owl       owls       owlet     hoot    tree     mice     feathers  two
    lion      lions      cub       roar    plain    meat     fur       four
    wolf      wolves     pup       howl    forest   meat     fur       four
    bear      bears      cub       growl   cave     honey    fur       four
    frog      frogs      tadpole   croak   pond     flies    skin      four
    bee       bees       grub      buzz    hive     nectar   hair      six
    mouse     mice       pinkie    squeak  hole     cheese   fur       four
    elephant  elephants  calf      trumpet  plain   leaves   skin      four
    snake     snakes     hatchling  hiss   desert   eggs     scales    no
    goat      goats      kid       bleat   hill     leaves   hair      four
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
    carpenter   workshop    builds    tables      hammer
    cook        kitchen     cooks     meals       pan
    gardener    garden      plants    flowers     spade
    writer      library     writes    books       pen
    singer      theatre     sings     songs       microphone
    judge       court       judges    cases       law
    barber      shop        cuts      hair        scissors
    mechanic    garage      mends     cars        spanner
    fisherman   lake        catches   fish        net
    """)
]

COLOURS = table("""
    grass  green
    snow  white
    coal  black
    blood  red
    the sky  blue
    a lemon  yellow
    a carrot  orange
    chocolate  brown
    an elephant  grey
    a leaf  green
    milk  white
    a tomato  red
    the sun  yellow
    the sea  blue
    a raven  black
    a flamingo  pink
    mud  brown
    a plum  purple
""")

TASTES = table("""
    lemons  sour
    honey  sweet
    coffee  bitter
    sugar  sweet
    chips  salty
    chillies  hot
    grapes  sweet
    vinegar  sour
    cheese  salty
    chocolate  sweet
    mustard  hot
    tea  bitter
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
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
OPPOSITES = table("""
    hot  cold
    big  small
    old  young
    fast  slow
    high  low
    wet  dry
    rich  poor
    light  dark
    loud  quiet
    hard  soft
    early  late
    full  empty
    strong  weak
    open  closed
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
    Lucy    teacher    mouse  films     white
    Nora    sailor     goat   maps      black
    Clara   judge      duck   tea       purple
    Rosa    cook       hen    dancing   orange
    Peter   farmer     sheep  football  brown
    Paul    carpenter  dog    stars     grey
    Omar    writer     cat    coffee    blue
    Victor  mechanic   frog   trains    red
    Hugo    gardener   bee    birds     green
    Leo     singer     snake  poems     pink
    Karl    barber     pig    games     yellow
    Ivan    fisherman  bear   boats     white
""")
PEOPLE = [
    Person(name, i < 8, next(j for j in JOBS if j.who == job), COUNTRIES[(i * 5) % len(COUNTRIES)], pet, likes, colour)
    for i, (name, job, pet, likes, colour) in enumerate(_PEOPLE)
]
