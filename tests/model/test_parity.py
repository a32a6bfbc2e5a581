"""Every family and every head against `transformers`, on random weights: outputs, losses and gradients within 1e-5."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import CLASSES, EVERY, STEMS, make
from torch.nn import functional as F

from everybert.model.losses import label_loss
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network, save_network, to_transformers
from everybert.tasks.answer import span_loss
from everybert.tasks.choose import choice_loss

FAMILIES = list(STEMS)
LENGTHS = (1, 30, 3, 38, 17, 17)
NO_SEGMENTS = ("distilbert", "modernbert", "mpnet", "eurobert", "esm")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
OFF = {
    kind: {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0} for kind in STEMS
} | {
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0},
    "albert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
    "modernbert": {},
    "eurobert": {},
    "electra": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "summary_last_dropout": 0.0},
}


def both(tmp_path, kind, suffix="Model", **changes):
    """The same weights in `transformers`' model and in ours."""
    theirs = make(kind, suffix, **OFF[kind], **changes)
    theirs.save_pretrained(tmp_path / "folder")
    return theirs, load_network(tmp_path / "folder").network


def texts(kind, lengths=LENGTHS, seed=1):
    """Ids without special meaning to any family, and segments where the family has two."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in lengths]
    segments = [[0] * (n // 2) + [1] * (n - n // 2) for n in lengths]
    two = kind in ("bert", "albert", "megatron-bert", "roberta-prelayernorm", "longformer", "nomic_bert", "roformer")
    return ids, segments if two else None


def theirs_of(model, ids, segments=None, **more):
    """`transformers` on one sequence alone, so that its padding plays no part."""
    if segments is not None:
        more["token_type_ids"] = torch.tensor([segments])
    return model(input_ids=torch.tensor([ids]), **more)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("with_segments", [False, True])
def test_hidden_states(tmp_path, kind, with_segments):
    theirs, ours = both(tmp_path, kind)
    ids, segments = texts(kind)
    if with_segments and segments is None:
        segments = [[0] * len(s) for s in ids]
    given = segments if with_segments else None
    states: list = []
    with torch.no_grad():
        batch = Ragged.of(ids, given)
        split = batch.split(ours.encoder(batch, states=states))
        for b, sequence in enumerate(ids):
            passed = given[b] if given is not None and kind not in NO_SEGMENTS else None
            want = theirs_of(theirs, sequence, passed, output_hidden_states=True)
            torch.testing.assert_close(split[b], want.last_hidden_state[0], **CLOSE)
            # every layer too; the last entry is compared above, since families differ on normalising it
            layers = [batch.split(x)[b] for x in states]
            assert len(layers) == len(want.hidden_states)
            for mine, reference in zip(layers[:-1], want.hidden_states[:-1]):
                torch.testing.assert_close(mine, reference[0], **CLOSE)


@pytest.mark.parametrize("kind", FAMILIES)
def test_neighbours_do_not_matter(tmp_path, kind):
    _, ours = both(tmp_path, kind)
    ids, segments = texts(kind)
    with torch.no_grad():
        together = Ragged.of(ids, segments)
        out = together.split(ours.encoder(together))
        for b, sequence in enumerate(ids):
            alone = ours.encoder(Ragged.of([sequence], [segments[b]] if segments else None))
            torch.testing.assert_close(out[b], alone, **CLOSE)


def run_head(ours, suffix, ids, segments, seed=0):
    """Our loss for one batch of equal lengths, the way `transformers`' class of that suffix computes it."""
    batch = Ragged.of(ids, segments)
    x_TH = ours.encoder(batch)
    n, count = len(ids[0]), len(ids)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=generator)  # noqa: E731
    labels = {}
    if suffix == "ForPreTraining" and ours.config.family == "electra":
        labels = {"labels": draw(2, count, n)}
        logits = ours.token_logits(x_TH, "rtd").view(count, n)
        loss = F.binary_cross_entropy_with_logits(logits, labels["labels"].float())
    elif suffix in ("ForMaskedLM", "ForPreTraining"):
        full = draw(60, count, n)
        full[draw(2, count, n) == 0] = -100
        full[0, 0] = 7
        index = (full.flatten() != -100).nonzero().flatten()
        loss = F.cross_entropy(ours.mlm_logits(x_TH, index), full.flatten()[index])
        labels, logits = {"labels": full}, ours.mlm_logits(x_TH).view(count, n, -1)
        if suffix == "ForPreTraining":
            pair = draw(2, count)
            loss = loss + label_loss(ours.sequence_logits(x_TH, batch, "nsp"), pair)
            key = "sentence_order_label" if ours.config.family == "albert" else "next_sentence_label"
            labels[key] = pair
    elif suffix == "ForNextSentencePrediction":
        labels = {"labels": draw(2, count)}
        logits = ours.sequence_logits(x_TH, batch, "nsp")
        loss = label_loss(logits, labels["labels"])
    elif suffix == "ForSequenceClassification":
        labels = {"labels": draw(2, count)}
        logits = ours.sequence_logits(x_TH, batch, "classify")
        loss = label_loss(logits, labels["labels"])
    elif suffix == "ForTokenClassification":
        labels = {"labels": draw(2, count, n)}
        logits = ours.token_logits(x_TH, "tag")
        loss = label_loss(logits, labels["labels"].flatten())
        logits = logits.view(count, n, -1)
    elif suffix == "ForQuestionAnswering":
        start, end = draw(n, count), draw(n + 3, count)  # an end beyond the text must not count
        labels = {"start_positions": start, "end_positions": end}
        logits = ours.token_logits(x_TH, "answer")
        loss = span_loss(logits, batch, start, end)
        logits = logits.view(count, n, 2)
    else:
        assert suffix == "ForMultipleChoice"
        labels = {"labels": draw(count, 1)}
        logits = ours.sequence_logits(x_TH, batch, "choose").view(1, count)
        loss = choice_loss(logits.flatten(), (count,), labels["labels"])
    return SimpleNamespace(loss=loss, logits=logits, labels=labels)


