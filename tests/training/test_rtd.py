"""Replaced-token detection: two networks, one loss, the same guarantees as every run."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from grammar import write_tokenizer
from safetensors.torch import load_file
from tiny_models import make
from torch.nn import functional as F
from torch.nn.utils import parametrize
from toy import tiny_recipe

from everybert.corpus.packs import DRAWS
from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import IGNORE, PretrainTargets
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network, save_network, to_transformers
from everybert.training import checkpoint, rtd
from everybert.training.plan import Machine, plan, training_flops
from everybert.training.pretrain import pretrain
from everybert.training.recipe import RtdSettings

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TOY = {
    "examples__kind": "full",
    "model__family": "electra",
    "model__embedding_size": 16,
    "rtd__width": 0.5,
    "mask__random_share": 0.0,
    "schedule__peak": 2e-3,
}
KINDS = ("tied", "disentangled")


def run(corpus, out, **changes):
    """A toy run; None leaves a line of TOY out."""
    recipe = {key: value for key, value in (TOY | changes).items() if value is not None}
    return pretrain(tiny_recipe(**recipe), corpus, out, device="cpu", quiet=True)


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────────────────

LENGTHS = (9, 14, 5)


def masked_batch(fill=0):
    """(batch, original ids per sequence); with `fill`, so many tokens of filling and as many unused slots."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 60, (n,), generator=generator) for n in LENGTHS]
    flat, index_M = torch.cat(ids), torch.tensor([2, 3, 10, 15, 20, 25])
    tokens_T = flat.scatter(0, index_M[:5], 4)  # one masked position keeps its token
    draw_M = torch.randint(0, DRAWS, (6,), generator=generator)
    slots = (0, fill)
    targets = PretrainTargets(
        F.pad(index_M, slots), F.pad(flat[index_M], slots, value=IGNORE), None, draw_M=F.pad(draw_M, slots)
    )
    targets = replace(targets, real=torch.tensor(len(flat)))
    targets = targets.of_step(torch.tensor([6.0, 1.0, float(len(flat))]))
    batch = Ragged.flat(F.pad(tokens_T, (0, fill)), [*LENGTHS, *([fill] if fill else [])])
    return replace(batch, targets=targets), ids


def padded(rows, value=0):
    return torch.nn.utils.rnn.pad_sequence(list(rows), True, value)


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """(sharing, transformers' generator and discriminator, ours with its generator) with the same weights."""
    sharing = request.param
    theirs_g = make("electra", "ForMaskedLM", 1, **OFF, num_attention_heads=1, intermediate_size=12, hidden_size=8)
    theirs_d = make("electra", "ForPreTraining", 2, **OFF)
    if sharing == "tied":
        theirs_d.electra.embeddings = theirs_g.electra.embeddings
    theirs_g.save_pretrained(tmp_path / "g"), theirs_d.save_pretrained(tmp_path / "d")
    given, network = load_network(tmp_path / "g").network, load_network(tmp_path / "d").network
    tables = {name: x.clone() for name, x in network.encoder.embeddings.state_dict().items()}
    rtd.add_generator(network, RtdSettings(sharing=sharing, width=0.5))
    assert rtd.generator_of(network).config == given.config
    rtd.generator_of(network).load_state_dict(given.state_dict())
    for name, part in network.encoder.embeddings.named_children():
        if parametrize.is_parametrized(part):
            added = part.parametrizations.weight
            added.original.data = tables[f"{name}.weight"] - added[0].table.weight.data
    return sharing, theirs_g, theirs_d, network


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_losses_and_gradients_are_those_of_transformers(pair, temperature):
    sharing, theirs_g, theirs_d, network = pair
    batch, ids = masked_batch()
    index_M, label_M, draw_M = batch.targets.mask_index_M, batch.targets.mask_label_M, batch.targets.draw_M
    attention = padded(torch.ones(n, dtype=torch.long) for n in LENGTHS)
    labels = torch.full_like(batch.tokens_T, IGNORE).scatter(0, index_M, label_M)
    masked = {"input_ids": padded(batch.tokens_T.split(LENGTHS)), "attention_mask": attention}
    want_g = theirs_g(**masked, labels=padded(labels.split(LENGTHS), IGNORE))
    logits = torch.cat([row[:n] for row, n in zip(want_g.logits, LENGTHS)])[index_M]
    rows = (logits / temperature).softmax(-1).detach().double().numpy().cumsum(-1)
    draw_M[1] = int(rows[1, label_M[1] - 1 : label_M[1] + 1].mean() * DRAWS)  # the second sample is right
    drawn = [np.searchsorted(row, draw * row[-1], side="right") for row, draw in zip(rows, (draw_M / DRAWS).tolist())]
    assert [int(token) == label for token, label in zip(drawn, label_M.tolist())] == [i == 1 for i in range(6)]

    settings = RtdSettings(sharing=sharing, temperature=temperature)
    loss, (mlm, detection) = rtd.rtd_loss(settings, network, batch)
    loss.backward()
    completed = torch.cat(ids).scatter(0, index_M, torch.tensor(np.array(drawn)))
    replaced = (completed != torch.cat(ids)).long()
    assert replaced.sum() == 5
    want_d = theirs_d(padded(completed.split(LENGTHS)), attention, labels=padded(replaced.split(LENGTHS)))
    torch.testing.assert_close(mlm, want_g.loss, **CLOSE)
    torch.testing.assert_close(detection, 50 * want_d.loss, **CLOSE)
    torch.testing.assert_close(loss, want_g.loss + 50 * want_d.loss, **CLOSE)

    (want_g.loss + 50 * want_d.loss).backward()
    generator = rtd.generator_of(network)
    of_generator = {name: p.grad for name, p in generator.named_parameters()}
    of_model = {
        name.replace("parametrizations.weight.original", "weight"): p.grad for name, p in network.named_parameters()
    }
    rtd.remove_generator(network)
    for ours, gradients, theirs, suffix in (
        (network, of_model, theirs_d, "ForPreTraining"),
        (generator, of_generator, theirs_g, "ForMaskedLM"),
    ):
        for name, parameter in ours.named_parameters():
            parameter.data = gradients[name]
        found = to_transformers(ours, suffix)
        for name, parameter in theirs.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], wanted, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_filling_counts_for_nothing(pair):
    network = pair[3]
    with torch.no_grad():
        filled, plain = (rtd.rtd_loss(RtdSettings(), network, masked_batch(fill=n)[0]) for n in (16, 0))
    torch.testing.assert_close(filled, plain, **CLOSE)


