"""Causal models: no token sees what it predicts, on any path; the same logits as transformers; one loss, same packs."""

import json
import shutil

import numpy as np
import pytest
import tiny_models
import torch
from grammar import write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from safetensors.torch import load_file
from toy import tiny_recipe

import everybert
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.inference.export import export_hf
from everybert.inference.model import Model
from everybert.model.attention import Pattern, attend, watched, windowed
from everybert.model.config import EncoderConfig, preset
from everybert.model.encoder import Encoder
from everybert.model.heads import Network
from everybert.model.padded import Padded
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network, save_network
from everybert.store.layouts import LAYOUTS
from everybert.text.tokenizer import Tokenizer
from everybert.training.distil import distil
from everybert.training.pretrain import pretrain

WAYS = (True, "reverse")
TINY = {"vocab_size": 40, "hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 24, "max_positions": 64}
FULL = {"model__causal": True, "examples__kind": "full"}


# ── what a token sees ────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=30), min_size=1, max_size=4),
    st.sampled_from(WAYS),
    st.sampled_from([None, (None, 3)]),
    st.data(),
)
def test_no_token_sees_what_it_predicts(sequences, causal, windows, data):
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**TINY, causal=causal, windows=windows)).double().eval()
    b = data.draw(st.integers(0, len(sequences) - 1))
    cut = data.draw(st.integers(0, len(sequences[b])))
    other = [list(s) for s in sequences]
    hidden = slice(None, cut) if causal == "reverse" else slice(cut, None)
    other[b][hidden] = [(i + 7) % 40 for i in other[b][hidden]]
    with torch.no_grad():
        one, two = (Ragged.of(rows).split(encoder(Ragged.of(rows)))[b] for rows in (sequences, other))
    seen = slice(cut, None) if causal == "reverse" else slice(None, cut)
    torch.testing.assert_close(one[seen], two[seen], atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", WAYS)
def test_all_paths_agree(causal, window, monkeypatch):
    monkeypatch.setattr("everybert.model.attention.QUERY_BLOCK", 4)
    torch.manual_seed(0)
    batch, pattern = Ragged.of([[1] * n for n in (9, 1, 5, 9)]), Pattern(window, causal)
    qkv = tuple(torch.randn(24, 2, 4, dtype=torch.float64) for _ in range(3))
    seen: dict[str, torch.Tensor] = {}
    formula = watched(qkv, batch, pattern, None, lambda name, x: seen.setdefault(name, x))
    weights = seen["attention.weights"][0]
    hidden = torch.triu(weights, 1) if causal is True else torch.tril(weights, -1)
    assert hidden.abs().max() == 0 and torch.allclose(weights.sum(-1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(attend(qkv, batch, pattern), formula)
    torch.testing.assert_close(windowed(qkv, batch, pattern, None, 0.0), formula)
    real = torch.arange(9)[None] < torch.tensor(batch.lengths)[:, None]
    padded = Padded.of(torch.zeros(4, 9, dtype=torch.long), real)
    rows = [torch.zeros(36, 2, 4, dtype=torch.float64) for _ in qkv]
    for x, row in zip(qkv, rows):
        row[real.flatten()] = x
    torch.testing.assert_close(padded.attend(tuple(rows), pattern, None)[real.flatten()], formula)


def test_global_tokens_are_refused():
    refuses("global", EncoderConfig, causal=True, global_attention=True)


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [kind for kind in tiny_models.STEMS if LAYOUTS[kind].generator])
def test_logits_and_gradients_are_those_of_transformers(kind, tmp_path):
    name = "LMHeadModel" if kind == "bert" else "ForCausalLM"
    theirs = tiny_models.make(kind, name, is_decoder=True, hidden_dropout_prob=0.0)
    theirs.save_pretrained(tmp_path / "theirs")
    found = load_network(tmp_path / "theirs")
    assert found.config.causal is True and list(found.network.heads) == ["mlm"] and not found.report.unused
    ids = [2, 31, 7, 45, 9, 3]
    batch = Ragged.of([ids, ids[:3]])
    logits = found.network.mlm_logits(found.network.encoder(batch))[: len(ids)]
    want = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
    token = found.network.encoder.embeddings.token.weight
    (mine,) = torch.autograd.grad(logits[:-1].logsumexp(-1).sum(), token)
    (other,) = torch.autograd.grad(want[:-1].logsumexp(-1).sum(), theirs.get_input_embeddings().weight)
    torch.testing.assert_close(mine[3:], other[3:], atol=1e-5, rtol=1e-4)  # their padding row has no gradient
    (tmp_path / "ours").mkdir()
    save_network(found.network, tmp_path / "ours", raw_config=found.raw_config)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["is_decoder"] is True and config["architectures"] == [type(theirs).__name__]
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(torch.tensor([ids])).logits[0], want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "causal"), [("bert-base-uncased", "reverse"), ("distilbert-base-cased", True), ("modernbert-base", True)]
)
def test_what_transformers_lacks_is_kept_here_and_not_exported(name, causal, tmp_path):
    config = preset(name).replace(**{**TINY, "layers": 3}, causal=causal, pad_id=0)
    Model(Network(config, {"mlm": None})).save(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "everybert.json").read_text())["encoder"]["causal"] == causal
    assert everybert.load(tmp_path / "m").config == config
    refuses(r"transformers has no .* with causal", export_hf, tmp_path / "m", tmp_path / "hf")


