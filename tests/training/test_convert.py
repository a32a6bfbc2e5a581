"""Words added to a vocabulary, Longformers made of short models, and going on from a folder."""

import shutil

import pytest
import torch
from grammar import write_corpus, write_tokenizer
from toy import tiny_recipe

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network, save_network
from everybert.text.tokenizer import Tokenizer
from everybert.training.convert import add_words, extend, extend_folder, to_longformer
from everybert.training.pretrain import pretrain
from everybert.training.recipe import Recipe

SIZE = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 64}


def small(family="bert", vocab_size=128, **settings):
    torch.manual_seed(0)
    network = Network(
        EncoderConfig(family=family, vocab_size=vocab_size, max_positions=64, **SIZE, **settings), {"mlm": None}
    )
    return network.eval()


@pytest.fixture
def folder(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with atomic_folder(tmp_path / "model") as draft:
        save_network(small(), draft, tokenizer=tokenizer)
    return tmp_path / "model"


def test_new_words_start_as_the_mean_of_their_pieces(folder):
    known = Tokenizer.load(folder)
    wider = add_words(known, ["farmerdog", "cat", "farmerdog", " ", "zzz"])
    assert wider.size == known.size + 2  # cat is known
    assert wider.encode("the farmerdog .", specials=False).tokens == ["the", "farmerdog", "."]
    network = load_network(folder).network
    grown = extend(network, known, wider)
    old, new = network.encoder.embeddings.token.weight, grown.encoder.embeddings.token.weight
    assert torch.equal(new[: known.size], old[: known.size])
    pieces = known.encode("farmerdog", specials=False).ids
    assert torch.allclose(new[wider.id("farmerdog")], old[pieces].mean(0))
    assert torch.allclose(grown.heads["mlm"].bias[wider.id("farmerdog")], network.heads["mlm"].bias[pieces].mean())
    ids = [[2, 10, 4, 12, 3]]
    assert torch.allclose(grown.encoder(Ragged.of(ids)), network.encoder(Ragged.of(ids)))


def test_another_tokenizer_is_refused(folder, tmp_path):
    known = Tokenizer.load(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nzebra\nfarmer\n")
    with pytest.raises(EverybertError, match="not the model's nor an extension"):
        extend(load_network(folder).network, known, Tokenizer.load(tmp_path / "other"))


def test_going_on_with_added_words(folder, tmp_path):
    assert extend_folder(folder, ["farmerette"], tmp_path / "wider") == 1
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    with pytest.raises(EverybertError, match="there is nothing to add"):
        extend_folder(folder, ["cat"], tmp_path / "none")
    recipe = going_on(folder)
    result = pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    start, end = (load_network(f).network.encoder.embeddings.token.weight for f in (folder, result.model))
    assert 0 < (start - end).abs().max() < 0.05  # three small steps from where it was


def test_a_corpus_of_the_wider_tokenizer_extends_the_model(folder, tmp_path):
    extend_folder(folder, ["farmerette"], tmp_path / "wider")
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    shutil.rmtree(corpus / "tokenizer")
    wider = Tokenizer.load(tmp_path / "wider")
    wider.save(corpus / "tokenizer")
    meta = corpus / "corpus.json"
    meta.write_text(meta.read_text().replace(Tokenizer.load(folder).digest, wider.digest))
    result = pretrain(going_on(folder), corpus, tmp_path / "run", device="cpu", quiet=True)
    assert Tokenizer.load(result.model).id("farmerette") == wider.size - 1
    assert load_network(result.model).config.vocab_size >= wider.size


def going_on(folder, **more):
    return tiny_recipe(steps=3, examples__kind="full", model__init=str(folder), schedule__peak=1e-3, **more)


@pytest.mark.parametrize(("family", "offset", "pad"), [("bert", 0, 0), ("roberta", 2, 1)])
def test_a_longformer_is_the_short_model_where_it_can_be(family, offset, pad, tmp_path):
    network = small(family, position_offset=offset, pad_id=pad, segments=2 if family == "bert" else 1)
    long = to_longformer(network, positions=160, window=128).eval()
    assert (long.config.family, long.config.max_positions, long.config.windows) == ("longformer", 160, (64, 64))
    short = [[5, *range(10, 60), 6]]
    assert torch.allclose(network.encoder(Ragged.of(short)), long.encoder(Ragged.of(short)), atol=1e-5)
    table = long.encoder.embeddings.position.weight[pad + 1 :]
    assert torch.equal(table[:64], table[64:128]) and torch.equal(table[:32], table[128:])
    one = long.encoder.layers[0].attention
    assert torch.equal(one.qkv.weight, one.qkv_global.weight)


def test_a_converted_longformer_is_transformers_own(tmp_path):
    from transformers import LongformerForMaskedLM

    network = small("roberta", position_offset=2, pad_id=1, segments=1)
    long = to_longformer(network, positions=160, window=32).eval()
    with atomic_folder(tmp_path / "long") as draft:
        save_network(long, draft)
    theirs = LongformerForMaskedLM.from_pretrained(tmp_path / "long").eval()
    ids = torch.randint(5, 120, (1, 150))
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=torch.ones_like(ids)).logits[0]
        found = long.mlm_logits(long.encoder(Ragged.of(ids.tolist())))
    assert torch.allclose(wanted, found, atol=1e-4)


def test_the_longformer_recipe_trains(folder, tmp_path):
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    recipe = going_on(folder, model__longformer=256, model__window=32, batch__length=200, batch__pack=512)
    result = pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    config = load_network(result.model).config
    assert (config.family, config.max_positions, config.windows) == ("longformer", 256, (16, 16))


def test_own_texts_are_learnt_from_a_folder_on(folder, tmp_path):
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=5)
    small = {"batch__tokens": 512, "batch__pack": 512, "batch__length": 64, "run__workers": 0, "schedule__warmup": 1}
    recipe = Recipe.load("own-text", model__init=str(folder), steps=3, **small)
    result = pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    before, after = (load_network(f).network.encoder.state_dict() for f in (folder, result.model))
    name = "layers.0.attention.qkv.weight"
    assert 0 < (before[name] - after[name]).abs().max() < 0.01  # it went on from there
    assert Recipe.load("own-text").model.init == "everybert-small"


def test_only_bert_and_roberta_become_longformers():
    with pytest.raises(EverybertError, match="not of distilbert"):
        to_longformer(small("distilbert", segments=0), 128, 32)
