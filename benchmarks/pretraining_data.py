"""A reimplementation of BERT's original data script, for comparison: pure Python, all documents in memory.

It makes the same passes over the characters of the text: clean, separate ideographs, lower-case, strip accents, split
punctuation, match the longest tokens greedily. Documents are lists of strings. Instances have a random second half, are
masked once (duplication factor 1) and written as padded integers. Unlike the original, it writes no TensorFlow records,
which makes it faster.
"""

import random
import unicodedata
from array import array
from pathlib import Path

MAX_LENGTH, MAX_MASKED, SHORT = 128, 20, 0.1


IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F))


def is_space(char: str) -> bool:
    return char in " \t\n\r" or unicodedata.category(char) == "Zs"


def is_control(char: str) -> bool:
    return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def is_punctuation(char: str) -> bool:
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char).startswith("P")


def is_ideograph(code: int) -> bool:
    return any(first <= code <= last for first, last in IDEOGRAPHS)


def clean(text: str) -> str:
    kept = []
    for char in text:
        if ord(char) in (0, 0xFFFD) or is_control(char):
            continue
        kept.append(" " if is_space(char) else char)
    return "".join(kept)


def spaced(text: str) -> str:
    output = []
    for char in text:
        output.append(f" {char} " if is_ideograph(ord(char)) else char)
    return "".join(output)


def without_accents(word: str) -> str:
    output = []
    for char in unicodedata.normalize("NFD", word):
        if unicodedata.category(char) != "Mn":
            output.append(char)
    return "".join(output)


def at_punctuation(word: str) -> list[str]:
    parts: list[list[str]] = []
    start = True
    for char in word:
        if is_punctuation(char):
            parts.append([char])
            start = True
            continue
        if start:
            parts.append([])
            start = False
        parts[-1].append(char)
    return ["".join(part) for part in parts]


def basic_tokens(text: str) -> list[str]:
    words: list[str] = []
    for word in spaced(clean(text)).split():
        words.extend(at_punctuation(without_accents(word.lower())))
    return " ".join(words).split()


def word_pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    chars = list(word)
    if len(chars) > 200:
        return ["[UNK]"]
    pieces: list[str] = []
    start = 0
    while start < len(chars):
        for end in range(len(chars), start, -1):
            piece = "".join(chars[start:end])
            if start:
                piece = "##" + piece
            if piece in vocabulary:
                break
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


def read(path: Path, vocabulary: dict[str, int]) -> list[list[list[str]]]:
    """Tokenized documents of a file with one sentence per line and an empty line between documents."""
    documents: list[list[list[str]]] = [[]]
    for line in path.open(encoding="utf-8"):
        if not line.strip():
            documents.append([])
        elif pieces := [piece for word in basic_tokens(line) for piece in word_pieces(word, vocabulary)]:
            documents[-1].append(pieces)
    return [document for document in documents if document]


def instances(documents: list[list[list[str]]], number: int, rng: random.Random):
    """Pairs of segments; in half of them the second segment is from another document."""
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
    """Write the instances of a file; returns the number of tokens of its text."""
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
