"""The tiny BERT that most tests of this room run on."""

import pytest
import tiny_bert

from everybert.store.huggingface import load_network
from everybert.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def bert(request, tmp_path_factory):
    """(what is loaded, tokenizer, folder) of one with the head and the labels that the module names in HEAD."""
    folder = tiny_bert.save(tmp_path_factory.mktemp("m"), *request.module.HEAD)
    return load_network(folder), Tokenizer.load(folder), folder