def test_other_decoders_are_refused(tmp_path):
    """More of them are in tests/store/test_bad_folders.py."""
    folder = tiny_models.saved(tmp_path / "m", "bert", "ForMaskedLM")
    config = json.loads((folder / "config.json").read_text()) | {"is_decoder": True, "model_type": "albert"}
    (folder / "config.json").write_text(json.dumps(config))
    refuses("no left-to-right albert", load_network, folder)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("causal") / "c", documents=60, heldout=10)


@pytest.fixture(scope="module", params=WAYS)
def trained(request, corpus, tmp_path_factory):
    """The folder of a run in each direction."""
    out = tmp_path_factory.mktemp("run") / "run"
    recipe = tiny_recipe(**FULL | {"model__causal": request.param})
    found = pretrain(recipe, corpus, out, device="cpu", quiet=True)
    assert found.finished and found.figures["accuracy"] > 0.15
    return out


def test_packs_hold_the_same_text_unmasked_with_every_neighbour_as_target(corpus):
    opened = Corpus.open(corpus)
    layout = ExampleLayout.of(Tokenizer.load(opened.tokenizer_path))
    examples = tiny_recipe(**FULL).examples
    plain, left, right = (
        next(PackStream(opened, layout, examples, seed=1, capacity=256, causal=way).packs()) for way in (False, *WAYS)
    )
    text = plain["tokens"].copy()
    text[plain["mask_index"]] = plain["mask_label"]
    assert np.array_equal(left["tokens"], text) and np.array_equal(right["tokens"], text)
    assert np.array_equal(left["mask_label"], text[left["mask_index"] + 1])
    assert np.array_equal(right["mask_label"], text[right["mask_index"] - 1])
    ends = np.cumsum(plain["lengths"])
    assert sorted([*left["mask_index"], *(ends - 1)]) == list(range(len(text)))
    assert sorted([*right["mask_index"], 0, *ends[:-1]]) == list(range(len(text)))


