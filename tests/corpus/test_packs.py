import json
import pickle
import subprocess
import sys
from itertools import count, islice, pairwise

import corpus_texts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_corpus import MemoryCorpus, layout, random_corpus

from everybert.corpus import packs as module
from everybert.corpus import pmi
from everybert.corpus.build import build_corpus
from everybert.corpus.examples import KINDS, ExampleConfig
from everybert.corpus.masking import STRATEGIES, MaskingConfig
from everybert.corpus.packs import PackStream, Position, fill_packs
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in an epoch of the small corpora here."""
    monkeypatch.setattr(module, "BLOCK_TOKENS", 8000)
    monkeypatch.setattr(module, "BLOCK_PACKS", 4)


def stream(kind="pairs", strategy="token", corpus=None, capacity=1024, seed=0, where=None, length=64, **masking):
    corpus = corpus or random_corpus(30_000)
    corpus.phrases = [tuple(corpus.ids[i : i + 3].tolist()) for i in range(0, 3000, 50)]
    masking = MaskingConfig(strategy=strategy, **masking)
    return PackStream(corpus, where or layout(), ExampleConfig(kind, length), masking, seed, capacity)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def epoch_of(packs):
    return {int(e): p["position"] for p in packs for e in p["example"]}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(3, 64), max_size=300), st.integers(64, 400))
def test_packs_keep_every_example_once_and_never_overflow(lengths, capacity):
    lengths = np.array(lengths, dtype=np.int64)
    order, offsets = fill_packs(lengths, capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert offsets[0] == 0 and offsets[-1] == len(lengths) and (np.diff(offsets) > 0).all()
    for a, b in pairwise(offsets):
        gap = capacity - lengths[order[a:b]].sum()
        assert gap >= 0
        ahead = lengths[order[b : b + module.LOOKAHEAD]]
        assert (ahead > gap).all()  # nothing near at hand would have fitted


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_example_once(kind):
    s = stream(kind)
    assert s.blocks > 2
    packs = list(s.packs(epochs=1))
    planned = np.concatenate([s.plan(0, b).examples.id_E for b in range(s.blocks)])
    seen = np.concatenate([p["example"] for p in packs])
    assert len(seen) == len(np.unique(seen)) == len(planned)
    assert set(seen) == set(planned)
    for p in packs:
        assert len(p["tokens"]) == p["lengths"].sum() <= s.capacity
        assert p["lengths"].max() <= 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("roberta", [False, True])
def test_a_pack_is_laid_out_as_the_family_does(kind, roberta):
    where = layout(pair_separators=2, segments=False) if roberta else layout()
    s = stream(kind, where=where, mask_share=0.0, random_share=0.0)
    corpus, p = s.corpus, next(s.packs())
    examples = s.plan(0, 0).examples
    tokens = np.split(p["tokens"], np.cumsum(p["lengths"])[:-1])
    for e, ids in enumerate(tokens):
        a, b = examples.part_offsets_E1[e : e + 2]
        expected, segments = [where.cls_id], [0]
        for number, part in enumerate(range(a, b)):
            start = examples.part_start_P[part]
            text = corpus.ids[start : start + examples.part_length_P[part]].tolist()
            between = where.pair_separators if kind in ("pairs", "order") else 1
            tail = [where.sep_id] * (1 if part == b - 1 else between)
            expected += text + tail
            segments += [number if kind in ("pairs", "order") else 0] * (len(text) + len(tail))
        assert ids.tolist() == expected
        assert p["example"][e] == examples.id_E[e] and p["pair_label"][e] == examples.label_E[e]
        if not roberta:
            start = p["lengths"][:e].sum()
            assert p["segments"][start : start + len(segments)].tolist() == segments
    assert ("segments" in p) != roberta
    assert np.array_equal(p["mask_label"], p["tokens"][p["mask_index"]])
    assert all(v.dtype == np.int64 for k, v in p.items() if k != "position")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["pairs", "full"])
def test_the_same_packs_for_any_number_of_workers_and_ranks(kind, strategy):
    row = list(islice(stream(kind, strategy).packs(), 60))
    assert row[-1]["position"].epoch > 0  # over the end of an epoch
    for ranks, workers in ((1, 2), (1, 4), (2, 1), (2, 2)):
        for rank in range(ranks):
            for worker in range(workers):
                first, stride = rank + worker * ranks, ranks * workers
                mine = stream(kind, strategy).packs(first=first, stride=stride)
                expected = row[first::stride]
                assert all(same(a, b) for a, b in zip(mine, expected))


def test_any_pack_is_made_on_its_own():
    row = list(islice(stream().packs(), 40))
    for p in reversed(row):
        assert same(stream().make(p["position"]), p)


def test_a_run_resumes_at_its_position():
    row = list(islice(stream().packs(), 60))
    for n in (0, 1, 7, 33, 47):
        position = Position(*json.loads(json.dumps(row[n]["position"])))
        assert all(same(a, b) for a, b in zip(stream().packs(position), row[n:]))
    # A position may point past its block, as one does that is counted on from an earlier pack.
    for n, ahead in ((3, 5), (2, 40), (0, 55)):
        position = row[n]["position"]
        position = position._replace(pack=position.pack + ahead)
        assert same(next(stream().packs(position)), row[n + ahead])


def test_epochs_differ_in_order_pairs_and_masks():
    s = stream("document")  # whose examples hold the same text in every epoch
    first, second = (list(s.packs(Position(e), epochs=1)) for e in (0, 1))
    assert epoch_of(first).keys() == epoch_of(second).keys()
    assert not np.array_equal(first[0]["example"], second[0]["example"])
    hidden = []
    for packs in (first, second):
        masks = set()
        for p in packs:
            starts = np.concatenate([[0], np.cumsum(p["lengths"])])
            b = np.searchsorted(starts, p["mask_index"], side="right") - 1
            masks |= set(zip(p["example"][b].tolist(), (p["mask_index"] - starts[b]).tolist()))
        hidden.append(masks)
    assert abs(len(hidden[0] & hidden[1]) / len(hidden[0]) - 0.15) < 0.02


def test_draws_are_uniform_and_belong_to_examples_not_to_packs():
    def draws(epoch, **settings):
        found = {}
        for p in stream("document", **settings).packs(Position(epoch), epochs=1):
            starts = np.concatenate([[0], np.cumsum(p["lengths"])])
            b = np.searchsorted(starts, p["mask_index"], side="right") - 1
            keys = zip(p["example"][b].tolist(), (p["mask_index"] - starts[b]).tolist())
            found |= dict(zip(keys, p["draw"].tolist(), strict=True))
        return found

    first = draws(0)
    assert draws(0, capacity=512) == first and len(first) > 3000
    values = np.array(list(first.values())) / module.DRAWS
    assert values.min() >= 0 and values.max() < 1 and abs(values.mean() - 0.5) < 0.02
    for other in (draws(1), draws(0, seed=1)):
        assert not any(first[key] == other[key] for key in first.keys() & other.keys())


def test_seeds_differ():
    assert not np.array_equal(next(stream(seed=0).packs())["tokens"], next(stream(seed=1).packs())["tokens"])


def contents(s, epoch):
    """Every masked example of an epoch, whatever pack it is in."""
    found = set()
    for p in s.packs(Position(epoch), epochs=1):
        cuts = np.cumsum(p["lengths"])[:-1]
        found |= {tuple(x.tolist()) for x in np.split(p["tokens"], cuts)}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_static_masks_repeat_with_their_period(kind):
    s = stream(kind, static_duplicates=2)
    epochs = [contents(s, e) for e in range(4)]
    assert epochs[0] == epochs[2] and epochs[1] == epochs[3]
    assert len(epochs[0] & epochs[1]) < 0.1 * len(epochs[0])
    firsts = [next(s.packs(Position(e)))["example"] for e in (0, 2)]
    assert not np.array_equal(*firsts)  # in another order all the same


def test_the_rate_may_follow_a_schedule():
    rates = []
    for p in islice(stream().packs(first=1, stride=2, rates=(0.1 + 0.01 * n for n in count())), 10):
        rates.append(len(p["mask_index"]) / (len(p["tokens"]) - 3 * len(p["lengths"])))
    assert np.allclose(rates, 0.1 + 0.01 * np.arange(1, 21, 2), atol=0.01)


def test_span_boundaries_are_seen_and_next_to_the_span():
    s = stream(strategy="span")
    for p in islice(s.packs(), 10):
        left, right, place = p["span_left"], p["span_right"], p["span_place"]
        assert np.array_equal(left + place, p["mask_index"]) and (place >= 1).all()
        assert (p["mask_index"] < right).all()
        assert not np.isin(left, p["mask_index"]).any() and not np.isin(right, p["mask_index"]).any()
        starts = np.cumsum(p["lengths"])
        assert np.array_equal(np.searchsorted(starts, left, "right"), np.searchsorted(starts, right, "right"))


def test_languages_travel_with_the_pack():
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 20, 8).tolist() for _ in range(40)]
    corpus = MemoryCorpus(documents, [0] * 30 + [1] * 10, ("en", "fr"))
    s = PackStream(corpus, layout(), ExampleConfig("full", 64, alpha=0.0), capacity=512)
    language = np.concatenate([p["language"] for p in s.packs(epochs=1)])
    assert set(language) == {0, 1}
    assert abs(language.mean() - 0.5) < 0.1  # α = 0: in equal measure


def test_gaps_are_small():
    s = stream(corpus=random_corpus(200_000), capacity=4096)
    used = [len(p["tokens"]) / 4096 for p in s.packs(epochs=1)]
    assert np.median(used) > 0.995


def test_one_huge_document_and_tiny_corpora_work():
    for documents in ([[20] * 3000, [5, 5]], [[3, 3], [4, 4]]):
        for kind in KINDS:
            s = stream(kind, corpus=MemoryCorpus(documents * 3))
            assert sum(len(p["example"]) for p in s.packs(epochs=1)) > 0


def test_mistakes_are_named():
    with pytest.raises(EverybertError, match="cannot hold"):
        stream(capacity=32)
    lonely = MemoryCorpus([[9]] * 40)
    with pytest.raises(EverybertError, match="two sentences"):
        PackStream(lonely, layout(), ExampleConfig("order", 64))
    with pytest.raises(EverybertError, match="--pmi"):
        PackStream(random_corpus(), layout(), masking=MaskingConfig(strategy="pmi"))
    with pytest.raises(IndexError):
        stream().make(Position(0, 0, 10_000))


def test_streams_can_be_sent_to_workers():
    s = stream()
    at = Position(0, 1, 2)
    assert same(pickle.loads(pickle.dumps(s)).make(at), s.make(at))


def test_torch_is_not_needed():
    code = "import sys, everybert.corpus.packs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A corpus folder in several shards, with collocations."""
    folder = tmp_path_factory.mktemp("packs")
    (folder / "text.txt").write_text("\n\n".join(corpus_texts.documents(300)), "utf-8")
    options = {"workers": 1, "pmi": True, "shard_characters": 20_000, "heldout": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pmi, "MIN_COUNT", 2)
        patch.setattr(pmi, "MIN_PMI", 0.5)
        build_corpus(folder / "text.txt", corpus_texts.tokenizer(), folder / "corpus", **options)
    return folder / "corpus"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_of_a_built_corpus(built, strategy):
    corpus = Corpus.open(built)
    where = ExampleLayout.of(Tokenizer.load(corpus.tokenizer_path))
    masking = MaskingConfig(strategy=strategy, replacement="unigram")
    s = PackStream(corpus, where, ExampleConfig("document", 64), masking, capacity=1024)
    text = []
    for p in s.packs(epochs=1):
        p["tokens"][p["mask_index"]] = p["mask_label"]
        text.append(p["tokens"][~np.isin(p["tokens"], [where.cls_id, where.sep_id])])
    counts = np.bincount(np.concatenate(text), minlength=where.vocab_size)
    assert np.array_equal(counts, corpus.unigram())  # every token of the corpus, once
    at = Position(0, 0, 1)
    assert same(pickle.loads(pickle.dumps(s)).make(at), s.make(at))
    assert sum(len(p["example"]) for p in PackStream(Corpus.open(built, "heldout"), where).packs(epochs=1)) > 0
