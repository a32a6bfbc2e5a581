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


def sentence(seed, size):
    return " ".join(np.random.default_rng(seed).choice(WORDS, size))


@pytest.mark.parametrize(
    ("name", "suffix", "text", "outputs"),
    [
        ("classify", "ForSequenceClassification", sentence(0, 20), ["logits"]),  # [CLS] is global
        ("tag", "ForTokenClassification", sentence(1, 20).split(), ["logits"]),  # nothing is
        ("answer", "ForQuestionAnswering", (sentence(2, 5), sentence(3, 15)), ["start_logits", "end_logits"]),
        ("choose", "ForMultipleChoice", (sentence(4, 6), [sentence(5, 7), sentence(6, 7)]), ["logits"]),
    ],
)
def test_outputs_are_those_of_transformers(tmp_path, tokenizer, name, suffix, text, outputs):
    """answer: the question is global; choose: what follows the separators."""
    model = tiny_models.make("longformer", suffix, pad_token_id=1, sep_token_id=2, bos_token_id=0, eos_token_id=2)
    model.save_pretrained(tmp_path)
    loaded = load_network(tmp_path)
    task = load_task(name, loaded.network, loaded.labels)
    features = task.encode(tokenizer, loaded.config, [text])
    assert (features.global_tokens is None) == (name == "tag")
    ids = torch.tensor(np.stack(features.ids))
    with torch.no_grad():
        found = model(input_ids=ids[None] if name == "choose" else ids)
    expected = torch.stack([found[key][0] for key in outputs], -1).squeeze(-1)
    ours = task.run(loaded.network, features)
    ours = np.concatenate(ours) if name == "choose" else ours[0]
    np.testing.assert_allclose(ours, expected.numpy(), atol=2e-5)
