"""Whatever ends a build, and wherever: readers find a whole corpus or none, and the same command makes it whole."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import documents, tokenizer
from faults import DONE, KINDS, SAID, SURVIVED, Faults

from everybert.corpus import build, pmi
from everybert.corpus.build import build_corpus, verify
from everybert.corpus.shards import Corpus
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(build, "UNIT", 300)
    monkeypatch.setattr(pmi, "MIN_COUNT", 2)
    monkeypatch.setattr(pmi, "MIN_PMI", 1.0)
    monkeypatch.setattr("os.fsync", lambda handle: None)  # processes die here, not machines


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    tokenizer("wordpiece").save(place / "tokenizer")
    (place / "new.txt").write_text("\n\n".join(documents(8)), "utf-8")
    (place / "old.txt").write_text("\n\n".join(documents(6, seed=5)), "utf-8")
    return place


class Sweep:
    """A build that meets every fault in turn, each time from the same state, and is then run again."""

    def __init__(self, place: Path, texts: Path, prepare, **how):
        self.out, self.before, self.prepare = place / "work" / "c", place / "before", prepare
        self.make = lambda out, name="new.txt", **more: build_corpus(
            texts / name, texts / "tokenizer", out, **{"workers": 1, "heldout": 0.2, "shard_characters": 900, **more}
        )
        self.how = how
        self.out.parent.mkdir()
        prepare(self)
        self.old = self.read()
        shutil.copytree(self.out.parent, self.before)
        self.make(self.out, **how)
        self.new = self.read()
        self.whole = {p.relative_to(self.out): p.read_bytes() for p in self.out.rglob("*") if p.is_file()}
        self.reset()
        self.seen: set[object] = set()

    def reset(self):
        shutil.rmtree(self.out.parent)
        shutil.copytree(self.before, self.out.parent)  # with the times of the files

    def read(self):
        """What a reader finds: everything a corpus offers, or None where it is said that there is none."""
        try:
            corpus = Corpus.open(self.out)
        except EverybertError as error:
            assert "\n" not in str(error) and not (self.out / "corpus.json").exists()
            return None
        verify(self.out)
        ids = corpus.tokens(0, corpus.token_count)
        assert (corpus.unigram() == np.bincount(ids, minlength=corpus.vocab_size)).all()
        assert Tokenizer.load(corpus.tokenizer_path).digest == corpus.tokenizer_digest
        mined = corpus.collocations()
        assert (mined is None) == ("collocations" not in corpus.meta)
        return ids.tobytes(), corpus.sentence_offsets.tobytes(), None if mined is None else tuple(mined)

    def examine(self, kind, step, code):
        where = f"{kind} at {step}, which ended with {code}"
        killed = {"kill": -signal.SIGKILL, "cut-kill": -signal.SIGXFSZ}.get(kind)
        assert code in (DONE, SURVIVED, SAID if killed is None else killed), where
        self.seen.add(self.read())
        self.make(self.out, **self.how)
        found = {p.relative_to(self.out): p.read_bytes() for p in self.out.rglob("*") if p.is_file()}
        assert found == self.whole, where
        assert [p.name for p in self.out.parent.iterdir()] == ["c"], where
        self.reset()

    def run(self, kinds):
        faults = Faults(self.out.parent, self.examine, kinds)

        def action():
            faults.begin()
            self.make(self.out, **self.how)

        faults.run(action)
        for kind, codes in faults.codes.items():
            assert len(codes) >= 3, (kind, codes)
        return faults


def nothing(sweep):
    pass


def another(sweep):
    sweep.make(sweep.out, "old.txt", pmi=True)


def unfinished(sweep):
    """A build that was stopped after its first shard."""
    close = build.ShardWriter.close

    def dying(self, number, digest):
        if number == 1:
            raise KeyboardInterrupt
        close(self, number, digest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build.ShardWriter, "close", dying)
        sweep.make(sweep.out)


def made(sweep):
    sweep.make(sweep.out)


CASES = {
    "new": (nothing, {"pmi": True}),
    "in place of another": (another, {"fresh": True}),
    "continued": (unfinished, {}),
    "mined": (made, {"pmi": True}),
}


def swept(tmp_path, texts, case, kinds):
    prepare, how = CASES[case]
    sweep = Sweep(tmp_path, texts, prepare, **how)
    assert sweep.old != sweep.new and len(list((sweep.before).iterdir())) == (case != "new")
    faults = sweep.run(kinds)
    for seen in sweep.seen - {None, sweep.old, sweep.new}:  # a corpus whose mining was not finished
        assert seen[2] is None and seen[:2] in {whole[:2] for whole in (sweep.old, sweep.new) if whole is not None}
    assert sweep.new in sweep.seen
    return faults


@pytest.mark.parametrize("case", CASES)
def test_a_build_killed_or_out_of_disk_anywhere(tmp_path, texts, case):
    more = {"continued": ("ENOSPC",), "mined": ("EIO", "cut")}.get(case, ())
    faults = swept(tmp_path, texts, case, ("kill", *more))
    assert len(faults.codes["kill"]) >= (5 if case == "mined" else 20)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_build_with_every_fault(tmp_path, texts, case):
    swept(tmp_path, texts, case, KINDS)
