from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import everybert
from everybert.errors import EverybertError
from everybert.inference.model import Model, load, pieces_of
from everybert.model.ragged import Ragged

TEXT = "The dog [MASK] in the garden, and [MASK] minds."


def theirs(folder: Path, ids: list[int], segments: list[int] | None = None, kind: str = "BertForPreTraining"):
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()
    more = {"token_type_ids": torch.tensor([segments])} if segments is not None else {}
    with torch.no_grad():
        return model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, **more)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_fill_gives_transformers_scores_for_each_mask(name, request):
    model: Model = request.getfixturevalue(name)
    folder: Path = request.getfixturevalue(f"{name}_folder")
    blanks = model.fill(TEXT, top=7)
    assert [len(blank) for blank in blanks] == [7, 7]
    ids = model.tokenizer.encode(TEXT).ids
    out = theirs(folder, ids, None, "BertForPreTraining" if name == "bert" else "RobertaForMaskedLM")
    logits = out.prediction_logits if name == "bert" else out.logits
    places = [i for i, token in enumerate(ids) if token == model.tokenizer.mask_id]
    assert len(places) == 2
    for blank, place in zip(blanks, places):
        scores, best = logits[0, place].softmax(-1)[: model.tokenizer.size].topk(7)
        assert [c.id for c in blank] == best.tolist()
        np.testing.assert_allclose([c.score for c in blank], scores.numpy(), atol=1e-5)
        for candidate in blank:
            assert candidate.token == model.tokenizer.decode([candidate.id], skip_special=False).strip()


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_attention_and_every_layer_equal_transformers(name, request):
    model: Model = request.getfixturevalue(name)
    text, pair = "The dog plays", "Nobody minds a cat."
    found = model.attention(text, pair)
    encoding = model.tokenizer.encode(text, pair)
    kind = "BertForPreTraining" if name == "bert" else "RobertaForMaskedLM"
    out = theirs(request.getfixturevalue(f"{name}_folder"), encoding.ids, encoding.segments, kind)
    assert found.tokens == encoding.tokens
    assert found.weights.shape == (model.config.layers, 4, len(encoding), len(encoding))
    np.testing.assert_allclose(found.weights, torch.cat(out.attentions).numpy(), atol=1e-5)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    for layer, state in enumerate(out.hidden_states):
        mine = model.tokens(text, layer=layer, pair=pair)
        assert mine.layer == layer and mine.vectors.dtype == np.float32
        np.testing.assert_allclose(mine.vectors, state[0].numpy(), atol=2e-5)
    last = model.tokens(text, pair=pair)
    np.testing.assert_array_equal(last.vectors, model.tokens(text, layer=-1, pair=pair).vectors)


def test_next_sentence_equals_transformers(bert: Model, bert_folder: Path):
    a, b = "The dog plays in the garden", "the cat sleeps"
    encoding = bert.tokenizer.encode(a, b)
    logits = theirs(bert_folder, encoding.ids, encoding.segments).seq_relationship_logits
    assert bert.next_sentence(a, b) == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-5)
    assert bert.next_sentence(a, b) != pytest.approx(bert.next_sentence(b, a), abs=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_score_masks_each_token_in_turn(name, request):
    model: Model = request.getfixturevalue(name)
    text = "The cat sings."
    encoding = model.tokenizer.encode(text)
    kind = "BertForPreTraining" if name == "bert" else "RobertaForMaskedLM"
    expected = []
    for i, special in enumerate(encoding.special):
        if not special:
            ids = list(encoding.ids)
            ids[i] = model.tokenizer.mask_id
            out = theirs(request.getfixturevalue(f"{name}_folder"), ids, None, kind)
            logits = out.prediction_logits if name == "bert" else out.logits
            expected.append(float(logits[0, i].log_softmax(-1)[encoding.ids[i]]))
    found = model.score(text)
    np.testing.assert_allclose([token.score for token in found.tokens], expected, atol=1e-4)
    assert found.total == pytest.approx(sum(expected), abs=1e-3)
    assert [text[t.start : t.end] for t in found.tokens][-1] == "."
    assert found.perplexity == pytest.approx(np.exp(-found.total / len(expected)))


def test_a_long_text_is_read_whole_in_windows(bert: Model):
    text = " ".join(["the dog plays in the garden ."] * 12)
    result = bert.tokens(text)
    assert len(result) == len(bert.tokenizer.encode(text)) == 86 > bert.window == 32
    pieces = pieces_of(bert.tokenizer.encode(text), bert.window)
    for piece in pieces:
        (alone,) = bert.hidden([piece.ids])
        own = alone[piece.own].numpy()
        np.testing.assert_allclose(result.vectors[piece.at : piece.at + len(own)], own, atol=1e-5)


def test_a_blank_in_a_long_text_is_seen_in_the_window_that_owns_it(bert: Model):
    words = ["the dog plays in the garden ."] * 12
    words[6] = "the dog [MASK] in the garden ."
    text = " ".join(words)
    (blank,) = bert.fill(text, top=3)
    encoding = bert.tokenizer.encode(text)
    pieces = pieces_of(encoding, bert.window)
    at = encoding.ids.index(bert.tokenizer.mask_id)
    (piece,) = [p for p in pieces if p.owns(at)]
    (x,) = bert.hidden([piece.ids])
    with torch.no_grad():
        expected = bert.network.mlm_logits(x[piece.index(at)][None])[0].softmax(-1)
    np.testing.assert_allclose([c.score for c in blank], [float(expected[c.id]) for c in blank], atol=1e-5)
    assert len(bert.score(text).tokens) == len(encoding) - 2


def test_hidden_needs_no_tokenizer(bert_folder: Path, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bert_folder / name, tmp_path / name)
    model = load(tmp_path, device="cpu")
    ids, segments = [[2, 6, 7, 3], [2, 8, 3, 9, 10, 3]], [[0] * 4, [0, 0, 0, 1, 1, 1]]
    found = model.hidden(ids, segments)
    for mine, sequence, segment in zip(found, ids, segments):
        expected = theirs(bert_folder, sequence, segment).hidden_states[-1][0]
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=0)
    found[0].requires_grad_().sum().backward()  # fit for training a probe on
    with pytest.raises(EverybertError, match="no tokenizer"):
        model.embed(["text"])