@pytest.mark.parametrize(("kind", "suffix"), [x for x in EVERY if x[1] != "Model" and x[0] != "camembert"])
def test_heads_losses_and_gradients(tmp_path, kind, suffix):
    theirs, ours = both(tmp_path, kind, suffix)
    ids, segments = texts(kind, (19, 19, 19))
    theirs.train()
    ours.train()
    mine = run_head(ours, suffix, ids, segments)
    shape = (lambda x: x[None]) if suffix == "ForMultipleChoice" else (lambda x: x)
    inputs = {"input_ids": shape(torch.tensor(ids))}
    if segments is not None:
        inputs["token_type_ids"] = shape(torch.tensor(segments))
    if kind == "longformer":  # its heads choose global tokens by themselves; that is the tasks' business
        inputs["global_attention_mask"] = torch.zeros_like(inputs["input_ids"])
    want = theirs(**inputs, **mine.labels)
    torch.testing.assert_close(mine.loss, want.loss, **CLOSE)
    if suffix == "ForQuestionAnswering":
        reference = torch.stack((want.start_logits, want.end_logits), dim=-1)
    elif suffix == "ForPreTraining" and kind != "electra":
        reference = want.prediction_logits
    else:
        reference = want.logits
    torch.testing.assert_close(mine.logits, reference, **CLOSE)

    mine.loss.backward()
    want.loss.backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in theirs.parameters():
            parameter.data = torch.full_like(parameter, nan) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")  # under the names of files, which are not always those of modules
    reference = load_file(tmp_path / "gradients" / "model.safetensors")
    gradients = to_transformers(ours, suffix)
    compared = 0
    for name, gradient in reference.items():
        if name in gradients and not gradient.isnan().any():
            torch.testing.assert_close(
                gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
            compared += 1
    assert compared >= 0.8 * len(reference) - 4


@pytest.mark.parametrize("window", [4, 10, [4, 8], [8, 4]])
@pytest.mark.parametrize("chosen", [[], [0], [0, 5, 6], [37]])
def test_longformer_windows_and_global_tokens(tmp_path, window, chosen):
    theirs, ours = both(tmp_path, "longformer", attention_window=window)
    ids, _ = texts("longformer", (38, 9, 23))
    at = [[i for i in chosen if i < len(s)] for s in ids]
    batch = Ragged.of(ids, None, at)
    out = ours.encoder(batch)
    out.square().sum().backward()
    total = 0.0
    for b, sequence in enumerate(ids):
        mask = torch.zeros(1, len(sequence), dtype=torch.long)
        mask[0, at[b]] = 1
        want = theirs_of(theirs, sequence, global_attention_mask=mask).last_hidden_state[0]
        torch.testing.assert_close(batch.split(out)[b].detach(), want.detach(), **CLOSE)
        total = total + want.square().sum()
    total.backward()
    mine = ours.encoder.layers[0].attention.qkv.weight.grad[:16]
    reference = theirs.encoder.layer[0].attention.self.query.weight.grad
    torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("groups", "inner", "layers"), [(1, 1, 3), (2, 1, 4), (3, 2, 6), (2, 3, 5)])
