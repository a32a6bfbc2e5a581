"""Made-up English with agreement, so that there is something to learn, and a corpus of it."""

import json
import random
from pathlib import Path

import numpy as np

from everybert.corpus.shards import VERSION
from everybert.files import size_and_hash
from everybert.text.tokenizer import Tokenizer

PEOPLE = ["farmer", "teacher", "doctor", "sailor", "painter", "baker", "pilot", "singer", "judge", "nurse"]
ANIMALS = ["dog", "cat", "horse", "fox", "bird", "goat", "duck", "bear", "wolf", "frog"]
THINGS = ["apple", "boat", "letter", "lamp", "stone", "book", "drum", "wheel", "coat", "bell"]
ADJECTIVES = ["old", "young", "small", "tall", "quiet", "brave", "clever", "happy", "tired", "red"]
VERBS = {"watch": "watches", "follow": "follows", "paint": "paints", "carry": "carries", "find": "finds"}
PLACES = {"garden": "in", "river": "by", "hill": "on", "market": "at", "forest": "in", "harbour": "at"}
TIMES = ["morning", "evening", "night", "winter", "summer"]


def noun_phrase(rng: random.Random, plural: bool) -> str:
    noun = rng.choice(PEOPLE + ANIMALS)
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.5 else ""
    if plural:
        return f"{rng.choice(['these', 'those', 'many'])} {adjective}{noun}s"
    return f"{rng.choice(['this', 'that', 'the'])} {adjective}{noun}"


def sentence(rng: random.Random, place: str) -> str:
    plural = rng.random() < 0.5
    base, singular = rng.choice(list(VERBS.items()))
    tail = f" {PLACES[place]} the {place}" if rng.random() < 0.7 else f" every {rng.choice(TIMES)}"
    return f"{noun_phrase(rng, plural)} {base if plural else singular} a {rng.choice(THINGS)}{tail} ."


def document(rng: random.Random, least: int = 3, most: int = 12) -> list[str]:
    place = rng.choice(list(PLACES))  # one a document, so that the next sentence can be told from a random one
    return [sentence(rng, place) for _ in range(rng.randint(least, most))]


def words() -> list[str]:
    nouns = PEOPLE + ANIMALS
    closed = ["this", "that", "the", "these", "those", "many", "a", "every", "in", "by", "on", "at", "."]
    inflected = [*VERBS, *VERBS.values(), *(n + "s" for n in nouns)]
    return sorted({*nouns, *THINGS, *ADJECTIVES, *inflected, *PLACES, *TIMES, *closed})


def write_tokenizer(folder: Path) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words()]
    (folder / "vocab.txt").write_text("".join(w + "\n" for w in vocabulary))
    tokenizer = Tokenizer.load(folder)
    (folder / "vocab.txt").unlink()
    tokenizer.save(folder)
    return tokenizer


def write_corpus(folder: Path, documents: int = 200, heldout: int = 20, seed: int = 0, languages: int = 1) -> Path:
    """A corpus folder as `everybert corpus build` writes it."""
    rng = random.Random(seed)
    tokenizer = write_tokenizer(folder / "tokenizer")
    (folder / "shards").mkdir()
    names = ["en", "xx"][:languages]
    counts = np.zeros(tokenizer.size, np.int64)
    for split, count in (("train", documents), ("heldout", heldout)):
        ids, sentences, starts = [], [0], [0]
        for _ in range(count):
            for text in document(rng):
                ids += tokenizer.encode(text, specials=False).ids
                sentences.append(len(ids))
            starts.append(len(sentences) - 1)
        stem = folder / "shards" / f"{split}-00000"
        np.array(ids, "<u2").tofile(f"{stem}.tokens.bin")
        np.save(f"{stem}.sentences.npy", np.array(sentences, "<i8"))
        np.save(f"{stem}.documents.npy", np.array(starts, "<i8"))
        if languages > 1:
            np.save(f"{stem}.languages.npy", (np.arange(count) % 4 == 0).astype(np.uint8))
        if split == "train":
            counts += np.bincount(ids, minlength=tokenizer.size)
    np.save(folder / "unigram.npy", counts)
    files = [path for path in folder.rglob("*") if path.is_file()]
    meta = {
        "version": VERSION,
        "dtype": "<u2",
        "vocab_size": tokenizer.size,
        "tokenizer_digest": tokenizer.digest,
        "languages": names if languages > 1 else [],
        "splits": {"train": ["train-00000"], "heldout": ["heldout-00000"]},
        "files": {str(path.relative_to(folder)): size_and_hash(path) for path in files},
    }
    (folder / "corpus.json").write_text(json.dumps(meta))
    return folder
