import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_model
import torch
from refusals import refuses

import everybert
from everybert.inference.model import Model, load
from everybert.inside.masked import windows_of
from everybert.model import fp8
from everybert.model.ragged import Ragged
from everybert.text.formats import TOKENIZER_FILES, has_tokenizer

TEXT = "The dog [MASK] in the garden, and [MASK] minds."


class Oracle:
    """A model of transformers that computes what is asked of ours."""

    def __init__(self, folder: Path, kind: str) -> None:
        import transformers

        self.model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()

    def __call__(self, ids: list[int], segments: list[int] | None = None):
        more = {"token_type_ids": torch.tensor([segments])} if segments is not None else {}
        with torch.no_grad():
            return self.model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, **more)

    def logits(self, ids: list[int]) -> torch.Tensor:
        out = self(ids)
        return (out.prediction_logits if "prediction_logits" in out else out.logits)[0]


@pytest.fixture(scope="module")
def oracle(bert_folder: Path) -> Oracle:
    return Oracle(bert_folder, "BertForPreTraining")


@pytest.fixture(params=["bert", "roberta"])
def both(request) -> tuple[Model, Oracle]:
    """A model, and the same of transformers."""
    if request.param == "bert":
        return request.getfixturevalue("bert"), request.getfixturevalue("oracle")
    return request.getfixturevalue("roberta"), Oracle(request.getfixturevalue("roberta_folder"), "RobertaForMaskedLM")


def test_fill_gives_transformers_scores_for_each_mask(both):
    model, theirs = both
    blanks = model.fill(TEXT, top=7)
    assert [len(blank) for blank in blanks] == [7, 7]
    ids = model.tokenizer.encode(TEXT).ids
    logits = theirs.logits(ids)
    places = [i for i, token in enumerate(ids) if token == model.tokenizer.mask_id]
    assert len(places) == 2
    for blank, place in zip(blanks, places):
        scores, best = logits[place].softmax(-1)[: model.tokenizer.size].topk(7)
        assert [c.id for c in blank] == best.tolist()
        np.testing.assert_allclose([c.score for c in blank], scores.numpy(), atol=1e-5)
        for candidate in blank:
            assert candidate.token == model.tokenizer.decode([candidate.id], skip_special=False).strip()


def test_attention_and_every_layer_equal_transformers(both):
    model, theirs = both
    text, pair = "The dog plays", "Nobody minds a cat."
    found = model.attention(text, pair)
    encoding = model.tokenizer.encode(text, pair)
    out = theirs(encoding.ids, encoding.segments)
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


def test_next_sentence_equals_transformers(bert: Model, oracle: Oracle):
    a, b = "The dog plays in the garden", "the cat sleeps"
    encoding = bert.tokenizer.encode(a, b)
    logits = oracle(encoding.ids, encoding.segments).seq_relationship_logits
    assert bert.next_sentence(a, b) == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-5)
    assert bert.next_sentence(a, b) != pytest.approx(bert.next_sentence(b, a), abs=1e-5)


def test_score_masks_each_token_in_turn(both):
    model, theirs = both
    text = "The cat sings."
    encoding = model.tokenizer.encode(text)
    expected = []
    for i, special in enumerate(encoding.special):
        if not special:
            ids = list(encoding.ids)
            ids[i] = model.tokenizer.mask_id
            expected.append(float(theirs.logits(ids)[i].log_softmax(-1)[encoding.ids[i]]))
    found = model.score(text)
    np.testing.assert_allclose([token.score for token in found.tokens], expected, atol=1e-4)
    assert found.total == pytest.approx(sum(expected), abs=1e-3)
    assert [text[t.start : t.end] for t in found.tokens][-1] == "."


def test_a_long_text_is_read_whole_in_windows(bert: Model):
    text = " ".join(["the dog plays in the garden ."] * 12)
    result = bert.tokens(text)
    assert len(result.tokens) == len(bert.tokenizer.encode(text)) == 86 > bert.window == 32
    windows = windows_of(bert.tokenizer.encode(text), bert.window)
    for window in windows:
        (alone,) = bert.hidden([window.ids])
        own = alone[window.own].numpy()
        np.testing.assert_allclose(result.vectors[window.own_start : window.own_start + len(own)], own, atol=1e-5)


def test_a_blank_in_a_long_text_is_seen_in_the_window_that_owns_it(bert: Model):
    words = ["the dog plays in the garden ."] * 12
    words[6] = "the dog [MASK] in the garden ."
    text = " ".join(words)
    (blank,) = bert.fill(text, top=3)
    encoding = bert.tokenizer.encode(text)
    windows = windows_of(encoding, bert.window)
    at = encoding.ids.index(bert.tokenizer.mask_id)
    (window,) = [p for p in windows if p.owns(at)]
    (x,) = bert.hidden([window.ids])
    with torch.no_grad():
        expected = bert.network.mlm_logits(x[at - window.shift][None])[0].softmax(-1)
    np.testing.assert_allclose([c.score for c in blank], [float(expected[c.id]) for c in blank], atol=1e-5)
    assert len(bert.score(text).tokens) == len(encoding) - 2


