"""Attention against `transformers`' eager weights; the page that holds it; its pictures."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch
from encoded import Encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from tiny_models import STEMS, make

from everybert.inside.attention import Attention, asset, batch_of, inlined, quantised, read_attention, without_heads
from everybert.store.huggingface import load_network

KINDS = [kind for kind in STEMS if kind != "longformer"]  # whose weights are no square: below


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_the_eager_ones(tmp_path, kind):
    theirs = make(kind)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path / "m")
    network = load_network(tmp_path / "m").network.eval()
    ids = torch.randint(5, 60, (23,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    found = read_attention(network, Encoded.of(ids))
    assert len(expected) == len(found.weights)
    for ours, wanted in zip(found.weights, expected):
        assert np.abs(ours - wanted[0].numpy()).max() < 1e-5
        assert np.abs(quantised(ours) / 65535 - wanted[0].numpy()).max() < 1e-5  # what the viewer is sent


def test_a_head_that_is_switched_off_contributes_nothing(tmp_path):
    theirs = make("bert")
    theirs.save_pretrained(tmp_path / "m")
    network = load_network(tmp_path / "m").network.eval()
    encoding = Encoded.of([5, 9, 11, 7, 30])
    with torch.no_grad():
        assert (without_heads(network, encoding, []) - network.encoder(batch_of(network, encoding))).abs().max() < 1e-6
    found = without_heads(network, encoding, [(1, 0)])
    size = network.config.head_size
    with torch.no_grad():  # W_O reads nothing of the head
        network.encoder.layers[1].attention.output.weight[:, :size] = 0.0
        assert (network.encoder(batch_of(network, encoding)) - found).abs().max() < 1e-6
    refuses("no layer 9 with a head 0", without_heads, network, encoding, [(9, 0)])


def square(local, own, marked):
    """Longformer's weights (A, n, x + 1 + 2w) and (A, n, x) as (A, n, n): what `transformers` lays out otherwise."""
    heads, n, wide = local.shape
    x = len(marked)
    side = (wide - x - 1) // 2
    out = np.zeros((heads, n, n), dtype=np.float32)
    for i in range(n):
        for k in range(2 * side + 1):
            if 0 <= i + k - side < n:
                out[:, i, i + k - side] = local[:, i, x + k]
        out[:, i, marked] = local[:, i, :x]  # not seen again inside the window
    for k, i in enumerate(marked):
        out[:, i] = own[:, :, k]
    return out


@pytest.mark.parametrize("marked", [[], [0], [0, 3, 17]])
def test_longformers_weights_equal_the_eager_ones(tmp_path, marked):
    theirs = make("longformer")
    theirs.save_pretrained(tmp_path / "m")
    network = load_network(tmp_path / "m").network.eval()
    ids = torch.randint(5, 60, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    mask = torch.zeros(1, 24, dtype=torch.long)
    mask[0, marked] = 1
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), global_attention_mask=mask, output_attentions=True)
    found = read_attention(network, Encoded.of(ids), marked or None)
    assert len(found.weights) == len(expected.attentions) == 2
    for layer, ours in enumerate(found.weights):
        own = expected.global_attentions[layer][0].numpy() if marked else None
        wanted = square(expected.attentions[layer][0].numpy(), own, marked)
        assert np.abs(wanted.sum(-1) - 1).max() < 1e-5, "every row was laid out whole"
        assert np.abs(ours - wanted).max() < 1e-5
        assert np.abs(quantised(ours) / 65535 - wanted).max() < 1e-5


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 80), st.integers(2, 32), st.integers(0, 10))
def test_thumbnails_keep_each_blocks_largest(n, size, seed):
    weights = np.random.default_rng(seed).random((2, 1, n, n)).astype(np.float32)
    small = Attention([""] * n, weights).thumbnails(size)
    assert small.shape == (2, 1, min(n, size), min(n, size))
    assert small.max() == np.rint(weights.max() * 255)
    assert (small.max((2, 3)) == np.rint(weights.max((2, 3)) * 255)).all()
    corner = weights[0, 0, 0, 0] if n <= size else weights[0, 0, : max(1, n // size), : max(1, n // size)].max()
    assert small[0, 0, 0, 0] >= np.rint(corner * 255)


def test_page_holds_all_and_asks_for_nothing(words):
    found = words.attention("the cat sees a </script><script>alert(1)</script> dog", "it's mary & john")
    page = found.html("<b>title</b>")
    addresses = set(re.findall(r"https?://[^\s\"'`<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a self-contained page names no other place"
    assert not re.search(r"(src|href)=\"(?!#)", re.sub(r"`[^`]*`", "", page))
    assert page.count("<script") == 2 and page.count("</script>") == 2, "tokens must not end the script"
    assert "<b>title" not in page and "&lt;b&gt;title" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    assert data["tokens"] == found.tokens
    weights = np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), "<u2") / 65535
    assert np.abs(weights.reshape(found.weights.shape) - found.weights).max() < 1e-5


def test_a_notebook_shows_a_frame(words):
    html = words.attention("the cat")._repr_html_()
    assert html.startswith("<iframe") and "srcdoc=" in html and "<script" not in html.split(">")[0]


def test_modules_can_be_inlined():
    script = inlined("attention-draw.js", "attention-view.js")
    assert "import {" not in script and not re.search(r"^export ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), "two modules share a top-level name"
    assert "`" not in re.sub(r"`[^`]*`", "", asset("attention-draw.js"))


def test_too_much_is_one_line(words):
    found = Attention(["x"] * 2, np.broadcast_to(np.float32(0), (1, 1, 8000, 8000)))
    refuses(r"64,000,000 weights, too many for a page", found.html)
    assert "too many for a page" in found._repr_html_()
    refuses("102 tokens, the model reads 64; shorten it", words.attention, "cat " * 100)
