"""Pre-training from the weights of a folder: as they are, with added words, as a Longformer."""

import shutil

import longformer
import pytest
import torch
from extend_vocabulary import extend_folder
from grammar import write_corpus, write_tokenizer
from toy import tiny_recipe

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store.huggingface import load_network, save_network
from everybert.text.tokenizer import Tokenizer
from everybert.training.pretrain import pretrain
from everybert.training.recipe import Recipe


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 64}
    network = Network(EncoderConfig(vocab_size=128, max_positions=64, **size), {"mlm": None})
    with atomic_folder(tmp_path / "model") as draft:
        save_network(network, draft, tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    return tmp_path / "model"


def test_continuing_with_added_words(folder, tmp_path):
    assert extend_folder(folder, ["farmerette"], tmp_path / "wider") == 1
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    with pytest.raises(EverybertError, match="there is nothing to add"):
        extend_folder(folder, ["cat"], tmp_path / "none")
    recipe = continue_from(folder)
    result = pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    start, end = (load_network(f).network.encoder.embeddings.token.weight for f in (folder, result.model))
    assert 0 < (start - end).abs().max() < 0.05  # three small steps from where it was


def test_a_corpus_of_the_wider_tokenizer_needs_the_extended_model(folder, tmp_path):
    extend_folder(folder, ["farmerette"], tmp_path / "wider")
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    shutil.rmtree(corpus / "tokenizer")
    wider = Tokenizer.load(tmp_path / "wider")
    wider.save(corpus / "tokenizer")
    meta = corpus / "corpus.json"
    meta.write_text(meta.read_text().replace(Tokenizer.load(folder).digest, wider.digest))
    with pytest.raises(EverybertError, match=r"the corpus' tokenizer is not that of .*contrib/extend_vocabulary.py"):
        pretrain(continue_from(folder), corpus, tmp_path / "run", device="cpu", quiet=True)
    result = pretrain(continue_from(tmp_path / "wider"), corpus, tmp_path / "run", device="cpu", quiet=True)
    assert Tokenizer.load(result.model).id("farmerette") == wider.size - 1
    assert load_network(result.model).config.vocab_size >= wider.size


def continue_from(folder, **more):
    return tiny_recipe(steps=3, examples__kind="full", model__init=str(folder), schedule__peak=1e-3, **more)


def test_a_converted_longformer_trains(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", f"longformer {folder} --positions 256 --window 32 --out {tmp_path}/long".split())
    longformer.main()
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    recipe = continue_from(tmp_path / "long", batch__length=200, batch__pack=512, model__dropout=0.0)
    result = pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    config = load_network(result.model).config
    assert (config.family, config.max_positions, config.windows) == ("longformer", 256, (16, 16))
    assert config.dropout == 0.0


def test_own_texts_are_learnt_starting_from_a_folder(folder, tmp_path):
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    small = {"batch__tokens": 512, "batch__pack": 512, "batch__length": 64, "run__workers": 0, "schedule__warmup": 1}
    recipe = Recipe.load("own-text", model__init=str(folder), steps=3, **small)
    result = pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    before, after = (load_network(f).network.encoder.state_dict() for f in (folder, result.model))
    name = "layers.0.attention.qkv.weight"
    assert 0 < (before[name] - after[name]).abs().max() < 0.01  # it continued from there
    assert Recipe.load("own-text").model.init == "everybert-small"