def test_hidden_needs_no_tokenizer(bert_folder: Path, oracle: Oracle, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bert_folder / name, tmp_path / name)
    model = load(tmp_path, device="cpu")
    ids, segments = [[2, 6, 7, 3], [2, 8, 3, 9, 10, 3]], [[0] * 4, [0, 0, 0, 1, 1, 1]]
    found = model.hidden(ids, segments)
    for mine, sequence, segment in zip(found, ids, segments):
        expected = oracle(sequence, segment).hidden_states[-1][0]
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=0)
    found[0].requires_grad_().sum().backward()  # fit for training a probe on
    refuses("no tokenizer", model.embed, ["text"])


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


def test_everybert_load_takes_a_dtype(bert_folder: Path):
    model = everybert.load(str(bert_folder), device="cpu", dtype="bfloat16")
    assert model.hidden([[2, 6, 3]])[0].dtype == torch.bfloat16
    assert model.embed(["the dog"]).dtype == np.float32


@pytest.mark.parametrize("dtype", ["fp8", torch.float8_e4m3fn])
def test_fp8_is_not_for_the_cpu(bert_folder: Path, dtype):
    refuses("fp8 needs an NVIDIA GPU .*this is cpu", everybert.load, bert_folder, device="cpu", dtype=dtype)