@torch.no_grad()
def test_figures_are_their_definitions(pair):
    network, (batch, _) = pair[3], masked_batch()
    network.head("rtd").output.bias.fill_(-0.05)  # so that some tokens are judged to be wrong, some right
    packs = []
    for seed in (0, 1):
        draw_M = torch.randint(0, DRAWS, (6,), generator=torch.Generator().manual_seed(seed))
        packs.append(replace(batch, targets=replace(batch.targets, draw_M=draw_M)))
    found = rtd.score_detection(network, packs)
    judged, replaced = [], []
    for pack in packs:
        _, logits_T, replaced_T = rtd.detect(network, pack)
        judged += (logits_T.sigmoid() > 0.5).tolist()
        replaced += replaced_T.tolist()
    both = sum(a and b for a, b in zip(judged, replaced))
    assert 0 < both < sum(judged) and both < sum(replaced)
    assert found["detection_accuracy"] == sum(a == b for a, b in zip(judged, replaced)) / (2 * sum(LENGTHS))
    assert found["detection_precision"] == both / sum(judged) and found["detection_recall"] == both / sum(replaced)


def test_samples_follow_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(7)
    logits[[2, 6]] = -torch.inf
    draws = torch.arange(0, DRAWS, 1 << 12)
    for temperature in (1.0, 2.0):
        tokens = rtd.sample(logits.expand(len(draws), -1), draws, temperature)
        shares = torch.bincount(tokens, minlength=7) / len(draws)
        assert torch.allclose(shares, (logits / temperature).softmax(-1), atol=1e-3)
    last = rtd.sample(torch.zeros(1, 30_522), torch.tensor([DRAWS - 1]))
    assert last == 30_521
    assert rtd.sample(logits[None], torch.tensor([0])) == 0 and rtd.sample(logits[None], torch.tensor([DRAWS - 1])) == 5


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=KINDS)
def done(request, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    return run(corpus, out, rtd__sharing=request.param, steps=60, run__evaluate_every=30), out, request.param


def test_both_networks_learn_and_are_scored(done):
    result, out, _ = done
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line]
    assert all(line["loss"] == pytest.approx(line["mlm"] + line["rtd"], rel=1e-5) for line in steps)
    assert steps[-1]["mlm"] < 0.9 * steps[0]["mlm"] and steps[-1]["rtd"] < 0.7 * steps[0]["rtd"]
    first, last = (line for line in lines if "heldout_loss" in line)
    assert last["heldout_loss"] < first["heldout_loss"] < 5
    assert 0.8 < last["detection_accuracy"] < 1 and 1 < last["pseudo_perplexity"] < 1000
    assert result.figures == {key: last[key] for key in last if key != "step"}


