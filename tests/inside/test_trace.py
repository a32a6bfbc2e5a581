"""A traced pass: equal to the fast path, true to its own equations, and told as a story."""

import numpy as np
import pytest
from encoded import Encoded
from refusals import refuses
from tiny_models import STEMS, make

from everybert.inside import trace as module
from everybert.inside.trace import explain_steps, needed, part_value, read_trace
from everybert.model.config import PRESETS
from everybert.model.heads import Network
from everybert.store.huggingface import load_network

TEXT = "the cat sees a [MASK] dog"


def close(a, b, tolerance=1e-5):
    return np.abs(np.asarray(a) - np.asarray(b)).max() < tolerance


@pytest.mark.parametrize("kind", list(STEMS))
def test_equals_the_fast_path_in_every_family(tmp_path, kind):
    make(kind, "ForMaskedLM").save_pretrained(tmp_path / "m")
    network = load_network(tmp_path / "m").network.eval()
    ids = list(range(5, 25))
    n = len(ids)
    found = read_trace(network, Encoded.of(ids))
    assert found.gap < 1e-5
    assert found["mlm.probabilities"].shape == (n, 60) and close(found["mlm.probabilities"].sum(-1), 1)
    layers = len(network.config.layer_order)
    assert sum(name.endswith("attention.weights") for name in found.values) == layers
    for layer in (0, layers - 1):
        for step in explain_steps(found, layer, network.config.heads - 1):
            for part in step.parts:
                value = part_value(found, part)
                assert value.ndim == 2 and len(value) in (1, n) and np.isfinite(value[np.isfinite(value)]).all()


def test_equations_hold(words):
    found = words.trace(TEXT)
    a = words.config.head_size
    embedded = found["embeddings.token"] + found["embeddings.segment"] + found["embeddings.position"]
    assert close(embedded, found["embeddings.sum"])
    mean, deviation = found["embeddings.sum"].mean(-1, keepdims=True), found["embeddings.sum"].std(-1, keepdims=True)
    assert close((found["embeddings.sum"] - mean) / deviation, found["embeddings"], 1e-4)  # γ = 1, β = 0 when fresh
    at = "layers.1.attention."
    q, k, v = (found[at + name] for name in "qkv")
    assert close(q @ k.transpose(0, 2, 1) / np.sqrt(a), found[at + "scores"])
    exp = np.exp(found[at + "scores"])
    assert close(exp / exp.sum(-1, keepdims=True), found[at + "weights"])
    assert close(found[at + "weights"] @ v, found[at + "mixed"])
    assert close(found["layers.0.output"] + found[at + "output"], found[at + "residual"])
    assert close(found["output"], words.tokens(TEXT).vectors)
    assert close(words.attention(TEXT).weights[1], found[at + "weights"])
    blank = found.tokens.index("[MASK]")
    guesses = words.fill(TEXT, top=5)[0]
    assert [(g.token, pytest.approx(g.score, abs=1e-6)) for g in guesses] == found.vocabulary(words.tokenizer)[blank]


def test_pre_norm_adds_to_the_stream(pre):
    found = pre.trace(TEXT)
    assert close(found["embeddings"] + found["layers.0.attention.output"], found["layers.0.attention.residual"])
    last = found["layers.0.attention.residual"] + found["layers.0.feed_forward.output"]
    assert close(last, found["layers.0.output"])
    titles = [step.title for step in explain_steps(found)]
    assert titles.index("LayerNorm") < titles.index("Queries, keys, values"), "pre-norm: before attention"


FAMILIES = [
    "bert-tiny",
    "modernbert-base",
    "prenorm-bert-base",
    "mpnet-base",
    "deberta-v3-base",
    "eurobert-210m",
    "esm2-8m",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_equations_are_those_of_the_family(words, name):
    config = PRESETS[name].replace(vocab_size=90, hidden_size=32, heads=2, layers=2, intermediate_size=24, windows=None)
    network = Network(config, {"mlm": None}).eval()
    found = read_trace(network, words.tokenizer.encode("the cat"))
    for layer in range(2):
        equations = " ; ".join(step.equation for step in explain_steps(found, layer) if step.group.startswith("Layer"))
        normed = config.norm == "pre" and (layer > 0 or config.first_attention_norm)
        inner = "LN(x)" if normed else "x"
        assert f"x ← x + Attention({inner})" in equations
        assert ("q = W_Q·y" in equations) == normed and ("W₁y" in equations) == (config.norm == "pre")
        assert ("+ B" in equations) == (config.relative != "none")
        assert ("+ b" in equations) == config.linear_bias and ("+ β" in equations) == config.norm_bias
    step, several = explain_steps(found)[1], config.segments > 0 or "embeddings.position" in found.values
    assert ("summed" in step.title) == (len(step.parts) > 1) == several


def test_story_names_what_it_keeps(words):
    whole = words.trace(TEXT)
    kept = read_trace(words.network, words.tokenizer.encode(TEXT), keep=needed(1))
    assert len(kept.values) < len(whole.values)
    for step, again in zip(explain_steps(whole, 1, 1), explain_steps(kept, 1, 1), strict=True):
        assert step == again
        for part in step.parts:
            assert close(part_value(whole, part), part_value(kept, part))
    groups = list(dict.fromkeys(step.group for step in explain_steps(whole, 1, 1)))
    assert groups == ["Input", "Layer 2, head 2", "Layer 2", "Prediction"]
    joined = part_value(
        whole, next(p for s in explain_steps(whole) for p in s.parts if p.label == "heads side by side")
    )
    assert close(joined[:, : words.config.head_size], whole["layers.0.attention.mixed"][0])


def test_other_heads_are_traced(labels, qa):
    assert labels.trace("good food")["classify.logits"].shape == (1, 3)
    assert labels.trace("good food")["pooler"].shape == (1, 32)
    assert qa.trace("who eats", "john eats")["answer.logits"].shape[1] == 2
    assert explain_steps(qa.trace("who eats", "john eats"))[-1].title == "The answer head"


def test_mistakes_are_one_line(words, monkeypatch):
    found = words.trace("the cat")
    refuses("no 'attention.weights'; it has layers.0.attention.weights", lambda: found["attention.weights"])
    refuses("there is no layer 2: the model's layers are 0 to 1", explain_steps, found, 2)
    refuses("there is no head 9", explain_steps, found, 0, 9)
    refuses("102 tokens, the model reads 64", words.trace, "cat " * 100)
    monkeypatch.setattr(module, "MOST_BYTES", 10_000)
    refuses("GiB of intermediates; give a shorter text", words.trace, "the cat")
