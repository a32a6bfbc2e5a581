import numpy as np
import onnx
import pytest
from onnx_int8 import quantise
from onnxruntime import InferenceSession
from refusals import refuses
from tiny_models import saved

from everybert.inference.export import export_onnx


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_matrices_with_several_uses_are_turned_and_rounded_once(tmp_path, kind):
    """Embeddings that are the decoder too, layers that are one layer."""
    export_onnx(saved(tmp_path / "theirs", kind, "ForMaskedLM"), tmp_path / "onnx")
    quantise(tmp_path / "onnx", tmp_path / "int8")
    graph = onnx.load(tmp_path / "int8" / "onnx/model.onnx").graph
    weights = [node.input[1] for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(weights) > len(set(weights)) if kind == "albert" else len(weights) == len(set(weights))
    held = {matrix.name for matrix in graph.initializer}
    assert set(weights) <= held and not [name for name in held if name.endswith(".turned")], "no copy is left"
    ids = np.random.default_rng(0).integers(5, 60, (4, 9))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    one, two = (InferenceSession(tmp_path / name / "onnx/model.onnx").run(None, given)[0] for name in ("onnx", "int8"))
    cosine = (one * two).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(two, axis=-1)
    assert 0.97 < cosine.min() < 1
    refuses("exists already", quantise, tmp_path / "onnx", tmp_path / "int8")