@torch.no_grad()
def test_both_folders_load_in_transformers(done):
    from transformers import AutoTokenizer, ElectraForMaskedLM, ElectraForPreTraining

    result, out, sharing = done
    ids = AutoTokenizer.from_pretrained(result.model)("this farmer paints a boat .")["input_ids"]
    model, generator = load_network(result.model).network, load_network(out / "generator").network
    batch, given = Ragged.of([ids]), torch.tensor([ids])
    theirs = ElectraForPreTraining.from_pretrained(result.model).eval()
    torch.testing.assert_close(theirs(given).logits[0], model.token_logits(model.encoder(batch), "rtd")[:, 0], **CLOSE)
    theirs = ElectraForMaskedLM.from_pretrained(out / "generator").eval()
    torch.testing.assert_close(theirs(given).logits[0], generator.mlm_logits(generator.encoder(batch)), **CLOSE)
    assert (model.config.hidden_size, generator.config.hidden_size) == (32, 16)
    tables = [n.encoder.embeddings.token.weight for n in (model, generator)]
    assert torch.equal(*tables) == (sharing == "tied")
    assert not torch.allclose(*(n.encoder.layers[0].attention.output.weight[:16, :16] for n in (model, generator)))


def weights(out):
    (path,) = [path for step, path in checkpoint.checkpoints(out / "checkpoints").items() if step == 14]
    folders = path / "network.safetensors", path / "optimizer.safetensors", out / "model" / "model.safetensors"
    return [load_file(path) for path in (*folders, out / "generator" / "model.safetensors")]