def test_a_resumed_run_is_the_same(trained, corpus):
    recipe = tiny_recipe(**FULL | {"model__causal": everybert.load(trained / "model").config.causal})
    whole = {name: x.clone() for name, x in load_file(trained / "model" / "model.safetensors").items()}
    shutil.rmtree(trained / "model")
    shutil.rmtree(max((trained / "checkpoints").iterdir()))
    assert pretrain(recipe, corpus, trained, device="cpu", quiet=True).finished
    again = load_file(trained / "model" / "model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[k], again[k]) for k in whole)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"examples__kind": "pairs"}, 'does not learn sentence pairs: set "full"'),
        ({"examples__kind": "order"}, "sentence pairs"),
        ({"mask__rate": 0.3}, r"\[mask\] does not apply to a causal model"),
        ({"mask__strategy": "span", "mask__boundary": True}, r"\[mask\] does not apply"),
        ({"model__causal": "left"}, "causal"),
    ],
)
def test_objectives_that_do_not_apply_are_refused(corpus, tmp_path, changes, why):
    refuses(why, lambda: pretrain(tiny_recipe(**FULL | changes), corpus, tmp_path / "run", device="cpu", quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_teacher_reads_in_the_direction_of_its_student(trained, corpus, tmp_path):
    recipe = tiny_recipe(**{"examples__kind": "full", "distil__mlm": 1.0})
    with pytest.raises(EverybertError, match="same direction"):
        distil(trained / "model", recipe=recipe, corpus=corpus, out=tmp_path / "run", device="cpu", quiet=True)


# ── use ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_score_is_the_log_probability_and_fill_the_next_token(trained):
    model = everybert.load(trained / "model")
    reverse, text = model.config.causal == "reverse", "the old farmer watches a boat"
    ids = model.tokenizer.encode(text).ids
    with torch.no_grad():
        x_TH = model.network.encoder(Ragged.of([ids]))
        ln_p = model.network.mlm_logits(x_TH).log_softmax(-1).double()
    beside = 1 if reverse else -1
    want = [float(ln_p[i + beside, ids[i]]) for i in range(1, len(ids) - 1)]
    found = model.score(text)
    assert [token.score for token in found.tokens] == pytest.approx(want, abs=1e-5)
    assert found.total == pytest.approx(sum(want), abs=1e-4)
    masked = "[MASK] old farmer watches a boat" if reverse else "the old farmer watches a [MASK]"
    place = 1 if reverse else len(ids) - 2
    p_V = ln_p[place + beside].exp()
    assert [c.score for c in model.fill(masked, top=3)[0]] == pytest.approx(sorted(p_V.tolist())[:-4:-1], abs=1e-5)
    for wrong in ("the [MASK] farmer", "[MASK] [MASK]", "the boat [MASK]" if reverse else "[MASK] the boat"):
        refuses(r"reads .*: one \[MASK\] must (begin|end) the text", model.fill, wrong)


def test_generation_continues_by_whole_words(trained):
    model = everybert.load(trained / "model")
    reverse = model.config.causal == "reverse"
    for words in (1, 4):
        text = model.generate("old farmer", words=words)
        added = text.removesuffix("old farmer") if reverse else text.removeprefix("old farmer")
        assert added != text and 1 <= len(added.split()) <= words
    best = model.fill("[MASK] old farmer" if reverse else "old farmer [MASK]")[0][0].token
    assert best in model.generate("old farmer", words=1)
    assert model.generate("the", words=5, seed=1) == model.generate("the", words=5, seed=1)
    assert len({model.generate("the", words=5, seed=i) for i in range(8)}) > 1
    refuses("at least 1", model.generate, "the", words=0)


def test_the_traced_pass_and_the_pictures_show_the_triangle(trained):
    model = everybert.load(trained / "model")
    weights = model.attention("the old farmer watches a boat").weights
    hidden = np.tril(weights, -1) if model.config.causal == "reverse" else np.triu(weights, 1)
    assert not hidden.any() and weights.sum(-1) == pytest.approx(1.0, abs=1e-5)
    assert model.trace("the old farmer watches a boat").gap < 1e-5


def test_a_bidirectional_model_generates_nothing():
    model = Model(Network(EncoderConfig(**TINY), {"mlm": None}))
    refuses("only a causal model", model.generate, "a")


def test_heads_on_a_token_that_sees_only_itself_are_refused(trained, tmp_path):
    model, rows = trained / "model", [("a good film", "praise"), ("a bad film", "complaint")] * 8
    options = {"epochs": 1, "device": "cpu", "quiet": True}
    everybert.finetune(model, "classify", rows, rows, tmp_path / "frozen", mode="frozen", **options)
    if everybert.load(model).config.causal == "reverse":  # its first token sees the whole text
        everybert.finetune(model, "classify", rows, rows, tmp_path / "full", **options)
        return
    refuses("use mode frozen", everybert.finetune, model, "classify", rows, rows, tmp_path / "full", **options)
