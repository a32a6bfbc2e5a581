"""Sparse vectors (SPLADE) and one vector per token (ColBERT, PyLate), equal to sentence-transformers."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from safetensors.torch import save_file

from everybert.errors import EverybertError
from everybert.inference.model import Model, load
from everybert.inference.multi import maxsim

sentence_transformers = pytest.importorskip("sentence_transformers")
TEXTS = ["The dog sleeps in the garden, and nobody minds.", "a", "", "Birds! sing. and, play", "dog " * 12]
LONG = "the bird sings in the house " * 12
LOGITS = {"text": {"method": "forward", "method_output_name": "logits"}}


def described(folder: Path, modules: list[str], encoder: dict, about: dict) -> None:
    """The files of sentence-transformers, but for those of the modules."""
    listed = [{"idx": i, "name": str(i), "path": f"{i}" if i else "", "type": m} for i, m in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps(encoder))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    for i in range(1, len(modules)):
        (folder / f"{i}").mkdir()


# ── SPLADE ───────────────────────────────────────────────────────────────────────────────────────────────────


def splade_folder(folder: Path, base: Path, older: bool = False, **pooling) -> Path:
    shutil.copytree(base, folder)
    path = "sentence_transformers.sparse_encoder"
    first = f"{path}.models.MLMTransformer" if older else "sentence_transformers.base.modules.transformer.Transformer"
    splade = f"{path}.models.SpladePooling" if older else f"{path}.modules.splade_pooling.SpladePooling"
    task = {} if older else {"transformer_task": "fill-mask", "modality_config": LOGITS}
    prompts = {"query": "a cat : ", "document": ""}
    described(
        folder,
        [first, splade],
        {"max_seq_length": 24, **task, **({} if older else {"module_output_name": "token_embeddings"})},
        {"model_type": "SparseEncoder", "prompts": prompts, "similarity_fn_name": "dot"},
    )
    (folder / "1" / "config.json").write_text(
        json.dumps({"pooling_strategy": "max", "embedding_dimension": None} | pooling)
    )
    return folder


def dense(found, width: int) -> np.ndarray:
    rows = np.zeros((len(found), width), dtype=np.float32)
    for row, one in zip(rows, found):
        assert (np.diff(one.indices) > 0).all() and (one.weights != 0).all() and one.weights.dtype == np.float32
        row[one.indices] = one.weights
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"older": True}, {"pooling_strategy": "sum"}, {"activation_function": "log1p_relu"}]
)
def test_sparse_vectors_equal_sparse_encoder(bert_folder: Path, tmp_path: Path, options: dict):
    folder = splade_folder(tmp_path / "model", bert_folder, **options)
    theirs, ours = sentence_transformers.SparseEncoder(str(folder), device="cpu"), load(folder, device="cpu")
    texts = [*TEXTS, LONG]
    for prompt in (None, "query"):
        expected = theirs.encode(texts, prompt_name=prompt).to_dense().numpy()
        found = dense(ours.sparse(texts, long="cut", prompt=prompt), expected.shape[1])
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    few = theirs.encode(texts, max_active_dims=4).to_dense().numpy()
    np.testing.assert_allclose(dense(ours.sparse(texts, top=4, long="cut"), few.shape[1]), few, atol=1e-5, rtol=1e-5)
    ours.save(tmp_path / "again")
    again = sentence_transformers.SparseEncoder(str(tmp_path / "again"), device="cpu")
    np.testing.assert_allclose(
        again.encode(texts).to_dense().numpy(), theirs.encode(texts).to_dense().numpy(), atol=1e-6
    )
    kept = load(tmp_path / "again", device="cpu").sparse(texts)
    assert all((a.indices == b.indices).all() for a, b in zip(kept, ours.sparse(texts)))
    refuses(r"use sparse\(\), or name a pooling", ours.embed, texts)
    assert ours.embed(texts, pooling="mean").shape == (len(texts), 48)


@pytest.mark.filterwarnings("ignore")
def test_the_folder_says_how_many_weights_a_sparse_vector_has(bert_folder: Path, tmp_path: Path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = splade_folder(tmp_path / "model", bert_folder)
    about = json.loads((folder / "config_sentence_transformers.json").read_text())

    def limited(count: int) -> Path:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(about | {"max_active_dims": count}))
        return folder

    theirs, ours = sentence_transformers.SparseEncoder(str(limited(5)), device="cpu"), load(folder, device="cpu")
    expected = theirs.encode(TEXTS).to_dense().numpy()
    np.testing.assert_allclose(dense(ours.sparse(TEXTS, long="cut"), expected.shape[1]), expected, atol=1e-5, rtol=1e-5)
    assert [len(x.indices) for x in ours.sparse(TEXTS[:1], top=7)] == [7]
    with pytest.raises(EverybertError, match="at least 1, not 0"):
        ours.sparse(TEXTS, top=0)
    with pytest.raises(EverybertError, match="max_active_dims of 0"):
        load(limited(0), device="cpu")


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_windows_of_a_long_text_add_to_its_sparse_vector(bert_folder: Path, tmp_path: Path, strategy: str):
    """Each token counts once, in the window that owns it."""
    from everybert.inside.masked import windows_of

    model = load(splade_folder(tmp_path / "model", bert_folder, pooling_strategy=strategy), device="cpu")
    (found,) = model.sparse([LONG])
    weights = []
    for window in windows_of(model.tokenizer.encode(LONG), 24):
        (x_nH,) = model.hidden([window.ids])
        weights.append(model.network.mlm_logits(x_nH).relu().log1p()[window.own])
    whole = torch.cat(weights)
    expected = (whole.amax(0) if strategy == "max" else whole.sum(0)).detach().numpy()
    np.testing.assert_allclose(dense([found], len(expected))[0], expected, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="1 of 2 texts were cut"):
        model.sparse(["a", LONG], long="cut")


def test_a_masked_language_model_is_read_as_sparse_encoder_reads_it(roberta: Model, roberta_folder: Path):
    theirs = sentence_transformers.SparseEncoder(str(roberta_folder), device="cpu")
    expected = theirs.encode(TEXTS[:2]).to_dense().numpy()
    np.testing.assert_allclose(dense(roberta.sparse(TEXTS[:2]), expected.shape[1]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "encoder", "cause"),
    [
        ({"pooling_strategy": "mean"}, {}, "SpladePooling by mean"),
        ({"activation_function": "gelu"}, {}, "of gelu"),
        ({}, {"transformer_task": "feature-extraction"}, "or hidden states by it"),
    ],
)
def test_other_sparse_modules_are_refused_at_load(bert_folder: Path, tmp_path: Path, pooling, encoder, cause):
    folder = splade_folder(tmp_path / "model", bert_folder, **pooling)
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | encoder))
    refuses(cause, load, folder, device="cpu")


# ── ColBERT ──────────────────────────────────────────────────────────────────────────────────────────────────


def projected(folder: Path, number: int, rows: int, width: int, **about) -> None:
    from safetensors.torch import save_file

    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(number))
    save_file({"linear.weight": weight}, folder / f"{number}" / "model.safetensors")
    named = {"in_features": width, "out_features": rows, "bias": False, "activation_function": "torch.nn.Identity"}
    (folder / f"{number}" / "config.json").write_text(json.dumps(named | about))


def colbert_folder(folder: Path, base: Path, **encoder) -> Path:
    """As MultiVectorEncoder saves it."""
    shutil.copytree(base, folder)
    names = ["base.modules.transformer.Transformer", "base.modules.dense.Dense", "base.modules.dense.Dense"]
    names += ["multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "base.modules.normalize.Normalize"]
    prompts = {"query": "cat ", "document": "dog "}
    described(
        folder,
        [f"sentence_transformers.{name}" for name in names],
        {"transformer_task": "feature-extraction", "document_length": 20} | encoder,
        {"model_type": "MultiVectorEncoder", "prompts": prompts, "similarity_fn_name": "maxsim"},
    )
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    projected(folder, 1, 20, 48, **tokens)
    projected(folder, 2, 8, 20, **tokens)
    (folder / "3" / "config.json").write_text(
        json.dumps({"skiplist_words": [",", ".", "ð"], "skiplist_tasks": ["document"]})
    )
    (folder / "4" / "config.json").write_text(json.dumps(tokens))
    return folder


def pylate_folder(folder: Path, base: Path, **about) -> Path:
    """As PyLate saved it: no mask, no normalisation, lengths and prefixes in one file."""
    shutil.copytree(base, folder)
    described(
        folder,
        ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"],
        {"max_seq_length": 31, "do_lower_case": False},
        {"model_type": "ColBERT", "prompts": {}, "query_length": 12, "document_length": 20} | about,
    )
    projected(folder, 1, 8, 48)
    return folder


FIXED, LEAST = {"strategy": "fixed", "length": 12}, {"strategy": "min", "length": 9, "attend": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (colbert_folder, {}),
        (colbert_folder, {"query_length": 7}),
        (colbert_folder, {"query_expansion": FIXED}),
        (colbert_folder, {"query_expansion": FIXED | {"attend": True}}),
        (colbert_folder, {"query_expansion": LEAST}),
        (colbert_folder, {"query_expansion": LEAST | {"attend": False, "token": "dog"}, "query_length": 15}),
        (pylate_folder, {}),
        (pylate_folder, {"query_prefix": "[unused1] ", "document_prefix": "bird "}),
        (pylate_folder, {"query_prefix": "sings ", "attend_to_expansion_tokens": True, "skiplist_words": ["dog"]}),
        (
            pylate_folder,
            {"query_prefix": "q: ", "do_query_expansion": False, "query_length": None, "skiplist_words": None},
        ),
        (pylate_folder, {"similarity_fn_name": "meanmaxsim"}),
        (pylate_folder, {"attend_to_mask_tokens": True}),
    ],
)
def test_token_vectors_and_maxsim_equal_multi_vector_encoder(bert_folder: Path, tmp_path: Path, make, options):
    folder = make(tmp_path / "model", bert_folder, **options)
    theirs, ours = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu"), load(folder, device="cpu")
    queries, documents = [*TEXTS, LONG], [*TEXTS, LONG]
    for task, texts in (("query", queries), ("document", documents)):
        expected = getattr(theirs, f"encode_{task}")(texts, convert_to_numpy=True)
        found = ours.multi(texts, task, long="cut")
        assert [len(x) for x in found] == [len(x) for x in expected]
        for mine, other in zip(found, expected):
            assert mine.dtype == np.float32
            np.testing.assert_allclose(mine, other, atol=1e-5, rtol=1e-5)
    scores = theirs.similarity(theirs.encode_query(queries[:1]), theirs.encode_document(TEXTS)).numpy()[0]
    ranked = ours.rank(queries[0], TEXTS)
    np.testing.assert_allclose([one.score for one in ranked], scores[[one.index for one in ranked]], atol=1e-5)
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    ours.save(tmp_path / "again")
    again = sentence_transformers.MultiVectorEncoder(str(tmp_path / "again"), device="cpu")
    for mine, other in zip(again.encode_query(queries), theirs.encode_query(queries)):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "mpnet", "distilbert"])
def test_tokens_that_no_token_attends_to_are_those_of_transformers_mask(kind: str):
    import tempfile

    import tiny_models

    from everybert.inference.multi import encode_filled
    from everybert.store.huggingface import load_network

    theirs = tiny_models.make(kind)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        network = load_network(folder).network
    ids, real, found = [[5, 6, 7, 8, 9, 9, 9], [5, 6, 4, 9, 9, 9, 9], [5, 6, 7, 8, 2, 3, 7, 8, 9, 9]], [4, 3, 9], {}
    encode_filled(network, ids, real, lambda w, b, x: found.update(zip(w, b.split(x))))
    for i, n in enumerate(real):
        mask = torch.arange(len(ids[i]))[None] < n
        with torch.no_grad():
            expected = theirs(input_ids=torch.tensor([ids[i]]), attention_mask=mask.long()).last_hidden_state[0]
        torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=1e-5)


def test_every_token_of_a_long_document_has_a_vector(bert_folder: Path, tmp_path: Path):
    model = load(colbert_folder(tmp_path / "model", bert_folder), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (whole,) = model.multi([LONG])
    assert len(whole) == len(model.tokenizer.encode("dog " + LONG))
    with pytest.warns(UserWarning, match="1 of 1 texts were cut"):
        (cut,) = model.multi([LONG], long="cut")
    assert len(cut) == 20
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)


def test_maxsim_sums_the_best_product_of_each_query_token():
    query = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    documents = [np.array([[1.0, 0.0], [0.6, 0.8]], dtype=np.float32), np.array([[0.0, -1.0]], dtype=np.float32)]
    np.testing.assert_allclose(maxsim(query, documents), [1.8, -1.0], atol=1e-6)
    np.testing.assert_allclose(maxsim(query, documents, per_token=True), [0.9, -0.5], atol=1e-6)


UNKNOWN = "an expansion of queries or a skiplist of an unknown form"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"query_expansion": {"strategy": "all", "length": 9}}, UNKNOWN),
        ({"query_expansion": {"strategy": "min"}}, UNKNOWN),
        ({"query_expansion": "min"}, UNKNOWN),
        ({"query_expansion": {"strategy": "min", "length": 9, "token": [1]}}, UNKNOWN),
        ({"document_length": "20"}, UNKNOWN),
        ({"skiplist_words": 7}, UNKNOWN),
        ({"document_length": 3}, "raise its length"),
        ({"document_length": -3}, "raise its length"),
    ],
)
def test_lengths_and_expansions_that_do_not_work_are_refused(bert_folder: Path, tmp_path: Path, options, cause):
    folder = colbert_folder(tmp_path / "model", bert_folder, **options)
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(listed[:3]))
    about = {"model_type": "ColBERT", "document_prefix": "dog", **options}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    refuses(cause, lambda: load(folder, device="cpu").multi(["a"]))


def test_filled_queries_of_deberta_are_refused(bert_folder: Path, tmp_path: Path):
    """There transformers hides tokens from themselves in another way."""
    model = load(pylate_folder(tmp_path / "model", bert_folder), device="cpu")
    object.__setattr__(model.network.config, "relative", "disentangled")
    refuses("DeBERTa's queries", model.multi, ["a"], "query")


def test_models_of_another_kind_name_the_right_one(bert: Model, bert_folder: Path, tmp_path: Path):
    refuses("give a ColBERT model", bert.multi, ["a"])
    model = load(colbert_folder(tmp_path / "model", bert_folder), device="cpu")
    refuses("query or document, not 'question'", model.multi, ["a"], "question")
    refuses("give a SPLADE model", model.sparse, ["a"])
    refuses(r"use multi\(\)", model.embed, ["a"])


@pytest.mark.filterwarnings("ignore")
def test_routes_for_queries_and_documents(bert_folder: Path, tmp_path: Path):
    """A Router in a SPLADE folder, and in one with a vector per token."""
    from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    def tokens(width: int) -> list:
        name = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        return [Transformer(str(bert_folder), max_seq_length=20), Dense(48, width, bias=False, **name)]

    torch.manual_seed(0)
    masked = Transformer(str(bert_folder), transformer_task="fill-mask", max_seq_length=20)
    splade = Router.for_query_document([masked, SpladePooling("sum")], [masked, SpladePooling("max", "log1p_relu")])
    sentence_transformers.SparseEncoder(modules=[splade]).save(str(tmp_path / "splade"))
    unit = Normalize(module_input_name="token_embeddings", module_output_name="token_embeddings")
    colbert = [Router.for_query_document(tokens(8), tokens(8)), unit, MultiVectorMask(skiplist_words=["cat"])]
    sentence_transformers.MultiVectorEncoder(modules=colbert).save(str(tmp_path / "colbert"))
    for name in ("splade", "colbert"):
        load(tmp_path / name, device="cpu").save(tmp_path / f"{name} again")
    for place in (tmp_path / "splade", tmp_path / "splade again"):
        theirs, ours = sentence_transformers.SparseEncoder(str(place), device="cpu"), load(place, device="cpu")
        expected = {None: theirs.encode(TEXTS), "query": theirs.encode_query(TEXTS)}
        for prompt, vectors in expected.items():
            found = dense(ours.sparse(TEXTS, long="cut", prompt=prompt), vectors.shape[1])
            np.testing.assert_allclose(found, vectors.to_dense().numpy(), atol=1e-5, rtol=1e-5)
    for place in (tmp_path / "colbert", tmp_path / "colbert again"):
        theirs, ours = sentence_transformers.MultiVectorEncoder(str(place), device="cpu"), load(place, device="cpu")
        for encode, task in ((theirs.encode_query, "query"), (theirs.encode_document, "document")):
            for vectors, found in zip(encode(TEXTS), ours.multi(TEXTS, task, long="cut")):
                np.testing.assert_allclose(found, np.asarray(vectors), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("routed", [False, True])
def test_a_weight_per_token_equals_sparse_encoder(bert_folder: Path, tmp_path: Path, routed: bool):
    """SparseStaticEmbedding: alone, or for the queries of a SPLADE model."""
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    torch.manual_seed(0)
    masked = Transformer(str(bert_folder), transformer_task="fill-mask", max_seq_length=20)
    weights = torch.rand(len(masked.tokenizer.get_vocab()))
    query = SparseStaticEmbedding(masked.tokenizer, weights)
    modules = [Router.for_query_document([query], [masked, SpladePooling()])] if routed else [query]
    folder, place = tmp_path / "model", "query_0_SparseStaticEmbedding" if routed else "."
    sentence_transformers.SparseEncoder(modules=modules).save(str(folder))
    model = load(folder, device="cpu")
    model.save(tmp_path / "again")
    model.save(tmp_path / "int8", int8=True)
    texts = [*TEXTS, LONG]
    for one in (folder, tmp_path / "again"):
        expected = sentence_transformers.SparseEncoder(str(one), device="cpu").encode_query(texts).to_dense().numpy()
        assert set((expected != 0).sum(1)[:3]) == {0, 1, 10}
        for ours in (model, load(tmp_path / "again", device="cpu"), load(tmp_path / "int8", device="cpu")):
            np.testing.assert_array_equal(
                dense(ours.sparse(texts, prompt="query" if routed else None, long="cut"), expected.shape[1]), expected
            )
    save_file({"weight": weights - 0.5}, folder / place / "model.safetensors")
    refuses("have weights of words below 0", load, folder, device="cpu")