def test_results_do_not_depend_on_the_neighbours(minilm: Model):
    texts = [" ".join(["one more word"] * n) for n in (1, 30, 2, 150, 7, 7, 40)] + [""]
    together = minilm.embed(texts)
    for i, text in enumerate(texts):
        np.testing.assert_allclose(minilm.embed([text])[0], together[i], atol=1e-6)
    np.testing.assert_allclose(minilm.embed(texts[::-1])[::-1], together, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "roberta", "minilm"])
def test_a_saved_model_answers_the_same(name, request, tmp_path: Path):
    model: Model = request.getfixturevalue(name)
    model.save(tmp_path / "copy")
    again = load(tmp_path / "copy", device="cpu")
    texts = ["The dog plays.", "", "The cat waits in the house. " * 20]
    np.testing.assert_array_equal(again.embed(texts), model.embed(texts))
    np.testing.assert_array_equal(again.attention(texts[0]).weights, model.attention(texts[0]).weights)
    assert again.pooling == model.pooling
    if "mlm" in model.network.heads:
        assert again.fill(TEXT) == model.fill(TEXT)
        assert again.score(texts[0]) == model.score(texts[0])


def test_transformers_reads_what_was_saved(bert: Model, tmp_path: Path):
    from transformers import AutoTokenizer, BertForPreTraining

    bert.save(tmp_path / "copy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "copy")
    ids = tokenizer("The dog plays.")["input_ids"]
    assert ids == bert.tokenizer.encode("The dog plays.").ids
    with torch.no_grad():
        x = BertForPreTraining.from_pretrained(tmp_path / "copy").eval().bert(torch.tensor([ids])).last_hidden_state
    torch.testing.assert_close(bert.hidden([ids])[0], x[0], atol=2e-5, rtol=0)


def test_the_same_word_means_two_things(minilm: Model):
    pet, code = "I love my pet Python", "I love coding in Python"
    for text in (pet, code):
        assert minilm.tokens(text).tokens.index("python") == 5
    before = [minilm.tokens(text, layer=0).vectors[5] for text in (pet, code)]
    after = [minilm.tokens(text).vectors[5] for text in (pet, code)]
    np.testing.assert_array_equal(before[0], before[1])
    assert np.abs(after[0] - after[1]).max() > 0.1


def test_the_papers_figure(minilm: Model):
    """Figure 2 of Devlin et al. 2019: eleven tokens at positions 0 to 10, two segments."""
    found = minilm.tokens("my dog is cute", layer=0, pair="he likes playing")
    assert found.tokens[:6] == ["[CLS]", "my", "dog", "is", "cute", "[SEP]"]
    embeddings = minilm.network.encoder.embeddings
    for position, (token, segment) in enumerate(zip(found.ids, found.segments)):
        with torch.no_grad():
            parts = (embeddings.token, token), (embeddings.segment, segment), (embeddings.position, position)
            total = sum(table.weight[row] for table, row in parts)
            expected = embeddings.norm(total)
        np.testing.assert_allclose(found.vectors[position], expected.numpy(), atol=1e-5)
    assert found.segments[:6] == [0] * 6 and set(found.segments[6:]) == {1}


def test_everybert_load_is_lazy_and_exact(bert_folder: Path):
    model = everybert.load(str(bert_folder), device="cpu", dtype="bfloat16")
    assert model.hidden([[2, 6, 3]])[0].dtype == torch.bfloat16
    assert model.embed(["the dog"]).dtype == np.float32
    with pytest.raises(EverybertError, match="float32"):
        everybert.load(bert_folder, dtype="int4")


def test_pairs_are_filled_as_texts_are(bert: Model):
    """One path: the masks of a pair, beside those of a text, in one batch; both texts of the pair count."""
    first, second = "the dog [MASK] in the garden", "nobody [MASK]"
    both = bert.fill_batch([first, (first, second)], top=3)
    alone = [bert.fill(first, top=3), bert.fill(first, 3, second)]
    assert [[[c.id for c in mask] for mask in masks] for masks in both] == [
        [[c.id for c in m] for m in x] for x in alone
    ]
    assert len(both[1]) == 2
    encoding = bert.tokenizer.encode(first, second)
    with torch.inference_mode():
        batch = Ragged.of([encoding.ids], [encoding.segments])
        logits = bert.network.mlm_logits(bert.network.encoder(batch))
    at = encoding.ids.index(bert.tokenizer.mask_id)
    best = logits[at].softmax(-1)[: bert.tokenizer.size].topk(3)
    assert [c.id for c in both[1][0]] == best.indices.tolist()
    np.testing.assert_allclose([c.score for c in both[1][0]], best.values, atol=1e-6)
    with pytest.raises(EverybertError, match=r"the pair has 4\d tokens, the model reads 32"):
        bert.fill("dog " * 38, pair=second)
