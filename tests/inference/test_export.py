"""Exports say what the model says: ONNX graphs beside torch and transformers, folders of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from refusals import refuses
from tiny_model import save
from tiny_models import EVERY, saved

import everybert
from everybert.inference import export as module
from everybert.inference.export import Graph, export_hf, export_onnx, quantise
from everybert.model.ragged import Ragged
from everybert.store.sentence_transformers import Pooling, write_pooling

TASKS = {
    "Model": "hidden",
    "ForMaskedLM": "fill",
    "ForPreTraining": "next",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "ForNextSentencePrediction": "next",
}
LENGTHS = (9, 1, 20, 4)


def rectangle(suffix: str, inputs: tuple[str, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded inputs of unequal lengths."""
    torch.manual_seed(seed)
    ids = torch.randint(5, 60, (len(LENGTHS), max(LENGTHS)))
    mask = torch.tensor([[int(i < n) for i in range(max(LENGTHS))] for n in LENGTHS])
    given = {"input_ids": torch.where(mask > 0, ids, 1), "attention_mask": mask}
    if "token_type_ids" in inputs:
        given["token_type_ids"] = (torch.arange(max(LENGTHS)) > 3).long()[None] * mask
    if "global_attention_mask" in inputs:
        given["global_attention_mask"] = (torch.arange(max(LENGTHS)) % 7 == 0).long()[None] * mask
    if suffix == "ForMultipleChoice":
        given = {name: x.unflatten(0, (2, 2)) for name, x in given.items()}
    return given


FAST = [("longformer", "ForQuestionAnswering"), ("modernbert", "ForSequenceClassification")]
NO_TASK = ("electra", "ForPreTraining")
"""A discriminator's head is no task: its graph has the hidden states."""
GRAPHS = [one for one in EVERY if one[1] != "ForMultipleChoice" and one != NO_TASK]
GRAPHS = [pytest.param(*one, marks=[] if one in FAST else [pytest.mark.slow]) for one in GRAPHS]