def test_a_published_model_stays_near_in_fp8(minilm: Model, minilm_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """torch's CPU build (2.13) computes the products too, if nothing asks for the device."""
    monkeypatch.setattr(fp8, "device_of", lambda encoder: torch.device("cuda"))
    monkeypatch.setattr(fp8, "HAS_TRITON", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    texts = ["The dog sleeps.", "Is a river longer than a road?", " ".join(["Old engines need oil."] * 9)]
    try:
        found = load(minilm_folder, device="cpu", dtype="fp8").embed(texts)
    except RuntimeError as error:
        pytest.skip(f"no fp8 products on this CPU: {error}")
    cosine = (found * minilm.embed(texts)).sum(1)
    assert cosine.mean() > 0.995 and cosine.min() > 0.99


@pytest.mark.gpu
def test_vectors_in_fp8_are_near_on_the_device():
    model, exact = (
        load("everybert-classic", device=device, dtype=dtype) for device, dtype in (("cuda", "fp8"), ("cpu", None))
    )
    texts = ["The old river runs by the house. " * (1 + i % 9) + f"Number {i}." for i in range(300)]
    wanted = exact.embed(texts, normalize=True)
    for _ in range(3):  # run, recorded, replayed
        cosine = (model.embed(texts, normalize=True) * wanted).sum(1)
        assert cosine.mean() > 0.995 and cosine.min() > 0.98


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
    refuses(r"the pair has 4\d tokens, the model reads 32", bert.fill, "dog " * 38, pair=second)


# ── tasks, adapters, feature-based heads ─────────────────────────────────────────────────────────────────────

ROWS = [("the film was good", "pos"), ("the food was bad", "neg"), ("a great song", "pos"), ("an awful day", "neg")] * 5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Two adapters on one encoder, with labels of their own, and a feature-based head."""
    out = tmp_path_factory.mktemp("tuned")
    settings = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "quiet": True, "device": "cpu"}
    other = [(text, {"pos": "joy", "neg": "anger"}[label]) for text, label in ROWS]
    everybert.finetune(base, "classify", ROWS, ROWS, out / "first", mode="lora", **settings)
    everybert.finetune(base, "classify", other, other, out / "second", mode="lora", **settings)
    everybert.finetune(base, "classify", ROWS, ROWS, out / "frozen", mode="frozen", features="sum", **settings)
    return out


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A folder with one head of each kind."""
    parent = tmp_path_factory.mktemp("every")
    tags = ["O", "B-PER", "I-PER"]
    return {
        "classify": tiny_model.save(parent / "c", {"classify": 3}, ["a", "b", "c"]),
        "regress": tiny_model.save(parent / "r", {"classify": 1}, problem_type="regression"),
        "tag": tiny_model.save(parent / "t", {"tag": 3}, tags, seed=1),
        "answer": tiny_model.save(parent / "q", {"answer": None}),
        "choose": tiny_model.save(parent / "m", {"choose": None}),
    }


def test_classify_gives_probabilities_of_every_label_for_texts_and_pairs(every):
    model = everybert.load(every["classify"])
    found = model.classify(["the film was good", ("john lives in paris", "mary works")])
    assert [set(p.scores) for p in found] == [{"a", "b", "c"}] * 2
    for p in found:
        assert sum(p.scores.values()) == pytest.approx(1)
        assert p.score == max(p.scores.values()) == p.scores[p.label]
    assert [p.label for p in model.classify("the film was good")] == [found[0].label]
    assert model.classify([]) == []


def test_a_book_is_read_whole_in_flat_memory(every, tmp_path):
    """20,000 words: what stands at their end is found there, and no batch grows with the text."""
    import resource

    book = "the dog eats the food and he sees it . " * 2000
    end = len(book)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answerer = everybert.load(every["answer"])
    found = answerer.answer("who?", book + "mary smith works in london .", top=20)
    assert all(book[a.start : a.end] == a.text or a.end > end for a in found)
    tagger = everybert.load(every["tag"])
    spans = tagger.tag(book + "John Smith")
    assert max((s.end for s in spans), default=0) > end * 0.9
    scores = [
        everybert.load(every["classify"]).classify(book + tail)[0].scores for tail in ("", "bad awful poor " * 500)
    ]
    assert scores[0] != pytest.approx(scores[1], abs=1e-7)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_regress_gives_numbers_and_refuses_to_classify(every):
    model = everybert.load(every["regress"])
    values = model.regress(["the film", ("the film", "the song")])
    assert all(isinstance(v, float) for v in values)
    refuses("predicts a number", model.classify, "the film")


def test_tag_spans_are_places_in_the_text(every):
    model = everybert.load(every["tag"])
    text = "John Smith lives in  Paris."
    spans = model.tag(text)
    assert all(text[s.start : s.end] == s.text and s.label == "PER" for s in spans)
    places = [[(s.start, s.end) for s in one] for one in model.tag([text, "the dog"])]
    assert places == [[(s.start, s.end) for s in one] for one in (spans, model.tag("the dog"))]
    words = model.tag([["John", "Smith", "lives"]])
    assert all("John Smith lives"[s.start : s.end] == s.text for s in words[0])


def test_answers_are_spans_of_the_context_best_first(every):
    model = everybert.load(every["answer"])
    context = "john lives in london. " * 30 + "mary works in paris."
    found = model.answer("where does mary work?", context, top=4)
    assert len(found) == 4 and [a.score for a in found] == sorted((a.score for a in found), reverse=True)
    assert all(context[a.start : a.end] == a.text for a in found)
    both = model.answer(["who?", "where?"], context)
    assert [len(one) for one in both] == [1, 1]
    refuses("2 questions but 1 contexts", model.answer, ["who?", "where?"], [context])


def test_choose_scores_every_ending(every):
    model = everybert.load(every["choose"])
    choice = model.choose("the dog", ["eats .", "is red .", "lives in paris ."])
    assert sum(choice.scores) == pytest.approx(1) and choice.scores[choice.index] == choice.score == max(choice.scores)
    assert choice.text == ["eats .", "is red .", "lives in paris ."][choice.index]


def test_adapters_share_an_encoder_and_switch(base, adapters):
    model = everybert.load(base)
    first, second = model.add_adapter(adapters / "first"), model.add_adapter(adapters / "second", "mood")
    text = "the film was good"
    a, b = model.classify(text, adapter=first)[0], model.classify(text, adapter=second)[0]
    assert set(a.scores) == {"pos", "neg"} and set(b.scores) == {"joy", "anger"}
    assert model.classify(text, adapter=first)[0] == a
    refuses("no classify head|no head for classify", model.classify, text)  # the bare encoder again
    refuses("no adapter 'third'", model.classify, text, adapter="third")


def test_an_adapters_folder_loads_as_a_model_and_merges(base, adapters, tmp_path):
    model = everybert.load(adapters / "first")
    before = model.classify("the food was bad")[0]
    refuses("merge", model.save, tmp_path / "unmerged")
    model.merge()
    model.save(tmp_path / "merged")
    after = everybert.load(tmp_path / "merged").classify("the food was bad")[0]
    assert after.scores == pytest.approx(before.scores, abs=1e-5)
    encoder = everybert.load(base)
    assert (encoder.embed(["the food"]) != model.embed(["the food"])).any()


def test_feature_based_heads_survive_load_and_save(adapters, tmp_path):
    model = everybert.load(adapters / "frozen")
    before = model.classify("an awful day")[0]
    model.save(tmp_path / "again")
    assert everybert.load(tmp_path / "again").classify("an awful day")[0].scores == pytest.approx(before.scores)


def test_an_adapter_without_its_base_says_how_to_load_it(adapters, tmp_path):
    shutil.copytree(adapters / "first", tmp_path / "moved")
    (tmp_path / "moved" / "manifest.json").unlink()
    config = tmp_path / "moved" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/nowhere/base"}))
    refuses(r"add_adapter\(folder\)", everybert.load, tmp_path / "moved")


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_tokenizer_is_found_in_every_file_that_is_read(name, tmp_path):
    assert not has_tokenizer(tmp_path)
    (tmp_path / name).touch()
    assert has_tokenizer(tmp_path)
