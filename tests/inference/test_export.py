"""Exports say what the model says: ONNX graphs beside torch and transformers, folders of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import save
from tiny_models import EVERY, saved

import everybert
from everybert.errors import EverybertError
from everybert.inference import export as module
from everybert.inference.export import Exported, Graph, Session, export_hf, export_onnx, quantise
from everybert.model.ragged import Ragged
from everybert.store.sentence_transformers import Dense, Pooling, write_pooling

TASKS = {
    "Model": "hidden",
    "ForMaskedLM": "fill",
    "ForPreTraining": "next",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "ForMultipleChoice": "choose",
    "ForNextSentencePrediction": "next",
}
LENGTHS = (9, 1, 20, 4)


def rectangle(kind: str, suffix: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded inputs of unequal lengths."""
    torch.manual_seed(seed)
    ids = torch.randint(5, 60, (len(LENGTHS), max(LENGTHS)))
    mask = torch.tensor([[int(i < n) for i in range(max(LENGTHS))] for n in LENGTHS])
    given = {"input_ids": torch.where(mask > 0, ids, 3 if kind == "modernbert" else 1), "attention_mask": mask}
    if kind in ("bert", "albert", "megatron-bert", "longformer", "roberta-prelayernorm"):
        given["token_type_ids"] = (torch.arange(max(LENGTHS)) > 3).long()[None] * mask
    if kind == "longformer":
        given["global_attention_mask"] = (torch.arange(max(LENGTHS)) % 7 == 0).long()[None] * mask
    if suffix == "ForMultipleChoice":
        given = {name: x.unflatten(0, (2, 2)) for name, x in given.items()}
    return given


def against_transformers(tmp_path: Path, kind: str, suffix: str) -> Exported:
    """Export a random model of transformers; its graph and the model itself must agree on every real token."""
    import transformers
    from onnxruntime import InferenceSession

    folder = saved(tmp_path / "theirs", kind, suffix)
    config = json.loads((folder / "config.json").read_text())
    done = export_onnx(folder, tmp_path / "onnx")
    assert done.task == TASKS[suffix] or (suffix == "ForPreTraining" and done.task == "fill")
    assert done.difference < 1e-4
    given = rectangle(kind, suffix)
    reference = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = reference(**given)
    session = InferenceSession(tmp_path / "onnx" / "model.onnx")
    found = session.run(None, {name: x.numpy() for name, x in given.items()})
    there = given["attention_mask"].bool().numpy()
    for name, mine in zip(done.outputs, found):
        key = {"fill": "prediction_logits"}.get(done.task, name) if suffix == "ForPreTraining" else name
        theirs = wanted[key].numpy()
        assert mine.shape == theirs.shape
        if mine.shape[: there.ndim] == there.shape and done.task != "choose":
            mine, theirs = mine[there], theirs[there]
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    return done


@pytest.mark.parametrize(
    ("kind", "suffix"), [("longformer", "ForQuestionAnswering"), ("modernbert", "ForSequenceClassification")]
)
def test_graphs_agree_with_transformers(tmp_path, kind, suffix):
    against_transformers(tmp_path, kind, suffix)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "suffix"), EVERY)