@pytest.mark.parametrize(("kind", "suffix"), GRAPHS)
def test_every_family_and_head_agrees_with_transformers(tmp_path, kind, suffix):
    """A random model of transformers is exported; the graph and the model agree on every real token."""
    import transformers

    folder = saved(tmp_path / "theirs", kind, suffix)
    config = json.loads((folder / "config.json").read_text())
    done = export_onnx(folder, tmp_path / "onnx")
    assert done["task"] == TASKS[suffix] or (suffix == "ForPreTraining" and done["task"] == "fill")
    assert done["difference"] < 1e-4
    given = rectangle(suffix, done["inputs"])
    reference = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = reference(**given)
    session = InferenceSession(tmp_path / "onnx" / "onnx/model.onnx")
    found = session.run(None, {name: x.numpy() for name, x in given.items()})
    there = given["attention_mask"].bool().numpy()
    for name, mine in zip(done["outputs"], found):
        key = {"fill": "prediction_logits"}.get(done["task"], name) if suffix == "ForPreTraining" else name
        theirs = wanted[key].numpy()
        assert mine.shape == theirs.shape
        if mine.shape[: there.ndim] == there.shape:
            mine, theirs = mine[there], theirs[there]
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.slow
def test_a_discriminator_is_exported_as_an_encoder(tmp_path):
    done = export_onnx(saved(tmp_path / "theirs", *NO_TASK), tmp_path / "onnx")
    assert done["task"] == "hidden" and done["difference"] < 1e-4


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A folder with sentence-transformers files: two poolings, a dense layer, unit vectors."""
    folder = save(tmp_path_factory.mktemp("embedder") / "model")
    write_pooling(folder, Pooling(("max", "mean", "weightedmean", "lasttoken"), normalize=True), 32)
    return folder


@pytest.fixture(scope="module")
def exported(embedder):
    """Its export, and what was said of it."""
    return export_onnx(embedder, embedder.with_name("onnx"))


def test_sentence_vectors_and_the_folder(embedder, exported):
    folder = Path(exported["folder"])
    assert exported["task"] == "embed" and exported["outputs"] == ["last_hidden_state", "sentence_embedding"]
    files = {file.name for file in folder.iterdir()}
    assert {"onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "everybert.json"} <= files
    assert "model.safetensors" not in files
    backends = pytest.importorskip("sentence_transformers.backend.utils")
    export, how = backends.backend_should_export(folder, True, {}, "model.onnx", "**/*.onnx", "ONNX")
    assert not export and how["subfolder"] == "onnx"  # sentence-transformers finds the graph
    assert b".py" not in (folder / "onnx/model.onnx").read_bytes()  # no traces of the code, nor paths of this machine
    about = json.loads((folder / "everybert.json").read_text())["onnx"]
    assert about["inputs"] == ["input_ids", "attention_mask", "token_type_ids"]
    model = everybert.load(embedder)
    texts = ["the cat sees a dog", "john lives in london and mary works in paris ."]
    ids = model.tokenizer.ids_batch(texts)
    given = {name: np.zeros((2, max(map(len, ids))), np.int64) for name in about["inputs"]}
    for i, row in enumerate(ids):
        given["input_ids"][i, : len(row)], given["attention_mask"][i, : len(row)] = row, 1
    _, found = InferenceSession(folder / "onnx/model.onnx").run(None, given)
    np.testing.assert_allclose(found, model.embed(texts), atol=1e-5)
    refuses(".", everybert.load, folder)


def test_a_graph_that_differs_is_refused_and_nothing_is_written(tmp_path, embedder, monkeypatch):
    trace, other = module._trace, everybert.load(embedder)
    other.network.encoder.embeddings.token.weight.data.normal_()
    monkeypatch.setattr(module, "_trace", lambda graph, path: trace(Graph(other, graph.task).eval(), path))
    refuses("differs from torch by", export_onnx, embedder, tmp_path / "onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_said(tmp_path, embedder, monkeypatch):
    why = "has no mlm head, which fill needs; it can be exported for: hidden, embed"
    refuses(why, export_onnx, embedder, tmp_path / "a", task="fill")
    refuses("there is no task 'sing'", export_onnx, embedder, tmp_path / "a", task="sing")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "onnxscript" else object())
    refuses(r"needs onnxscript: pip install 'everybert\[onnx\]'", export_onnx, embedder, tmp_path / "a")
    assert not list(tmp_path.iterdir())


# ── folders of transformers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "suffix"), EVERY[::4] + [("longformer", "ForMultipleChoice")])
def test_transformers_reads_what_is_exported(tmp_path, kind, suffix):
    import transformers

    folder = saved(tmp_path / "theirs", kind, suffix)
    done = export_hf(folder, tmp_path / "ours")
    assert done["dtype"] == "float32"
    maker = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    given = rectangle(suffix, Graph(everybert.load(folder), "hidden").inputs())
    with torch.no_grad():
        one, two = (maker.from_pretrained(at).eval()(**given) for at in (folder, tmp_path / "ours"))
    for key in one:
        if isinstance(one[key], torch.Tensor):
            torch.testing.assert_close(one[key], two[key], atol=1e-5, rtol=0.0)


def test_an_adapter_is_merged(tmp_path):
    from everybert.files import atomic_folder
    from everybert.model.heads import Network
    from everybert.model.lora import AdapterSet, LoraConfig
    from everybert.store.adapters import save_adapter

    base = save(tmp_path / "base")
    network = everybert.load(base).network
    adapters = AdapterSet(network)
    head = Network(network.config, {"classify": 3}, pooler=True)
    adapters.add("mood", LoraConfig(), {"classify": head.heads["classify"]}, head.pooler)
    with torch.no_grad():
        for value in adapters.state("mood").values():
            value.normal_(std=0.3)
    with atomic_folder(tmp_path / "lora") as folder:
        save_adapter(adapters, "mood", folder, base=str(base))
    export_hf(tmp_path / "lora", tmp_path / "whole", dtype="float32")
    plain, merged = everybert.load(tmp_path / "lora"), everybert.load(tmp_path / "whole")
    assert merged.adapters is None
    export_hf(base, tmp_path / "same", adapter=str(tmp_path / "lora"))
    named = everybert.load(tmp_path / "same").network.state_dict()
    assert all(torch.equal(named[key], value) for key, value in merged.network.state_dict().items())
    batch = Ragged.of([[2, 9, 12, 3], [2, 3]])
    with torch.inference_mode():
        one, two = (Graph(m, "classify").outputs(batch)["logits"] for m in (plain, merged))
        encoder = everybert.load(base).network.encoder(batch)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0.0)
    assert (encoder - merged.network.encoder(batch)).abs().max() > 0.1


def test_int8_weights_are_widened(tmp_path, embedder):
    import transformers

    quantise(embedder, tmp_path / "int8", ["the cat sees a dog"])
    assert not (tmp_path / "int8" / "model.safetensors").exists()
    export_hf(tmp_path / "int8", tmp_path / "wide")
    one, two = (everybert.load(tmp_path / name).network.state_dict() for name in ("int8", "wide"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "wide").eval()
    ids = [2, 9, 12, 30, 3]
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(everybert.load(tmp_path / "int8").hidden([ids])[0], wanted, atol=1e-5, rtol=0.0)


def test_dtypes(tmp_path, embedder):
    done = export_hf(embedder, tmp_path / "half", dtype="bfloat16")
    assert done["dtype"] == "bfloat16" and everybert.load(tmp_path / "half").pooling.normalize
    again = export_hf(tmp_path / "half", tmp_path / "kept")
    assert again["dtype"] == "bfloat16"
    refuses("no dtype 'int4'", export_hf, embedder, tmp_path / "no", dtype="int4")
    assert not (tmp_path / "no").exists()
