"""The approach of BERT's first data script, rewritten for comparison: all in Python, all documents in memory.

Words are cleaned and split character by character, pieces found by greedy longest match, documents held as lists of
strings, instances cut to length with a random second half, masked once (a duplication factor of one) and written
out as padded integers. Not the original code, and kinder than it: no TensorFlow records are made.
"""

import random
import unicodedata
from array import array
from pathlib import Path

MAX_LENGTH, MAX_MASKED, SHORT = 128, 20, 0.1


def basic_tokens(text: str) -> list[str]:
    cleaned = []
    for char in text:
        if char in (" ", "\t", "\n", "\r") or unicodedata.category(char) == "Zs":
            cleaned.append(" ")
        elif ord(char) not in (0, 0xFFFD) and not unicodedata.category(char).startswith("C"):
            cleaned.append(f" {char} " if 0x4E00 <= ord(char) <= 0x9FFF else char)
    words: list[str] = []
    for word in "".join(cleaned).split():
        plain = [c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn"]
        start = True
        for char in plain:
            if is_punctuation(char):
                words.append(char)
                start = True
            elif start:
                words.append(char)
                start = False
            else:
                words[-1] += char
    return words


def is_punctuation(char: str) -> bool:
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char).startswith("P")


def word_pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    if len(word) > 200:
        return ["[UNK]"]
    pieces, start = [], 0
    while start < len(word):
        end = len(word)
        while end > start:
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                break
            end -= 1
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


def read(path: Path, vocabulary: dict[str, int]) -> list[list[list[str]]]:
    """Documents of sentences of pieces; the file has a sentence a line and a blank line between documents."""
    documents: list[list[list[str]]] = [[]]
    for line in path.open(encoding="utf-8"):
        if not line.strip():
            documents.append([])
        elif pieces := [piece for word in basic_tokens(line) for piece in word_pieces(word, vocabulary)]:
            documents[-1].append(pieces)
    return [document for document in documents if document]


def instances(documents: list[list[list[str]]], number: int, rng: random.Random):
    """Pairs of segments, half of them with a second half from elsewhere."""
    room = MAX_LENGTH - 3
    chunk: list[list[str]] = []
    size = 0
    target = rng.randint(2, room) if rng.random() < SHORT else room
    document = documents[number]
    i = 0
    while i < len(document):
        chunk.append(document[i])
        size += len(document[i])
        if i == len(document) - 1 or size >= target:
            split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            first = [piece for sentence in chunk[:split] for piece in sentence]
            if len(chunk) == 1 or rng.random() < 0.5:
                other = documents[rng.randrange(len(documents))]
                second: list[str] = []
                for sentence in other[rng.randrange(len(other)) :]:
                    second += sentence
                    if len(second) >= target - len(first):
                        break
                i -= len(chunk) - split  # the unused half starts the next instance
                follows = 0
            else:
                second = [piece for sentence in chunk[split:] for piece in sentence]
                follows = 1
            while len(first) + len(second) > room:
                longer = first if len(first) > len(second) else second
                del longer[0 if rng.random() < 0.5 else -1]
            if first and second:
                yield ["[CLS]", *first, "[SEP]", *second, "[SEP]"], len(first) + 2, follows
            chunk, size = [], 0
        i += 1


def masked(tokens: list[str], words: list[str], rng: random.Random) -> tuple[list[str], list[int], list[str]]:
    places = [i for i, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
    rng.shuffle(places)
    chosen = sorted(places[: min(MAX_MASKED, max(1, round(len(tokens) * 0.15)))])
    output = list(tokens)
    for i in chosen:
        if rng.random() < 0.8:
            output[i] = "[MASK]"
        elif rng.random() < 0.5:
            output[i] = rng.choice(words)
    return output, chosen, [tokens[i] for i in chosen]


def create(path: Path, vocabulary: dict[str, int], out: Path) -> int:
    """Make the instances of a file; returns how many tokens its text has."""
    rng = random.Random(0)
    documents = read(path, vocabulary)
    rng.shuffle(documents)
    words = list(vocabulary)
    made = []
    for number in range(len(documents)):
        for tokens, boundary, follows in instances(documents, number, rng):
            made.append((*masked(tokens, words, rng), boundary, follows))
    rng.shuffle(made)
    with out.open("wb") as file:
        for tokens, places, labels, boundary, follows in made:
            ids = [vocabulary[token] for token in tokens]
            pad = [0] * (MAX_LENGTH - len(ids))
            rest = [0] * (MAX_MASKED - len(places))
            segments = [0] * boundary + [1] * (len(ids) - boundary) + pad
            array("i", ids + pad).tofile(file)
            array("i", [1] * len(ids) + pad).tofile(file)
            array("i", segments).tofile(file)
            array("i", places + rest + [vocabulary[label] for label in labels] + rest + [follows]).tofile(file)
    return sum(len(sentence) for document in documents for sentence in document)
