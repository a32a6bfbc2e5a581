"""Small vocabularies and texts that the tests of this room share."""

import random

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from everybert.text.tokenizer import Tokenizer

WORDS = [
    *("the", "a", "river", "hill", "town", "old", "green", "quiet", "walks", "sings", "over", "under", "near"),
    *("stone", "bridge", "morning", "light", "New", "York", "Paris", "and", "of", "in", "to", "was", "were"),
    *("naïve", "café", "3.14", "it's", "well-known", "U.S.", "北京", "東京", "über", "straße"),
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BPE_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 12))).capitalize() + rng.choice(".!?")


def documents(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    lines = [[sentence(rng) for _ in range(rng.randint(1, 4))] for _ in range(count * 2)]
    return ["\n".join(" ".join(line) for line in lines[2 * i : 2 * i + 2]) for i in range(count)]


def tokenizer(kind: str = "wordpiece") -> Tokenizer:
    """A tokenizer of each kind, trained on the texts above."""
    if kind == "wordpiece":
        backend = Backend(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    elif kind == "bpe":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=BPE_SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
    else:
        backend = Backend(models.Unigram())
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("``", '"')])
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=BPE_SPECIALS, unk_token="<unk>", show_progress=False
        )
    backend.train_from_iterator(documents(50), trainer)
    return Tokenizer(backend)