def test_every_family_and_head_agrees_with_transformers(tmp_path, kind, suffix):
    against_transformers(tmp_path, kind, suffix)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A folder with sentence-transformers files: two poolings, a dense layer, unit vectors."""
    folder = save(tmp_path_factory.mktemp("embedder") / "model")
    torch.manual_seed(0)
    dense = Dense(torch.randn(8, 64) * 0.2, torch.randn(8))
    write_pooling(folder, Pooling(("max", "mean"), normalize=True, dense=(dense,), published=True), 32)
    return folder


@pytest.fixture(scope="module")
def exported(embedder):
    """Its export, and what was said of it."""
    return export_onnx(embedder, embedder.with_name("onnx"), opset=20)


def test_sentence_vectors_and_the_folder(embedder, exported):
    folder = Path(exported.folder)
    assert exported.task == "embed" and exported.outputs == ("last_hidden_state", "sentence_embedding")
    files = {file.name for file in folder.iterdir()}
    assert {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "everybert.json"} <= files
    assert "model.safetensors" not in files
    assert b".py" not in (folder / "model.onnx").read_bytes()  # no traces of the code, nor paths of this machine
    about = json.loads((folder / "everybert.json").read_text())["onnx"]
    assert about["inputs"] == ["input_ids", "attention_mask", "token_type_ids"] and about["opset"] == 20
    model = everybert.load(embedder)
    texts = ["the cat sees a dog", "john lives in london and mary works in paris ."]
    found = Session(folder / "model.onnx", "embed")(Ragged.of(model.tokenizer.ids_batch(texts)))
    np.testing.assert_allclose(found["sentence_embedding"].numpy(), model.embed(texts), atol=1e-5)
    with pytest.raises(EverybertError):
        everybert.load(folder)


def test_int8_is_measured_and_close(tmp_path, embedder, exported):
    import onnx

    module.quantise_graph(Path(exported.folder) / "model.onnx", tmp_path / "int8.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert kinds.count("MatMulInteger") == 9  # four a layer, and the dense layer
    model = everybert.load(embedder)
    session = Session(tmp_path / "int8.onnx", "embed")
    texts = ["the cat sees a dog", "john lives in london", "she likes the red song"] * 5
    for given in (texts, ()):
        like = module.compare_int8(model, Graph(model, "embed"), session, given)
        assert like.texts == 15 + (not given) and 0.98 < like.least <= like.mean < 1.0


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_int8_of_matrices_with_several_uses(tmp_path, kind):
    """Embeddings that are the decoder too, layers that are one layer: each is turned and rounded once."""
    import onnx

    folder = saved(tmp_path / "theirs", kind, "ForMaskedLM")
    done = export_onnx(folder, tmp_path / "int8", int8=True)
    assert done.task == "fill" and done.int8.least > 0.97
    graph = onnx.load(tmp_path / "int8" / "model.onnx").graph
    weights = [node.input[1] for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(weights) > len(set(weights)) if kind == "albert" else len(weights) == len(set(weights))
    held = {matrix.name for matrix in graph.initializer}
    assert set(weights) <= held and not [name for name in held if name.endswith(".turned")], "no copy is left"


def test_a_graph_that_differs_is_refused_and_nothing_is_written(tmp_path, embedder, monkeypatch):
    monkeypatch.setattr(module, "_trace", _wrong)
    with pytest.raises(EverybertError, match="differs from torch by"):
        export_onnx(embedder, tmp_path / "onnx")
    assert list(tmp_path.iterdir()) == []


def _wrong(graph, opset, path):
    """A graph whose outputs are all zeros, of the right shapes."""
    from onnx import TensorProto, helper, save

    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "n"])
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["b", "n"])
    hidden = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["b", "n", 32])
    vector = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["b", 8])
    ones = {"data": helper.make_tensor("ones", TensorProto.FLOAT, [1, 1, 32], [0.0] * 32)}
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["f", "last"], ["f1"]),
        helper.make_node("Mul", ["f1", "ones"], ["last_hidden_state"]),
        helper.make_node("ReduceMean", ["last_hidden_state", "middle"], ["m"], keepdims=0),
        helper.make_node("Slice", ["m", "zero", "eight", "middle"], ["sentence_embedding"]),
    ]
    constants = [
        ones["data"],
        helper.make_tensor("last", TensorProto.INT64, [1], [2]),
        helper.make_tensor("middle", TensorProto.INT64, [1], [1]),
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        helper.make_tensor("eight", TensorProto.INT64, [1], [8]),
    ]
    graph = helper.make_graph(nodes, "wrong", [ids, mask], [hidden, vector], constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def test_what_cannot_be_exported_is_said(tmp_path, embedder, monkeypatch):
    with pytest.raises(
        EverybertError, match="has no mlm head, which fill needs; it can be exported for: hidden, embed"
    ):
        export_onnx(embedder, tmp_path / "a", task="fill")
    with pytest.raises(EverybertError, match="there is no task 'sing'"):
        export_onnx(embedder, tmp_path / "a", task="sing")
    with pytest.raises(EverybertError, match="opsets 18 to 22"):
        export_onnx(embedder, tmp_path / "a", opset=11)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for write in (export_onnx, export_hf):
        with pytest.raises(EverybertError, match="exists already"):
            write(embedder, tmp_path / "full")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(EverybertError, match=r"needs onnxscript: pip install 'everybert\[onnx\]'"):
        export_onnx(embedder, tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


# ── folders of transformers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "suffix"), EVERY[::4] + [("longformer", "ForMultipleChoice")])
def test_transformers_reads_what_is_exported(tmp_path, kind, suffix):
    import transformers

    folder = saved(tmp_path / "theirs", kind, suffix)
    done = export_hf(folder, tmp_path / "ours")
    assert done.dtype == "float32"
    maker = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    given = rectangle(kind, suffix)
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
        for value in adapters.parameters("mood"):
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
        trunk = everybert.load(base).network.encoder(batch)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0.0)
    assert (trunk - merged.network.encoder(batch)).abs().max() > 0.1


def test_int8_weights_are_widened(tmp_path, embedder):
    import transformers

    quantise(embedder, tmp_path / "int8", ["the cat sees a dog"], step=lambda text: None)
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
    assert done.dtype == "bfloat16" and everybert.load(tmp_path / "half").pooling.normalize
    again = export_hf(tmp_path / "half", tmp_path / "kept")
    assert again.dtype == "bfloat16"
    with pytest.raises(EverybertError, match="no dtype 'int4'"):
        export_hf(embedder, tmp_path / "no", dtype="int4")
    assert not (tmp_path / "no").exists()
