"""Longformer's global tokens differ by task, as `transformers` sets them when the caller does not."""

import numpy as np
import pytest
import tiny_models
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from everybert.store.huggingface import load_network
from everybert.tasks import load_task
from everybert.text.tokenizer import Tokenizer

WORDS = [f"w{i}" for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {t: i for i, t in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *WORDS])}
    backend = Backend(models.BPE({**vocab}, [], unk_token="<unk>"))
    backend.add_tokens(WORDS)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend)


def load(folder, suffix, **changes):
    model = tiny_models.make(
        "longformer", suffix, pad_token_id=1, sep_token_id=2, bos_token_id=0, eos_token_id=2, **changes
    )
    model.save_pretrained(folder)
    return model, load_network(folder)


def sentence(seed, size):
    return " ".join(np.random.default_rng(seed).choice(WORDS, size))


def ids_of(features, i=0):
    return torch.tensor([features.ids[i].tolist()])


def test_classify_has_cls(tmp_path, tokenizer):
    model, loaded = load(tmp_path, "ForSequenceClassification")
    task = load_task("classify", loaded.network, loaded.labels)
    features = task.encode(tokenizer, loaded.config, [sentence(0, 20)])
    with torch.no_grad():
        expected = model(input_ids=ids_of(features)).logits[0]
    np.testing.assert_allclose(task.run(loaded.network, features)[0], expected.numpy(), atol=2e-5)


def test_tag_has_none(tmp_path, tokenizer):
    model, loaded = load(tmp_path, "ForTokenClassification")
    task = load_task("tag", loaded.network, loaded.labels)
    features = task.encode(tokenizer, loaded.config, [sentence(1, 20).split()])
    assert features.global_tokens is None
    with torch.no_grad():
        expected = model(input_ids=ids_of(features)).logits[0]
    np.testing.assert_allclose(task.run(loaded.network, features)[0], expected.numpy(), atol=2e-5)


def test_answer_has_the_question(tmp_path, tokenizer):
    model, loaded = load(tmp_path, "ForQuestionAnswering")
    task = load_task("answer", loaded.network)
    features = task.encode(tokenizer, loaded.config, [(sentence(2, 5), sentence(3, 15))])
    with torch.no_grad():
        out = model(input_ids=ids_of(features))
    expected = torch.stack((out.start_logits[0], out.end_logits[0]), -1)
    np.testing.assert_allclose(task.run(loaded.network, features)[0], expected.numpy(), atol=2e-5)


def test_choose_has_what_follows_the_separators(tmp_path, tokenizer):
    model, loaded = load(tmp_path, "ForMultipleChoice")
    task = load_task("choose", loaded.network)
    endings = [sentence(5, 7), sentence(6, 7)]
    features = task.encode(tokenizer, loaded.config, [(sentence(4, 6), endings)])
    with torch.no_grad():
        expected = model(input_ids=torch.cat([ids_of(features, i) for i in (0, 1)])[None]).logits[0]
    ours = np.concatenate(task.run(loaded.network, features))
    np.testing.assert_allclose(ours, expected.numpy(), atol=2e-5)
