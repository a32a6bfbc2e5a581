"""Tiny random models that the tests of this room look into."""

import pytest
import tiny_model

from everybert.inference.model import load


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_model.save(root / "words", {"mlm": None, "nsp": None}, seed=1)
    tiny_model.save(root / "labels", {"classify": 3}, ["bad", "fine", "good"], seed=2)
    tiny_model.save(root / "qa", {"answer": None}, seed=3)
    tiny_model.save(root / "pre", {"mlm": None}, seed=4, norm="pre", family="megatron-bert", embedding_norm=False)
    return root


@pytest.fixture(scope="session")
def words(folders):
    """A model with an MLM and a next-sentence head."""
    return load(folders / "words", device="cpu")


@pytest.fixture(scope="session")
def labels(folders):
    """A classifier."""
    return load(folders / "labels", device="cpu")


@pytest.fixture(scope="session")
def qa(folders):
    """An answerer."""
    return load(folders / "qa", device="cpu")


@pytest.fixture(scope="session")
def pre(folders):
    """A pre-norm model."""
    return load(folders / "pre", device="cpu")