def test_albert_groups(tmp_path, groups, inner, layers):
    changes = {"num_hidden_groups": groups, "inner_group_num": inner, "num_hidden_layers": layers}
    theirs, ours = both(tmp_path, "albert", **changes)
    ids, segments = texts("albert")
    batch = Ragged.of(ids, segments)
    with torch.no_grad():
        for mine, sequence, segment in zip(batch.split(ours.encoder(batch)), ids, segments):
            torch.testing.assert_close(mine, theirs_of(theirs, sequence, segment).last_hidden_state[0], **CLOSE)


@pytest.mark.parametrize("local", [2, 6, 10])
def test_modernbert_local_layers(tmp_path, local):
    theirs, ours = both(tmp_path, "modernbert", local_attention=local)
    ids, _ = texts("modernbert")
    batch = Ragged.of(ids)
    with torch.no_grad():
        for mine, sequence in zip(batch.split(ours.encoder(batch)), ids):
            torch.testing.assert_close(mine, theirs_of(theirs, sequence).last_hidden_state[0], **CLOSE)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_biased_input": True, "type_vocab_size": 2},
        {"position_buckets": 4, "max_relative_positions": 20},
        {"position_buckets": 16},
    ],
)
def test_deberta_positions(tmp_path, changes):
    theirs, ours = both(tmp_path, "deberta-v2", **changes)
    ids, segments = texts("bert")
    batch = Ragged.of(ids, segments)
    with torch.no_grad():
        for mine, sequence, segment in zip(batch.split(ours.encoder(batch)), ids, segments):
            torch.testing.assert_close(mine, theirs_of(theirs, sequence, segment).last_hidden_state[0], **CLOSE)


def test_debertas_newer_mlm_head(tmp_path):
    theirs, ours = both(tmp_path, "deberta-v2", "ForMaskedLM", legacy=False)
    ids, _ = texts("deberta-v2", (12,))
    batch = Ragged.of(ids)
    with torch.no_grad():
        want = theirs_of(theirs, ids[0]).logits[0]
        torch.testing.assert_close(ours.mlm_logits(ours.encoder(batch)), want, **CLOSE)
    loaded = load_network(tmp_path / "folder")
    (tmp_path / "again").mkdir()
    save_network(loaded.network, tmp_path / "again", raw_config=loaded.raw_config)
    again = type(theirs).from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs_of(again, ids[0]).logits[0], want, **CLOSE)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "quick_gelu", "relu", "silu"])
def test_activations(tmp_path, activation):
    theirs, ours = both(tmp_path, "bert", hidden_act=activation)
    ids, _ = texts("bert", (12,))
    with torch.no_grad():
        want = theirs_of(theirs, ids[0]).last_hidden_state[0]
        torch.testing.assert_close(ours.encoder(Ragged.of(ids)), want, **CLOSE)


def test_watched_weights_equal_eager_attentions(tmp_path):
    from transformers import BertModel

    make("bert").save_pretrained(tmp_path / "folder")
    theirs = BertModel.from_pretrained(tmp_path / "folder", attn_implementation="eager").eval()
    ours = load_network(tmp_path / "folder").network
    ids, _ = texts("bert", (14,))
    seen = {}
    with torch.no_grad():
        out = ours.encoder(Ragged.of(ids), watch=lambda name, x: seen.__setitem__(name, x))
        want = theirs_of(theirs, ids[0], output_attentions=True)
        torch.testing.assert_close(out, ours.encoder(Ragged.of(ids)), **CLOSE)
    for i, weights in enumerate(want.attentions):
        torch.testing.assert_close(seen[f"layers.{i}.attention.weights"], weights[0], **CLOSE)


def test_every_class_of_every_family_is_covered():
    assert len(EVERY) == sum(len(c) for c in CLASSES.values()) >= 50
