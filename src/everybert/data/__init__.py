"""Bundled text: a small world of facts for the quickstart, and a classification task about it.

world.txt                       5,000 short documents of facts and opinions, written by recipes/quickstart_text.py
masked.tsv                      true sentences with a masked token and its answer; none of them is in world.txt
train.tsv, dev.tsv, unseen.tsv  opinions, labelled praise or complaint; the opinion words of unseen.tsv are in
                                world.txt but not in train.tsv, so a model knows them from pre-training alone
bundled.tsv                     what the tests ask everybert-small
quickstart.toml, report.md      the recipe of the quickstart and the template of its report
"""

from importlib import resources


def read(name: str) -> str:
    """The content of a bundled file."""
    return resources.files(__name__).joinpath(name).read_text("utf-8")


def documents(count: int | None = None) -> list[str]:
    """The documents of world.txt, or the first `count` of them."""
    return read("world.txt").removesuffix("\n").split("\n\n")[:count]


def rows(name: str, count: int | None = None) -> list[tuple[str, ...]]:
    """The rows of a .tsv file without its header, or the first `count` of them: texts with their labels or answers."""
    return [tuple(line.split("\t")) for line in read(name).splitlines()[1:]][:count]