def assert_same(one, two):
    for a, b in zip(weights(one), weights(two), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("sharing", KINDS)
def test_resumed_and_with_workers_a_run_ends_bit_for_bit(corpus, tmp_path, sharing):
    settings = {"steps": 14, "rtd__sharing": sharing}
    run(corpus, tmp_path / "a", **settings)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for made in ("checkpoints/step-00000014", "model", "generator"):
        shutil.rmtree(tmp_path / "b" / made)
    assert run(corpus, tmp_path / "b", **settings).step == 14
    assert_same(tmp_path / "a", tmp_path / "b")
    torch.manual_seed(99)  # the state of torch's generator has no part in it
    run(corpus, tmp_path / "c", run__workers=1, **settings)
    assert_same(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(
    "changes",
    [
        {"model__family": "deberta-v2", "model__segments": 0, "model__positions": "none", "rtd__layers": 0.5}
        | {"model__relative": "disentangled", "rtd__sharing": "disentangled", "rtd__width": 1.0},
        {"model__family": "bert", "rtd__width": 1.0, "rtd__layers": 0.5},
        {"run__dtype": "bfloat16", "rtd__sharing": "disentangled", "model__embedding_size": 16},
        {"rtd__width": 0.5, "optimizer__kind": "muon", "run__checkpointing": True},
    ],
    ids=["deberta", "bert", "bfloat16", "wide embeddings, muon"],
)
def test_other_shapes(corpus, tmp_path, changes):
    result = run(corpus, tmp_path / "run", steps=3, **{"model__embedding_size": None} | changes)
    model, generator = load_network(result.model), load_network(tmp_path / "run" / "generator")
    assert not model.report.missing and not generator.report.missing and "rtd" in model.network.heads
    assert generator.config.layers == (1 if "rtd__layers" in changes else 2)
    assert 0 < result.figures["detection_accuracy"] < 1


# ── from folders ─────────────────────────────────────────────────────────────────────────────────────────────

FROM_FOLDER = {key: None for key in TOY if key.startswith("model__")}


def test_a_model_continues_with_a_new_generator(done, corpus, tmp_path):
    result, _, sharing = done
    settings = {"model__init": str(result.model), "rtd__sharing": sharing, "rtd__layers": 0.5, **FROM_FOLDER}
    again = run(corpus, tmp_path / "run", steps=2, **settings)
    before, after = (load_network(folder).network for folder in (result.model, again.model))
    generator = load_network(tmp_path / "run" / "generator").network
    assert generator.config.layers == 1 and generator.config.hidden_size == 16
    for network in (after.encoder, generator.encoder):
        change = before.encoder.embeddings.token.weight - network.embeddings.token.weight
        assert 0 < change.abs().max() < 0.02
    one, two = (n.encoder.layers[1].feed_forward.input.weight for n in (before, after))
    assert 0 < (one - two).abs().max() < 0.02


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders that replaced-token detection cannot start from."""
    at = tmp_path_factory.mktemp("folders")
    size = {"vocab_size": 128, "max_positions": 64, "layers": 1, "hidden_size": 32, "heads": 2, "intermediate_size": 64}
    for name, settings in (("bert", {"family": "bert"}), ("causal", {"family": "electra", "causal": True})):
        with atomic_folder(at / name) as draft:
            tokenizer = write_tokenizer(at / "tokenizer")
            save_network(Network(EncoderConfig(**size, **settings), {"mlm": None}), draft, tokenizer=tokenizer)
    return at


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"examples__kind": "pairs"}, r"examples.kind=pairs: \[rtd\] learns no sentence pairs: set \"full\""),
        ({"examples__kind": "order"}, r"\[rtd\] learns no sentence pairs"),
        (
            {"phase": [{"share": 0.5}, {"share": 0.5, "kind": "pairs"}]},
            r"^tiny.toml: \[phase 2\] kind: \[rtd\] learns no sentence pairs",
        ),
        ({"mask__strategy": "span", "mask__boundary": True}, "neither a boundary objective nor a teacher"),
        ({"distil": {"ce": 1.0}}, "neither a boundary objective nor a teacher"),
        ({"rtd__width": 1.5}, "rtd.width=1.5: is a share of the model's, above 0 and at most 1"),
        ({"rtd__layers": 0.0}, "above 0 and at most 1, not 0.0"),
        ({"rtd__temperature": 0.0}, "rtd.temperature=0.0: must be above 0"),
        ({"rtd__sharing": "half"}, "must be one of tied, disentangled"),
        ({"model__causal": True}, r"\[rtd\] needs masked tokens"),
        (
            {"model__family": "bert", "model__embedding_size": None},
            r"\[rtd\] width = 0.5: the bert layout has no",
        ),
        (
            {"model__hidden_size": 64, "model__heads": 4, "rtd__width": 0.52},
            "not a multiple of heads 2, or width",
        ),
        ({"model__family": "bert"}, "^the bert layout has no place for embedding_size = 16"),
        ({"model__init": "bert"}, "the bert layout has no place for .* or width = 1.0$"),
        ({"model__init": "causal"}, "which a causal model has not"),
        ({"model__init": "nosuch"}, "nosuch"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(corpus, folders, tmp_path, changes, why):
    if "model__init" in changes:
        changes = FROM_FOLDER | {"model__init": str(folders / changes["model__init"])}
    with pytest.raises(EverybertError, match=why) as caught:
        run(corpus, tmp_path / "run", **changes)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_counts_the_generator():
    shape = {"model__hidden_size": 256, "model__heads": 4, "model__intermediate_size": 1024, "model__layers": 12}
    changes = TOY | shape | {"model__embedding_size": 128}
    recipe = tiny_recipe(**changes | {"rtd__width": 0.25})
    alone = tiny_recipe(**{key: value for key, value in changes.items() if not key.startswith("rtd")})
    both, one = (plan(each, Machine()) for each in (recipe, alone))
    network = Network(recipe.config, recipe.heads)
    rtd.add_generator(network, recipe.rtd)
    generator = rtd.generator_of(network)
    assert generator.config == recipe.config.replace(hidden_size=64, heads=1, intermediate_size=256)
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 4 * 64
    own = 12 * layer + (128 * 64 + 64) + (64 * 128 + 128) + 2 * 128 + 30_528  # projection, MLM head, its bias
    detector = 256 * 256 + 256 + 256 + 1 - (256 * 128 + 128 + 2 * 128 + 30_528)  # in place of an MLM head
    assert both["parameters"] == one["parameters"] + own + detector
    assert both["memory_gb"]["logits"] == 2 * one["memory_gb"]["logits"]
    assert both["memory_gb"]["activations"] > 1.2 * one["memory_gb"]["activations"]
    assert training_flops(network, 128, 0.15) > training_flops(generator, 128, 0.15)
