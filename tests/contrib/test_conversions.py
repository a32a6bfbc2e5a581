"""Words added to a vocabulary, and Longformers made of short models."""

import pytest
import torch
from extend_vocabulary import add_words, extend
from grammar import write_tokenizer
from longformer import to_longformer
from refusals import refuses

from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network, save_network
from everybert.text.tokenizer import Tokenizer

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


def test_only_bert_and_roberta_become_longformers():
    refuses("not of distilbert", to_longformer, small("distilbert", segments=0), 128, 32)
