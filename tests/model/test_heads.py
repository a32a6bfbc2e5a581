import pytest
import torch

from everybert.errors import EverybertError
from everybert.model.config import PRESETS
from everybert.model.heads import FeatureConfig, Network, add_feature_head, head_logits, make_head
from everybert.model.ragged import Ragged

SMALL = {"vocab_size": 40, "hidden_size": 16, "heads": 2, "intermediate_size": 24, "layers": 5, "max_positions": 12}
BATCH = Ragged.of([[5, 6, 7, 8], [9, 10]])
HEADS = {"mlm": None, "nsp": None, "classify": 3, "choose": None, "tag": 5, "answer": None}
FORMS = {
    "bert-tiny": ("pooler", "pooler", "linear"),
    "albert-base-v2": ("pooler", "pooler", "linear"),
    "roberta-base": ("tanh", "pooler", "linear"),
    "distilbert-base-uncased": ("relu", "relu", "linear"),
    "modernbert-base": ("norm", "norm", "norm"),
}
"""The forms of classify, choose and tag, from the table at the top of heads.py."""


def network(name="bert-tiny", heads=HEADS, **changes):
    torch.manual_seed(0)
    return Network(PRESETS[name].replace(**{**SMALL, "windows": None, **changes}), heads).eval()


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_shapes_and_forms_of_every_family(name):
    model = network(name)
    for head, shape in (("nsp", (2, 2)), ("classify", (2, 3)), ("choose", (2, 1)), ("tag", (6, 5)), ("answer", (6, 2))):
        assert head_logits(model, BATCH, head).shape == shape, head
    x_TH = model.encoder(BATCH)
    assert model.mlm_logits(x_TH).shape == (6, 40)
    assert torch.allclose(model.mlm_logits(x_TH, torch.tensor([4, 1])), model.mlm_logits(x_TH)[[4, 1]], atol=1e-6)
    for head, form in zip(("classify", "choose", "tag"), FORMS[name]):
        module = model.heads[head]
        assert model.reads_pooler(head) == (form == "pooler")
        assert (module.dense is not None) == (form in ("tanh", "relu", "norm"))
        assert (module.norm is not None) == (form == "norm")
        assert module.dense is None or module.activation == {"norm": "gelu"}.get(form, form)


@torch.no_grad()
def test_the_equations():
    model = network()
    x_TH = model.encoder(BATCH)
    pooled = torch.tanh(model.pooler.dense(x_TH[[0, 4]]))
    torch.testing.assert_close(head_logits(model, BATCH, "classify"), model.heads["classify"].output(pooled))
    mlm = model.heads["mlm"]
    g = mlm.norm(torch.nn.functional.gelu(mlm.dense(x_TH)))
    torch.testing.assert_close(model.mlm_logits(x_TH), g @ model.encoder.embeddings.token.weight.T + mlm.bias)
    assert mlm.decoder is None and network(tied=False).heads["mlm"].decoder.weight.shape == (40, 16)


ROWS = ("embeddings", "second-to-last", "last", "weighted", "sum", "concat")
"""The rows of the BERT paper's table of features."""


@pytest.mark.parametrize("layers", ROWS)
@pytest.mark.parametrize("pool", ["mean", "cls"])
@torch.no_grad()
def test_feature_heads_read_hidden_states(layers, pool):
    model, states = network(heads={}), []
    head = add_feature_head(model, "classify", 3, FeatureConfig(layers, pool)).eval()
    assert head.output.in_features == (64 if layers == "concat" else 16)
    model.encoder(BATCH, states)
    weights = torch.arange(len(states) - 1.0)
    mean = sum(w * x for w, x in zip(weights.softmax(0), states[1:]))
    rows = (states[0], states[-2], states[-1], mean, sum(states[-4:]), torch.cat(states[-4:], -1))
    last = dict(zip(ROWS, rows))[layers]
    if layers == "weighted":
        head.mix.copy_(weights)
    wanted = torch.stack([x[0] if pool == "cls" else x.mean(0) for x in BATCH.split(last)])
    torch.testing.assert_close(head_logits(model, BATCH, "classify"), head.output(wanted))
    tags = add_feature_head(model, "tag", 5, FeatureConfig(layers, pool)).eval()
    if layers == "weighted":
        tags.mix.copy_(weights)
    torch.testing.assert_close(head_logits(model, BATCH, "tag"), tags.output(last))


def test_mistakes_are_one_line():
    config = PRESETS["bert-tiny"]
    for call, message in (
        (lambda: make_head(config, "sing"), "there is no head 'sing'"),
        (lambda: make_head(config, "tag"), "tag head needs its number of labels"),
        (lambda: network(heads={"mlm": None}).head("tag"), r"no tag head \(it has: mlm\)"),
        (lambda: FeatureConfig("first"), "second-to-last, last, weighted, sum, concat"),
    ):
        with pytest.raises(EverybertError, match=message):
            call()
