import json
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file, save_file

from everybert.errors import EverybertError
from everybert.inference import embedding
from everybert.inference.model import Model, load
from everybert.model import engine
from everybert.model.engine import ordered_batches
from everybert.model.ragged import Ragged
from everybert.training.finetune import finetune

WORDS = [
    *("river", "mountain", "engine", "whisper", "theorem", "bread", "quickly", "violet", "because", "seven"),
    *("markets", "remember", "umbrella", "under", "Python's", "co-operate", "3.14", "São", "naïve", "Zürich"),
    *("#hashtag", "e-mail@example.org", "https://example.org/a?b=c"),
]
ODD = [
    *("", " ", "\n\t"),
    "😀 smile 👩‍👩‍👧 family 🇹🇷",
    "我爱北京天安门",
    "Привет, мир! Γειά σου Κόσμε",
    "مرحبا بالعالم",
    "a" * 300,
    "!!! ??? ...",
    "\u200bzero\u200bwidth\u00ad",
    "MiXeD CaSe ÀÉÎ",
    "[MASK] [SEP] [CLS]",
    "tab\tand\u00a0nbsp",
    "ﬁ ligature ½ ²",
]


def sentences(count: int) -> list[str]:
    """Varied sentences: odd ones, short ones, and some far longer than the window."""
    draw = random.Random(5)
    made = list(ODD)
    while len(made) < count:
        length = draw.choice([1, 2, 4, 8, 8, 12, 20, 40]) if len(made) % 60 else 320
        made.append(" ".join(draw.choice(WORDS) for _ in range(length)).capitalize() + draw.choice([".", "?", ""]))
    return made


def theirs(folder: Path, texts: list[str], **options) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=32, **options)


TWO = ["The dog plays", "a cat sleeps in the house"]
MANY = [" ".join(["dog", "cat", "plays"][: 1 + i % 3] * (1 + i % 30)) for i in range(120)]
"""Of 1 to 90 tokens; the window is 32."""


def equal(folder: Path, again: Path, rtol: float = 1e-7) -> Model:
    """A folder's vectors are those of sentence-transformers; so are those of the folder that is saved again."""
    model = load(folder, device="cpu")
    model.save(again)
    found = model.embed(TWO)
    for one in (folder, again):
        np.testing.assert_allclose(found, theirs(one, TWO), rtol=rtol, atol=1e-5)
    np.testing.assert_array_equal(load(again, device="cpu").embed(TWO), found)
    return model


def test_500_sentences_equal_sentence_transformers(minilm: Model, minilm_folder: Path):
    texts = sentences(500)
    with pytest.warns(UserWarning, match=r"\d+ of 500 texts were cut.*: \d+ tokens were left out"):
        mine = minilm.embed(texts, long="cut")
    assert mine.shape == (500, 384) and mine.dtype == np.float32
    assert np.abs(mine - theirs(minilm_folder, texts)).max() < 1e-5
    lengths = np.array([len(minilm.tokenizer.encode(text)) for text in texts])
    assert (lengths > 256).sum() >= 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = minilm.embed(texts)
    assert np.abs(whole - mine)[lengths <= 256].max() < 1e-6
    assert np.abs(whole - mine)[lengths > 256].max() > 1e-3


def test_a_long_text_is_the_mean_of_all_its_tokens(minilm: Model):
    from everybert.inside.masked import windows_of

    text = " ".join(sentences(80)[20:])
    encoding = minilm.tokenizer.encode(text)
    assert len(encoding) > 600
    total = np.zeros(384)
    for window in windows_of(encoding, 256):
        total += minilm.hidden([window.ids])[0][window.own].double().sum(0).numpy()
    mean = total / len(encoding)
    np.testing.assert_allclose(minilm.embed([text])[0], mean / np.linalg.norm(mean), atol=1e-6)
    np.testing.assert_allclose(minilm.embed([text], normalize=False)[0], mean, atol=1e-6)


def st_folder(base: Path, to: Path, pooling: dict, more: list[tuple[str, str]] = (), **sentence) -> Path:
    """A copy of a folder with sentence-transformers files of our choice."""
    shutil.copytree(base, to)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *more]
    (to / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    (to / "1_Pooling").mkdir()
    (to / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **pooling}))
    (to / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 20, "do_lower_case": False, **sentence})
    )
    return to


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_sqrt_len_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "max"},
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode_weightedmean_tokens": True, "pooling_mode_lasttoken": True},
        {"pooling_mode": ["lasttoken", "weightedmean", "cls"]},
    ],
    ids=lambda p: "+".join(k.removeprefix("pooling_mode_") for k, on in p.items() if on),
)
def test_every_pooling_equals_sentence_transformers(bert_folder: Path, tmp_path: Path, pooling: dict):
    folder = st_folder(bert_folder, tmp_path / "st", pooling, [("2_Normalize", "Normalize")])
    model = load(folder, device="cpu")
    texts = ["The dog plays", "", "a cat sleeps in the house .", "nobody minds " * 20]
    with pytest.warns(UserWarning, match="1 of 4"):
        mine = model.embed(texts, long="cut")
    np.testing.assert_allclose(mine, theirs(folder, texts), atol=1e-5)
    model.save(tmp_path / "again")
    again = load(tmp_path / "again", device="cpu")
    np.testing.assert_array_equal(again.embed(texts), model.embed(texts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(theirs(tmp_path / "again", texts), mine, atol=1e-5)


def add_dense(folder: Path, path: str, inner: int, outer: int, **settings) -> None:
    (folder / path).mkdir()
    torch.manual_seed(0)
    tensors = {"linear.weight": torch.randn(outer, inner), "linear.bias": torch.randn(outer)}
    save_file(tensors, folder / path / "model.safetensors")
    sizes = {"in_features": inner, "out_features": outer, "bias": True}
    about = sizes | {"activation_function": "torch.nn.modules.activation.Tanh"} | settings
    (folder / path / "config.json").write_text(json.dumps(about))


DENSE, NORMALIZE = ("2_Dense", "Dense"), ("3_Normalize", "Normalize")


@pytest.mark.parametrize(
    "more", [[DENSE], [NORMALIZE, DENSE], [NORMALIZE, DENSE, NORMALIZE], [("9_Dropout", "Dropout"), DENSE]]
)
@pytest.mark.parametrize("truncate", [None, 7])
def test_modules_in_any_order_equal_sentence_transformers(bert_folder: Path, tmp_path: Path, more, truncate):
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode_cls_token": True}, more)
    add_dense(folder, "2_Dense", 48, 24)
    (folder / "9_Dropout").mkdir()
    (folder / "9_Dropout" / "config.json").write_text('{"dropout": 0.1}')
    about = {"prompts": {"query": "a dog: "}, "similarity_fn_name": "dot", "truncate_dim": truncate}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    model = equal(folder, tmp_path / "again")
    assert model.embed(TWO).shape == (2, truncate or 24) and model.embed([]).shape == (0, truncate or 24)
    np.testing.assert_allclose(np.linalg.norm(model.embed(TWO, normalize=True), axis=1), 1, atol=1e-6)
    assert model.embed(TWO, pooling="mean").shape == (2, 48)  # a pooling of one's own leaves the modules out
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()  # nothing is lost


def test_layer_norm_and_activations_equal_sentence_transformers(bert_folder: Path, tmp_path: Path):
    more = [("2_LayerNorm", "LayerNorm"), ("3_Dense", "Dense"), ("4_Dense", "Dense"), ("5_Dense", "Dense")]
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode_mean_tokens": True}, more)
    (folder / "2_LayerNorm").mkdir()
    (folder / "2_LayerNorm" / "config.json").write_text('{"dimension": 48}')
    save_file({"norm.weight": torch.randn(48), "norm.bias": torch.randn(48)}, folder / "2_LayerNorm/model.safetensors")
    add_dense(folder, "3_Dense", 48, 24, activation_function="torch.nn.modules.activation.Mish")
    add_dense(folder, "4_Dense", 24, 24, activation_function="torch.nn.modules.activation.SiLU")
    add_dense(folder, "5_Dense", 24, 12, activation_function="torch.nn.modules.linear.Identity")
    equal(folder, tmp_path / "again", rtol=1e-5)


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
@pytest.mark.parametrize("include", [True, False])
def test_named_prompts_equal_sentence_transformers(bert_folder: Path, tmp_path: Path, mode: str, include: bool):
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode": mode, "include_prompt": include})
    prompts = {"query": "the dog plays : ", "document": "", "bird": "a bird"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    model = load(folder, device="cpu")
    texts = ["The dog plays", "", "a cat sleeps in the house ."]
    for name in prompts:
        found = model.embed(texts, prompt=name)
        np.testing.assert_allclose(found, theirs(folder, texts, prompt_name=name), atol=1e-5)
    assert np.abs(model.embed(texts, prompt="query") - model.embed(texts)).max() > 1e-4
    refuses(r"no prompt 'passage' \(it has query, document, bird\)", model.embed, ["a"], prompt="passage")


@pytest.mark.parametrize("mode", ["mean", "max", "weightedmean", "lasttoken", "mean_sqrt_len_tokens"])
def test_long_texts_are_pooled_over_the_tokens_of_all_windows(bert_folder: Path, tmp_path: Path, mode: str):
    from everybert.inference.model import windows_of

    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode": mode, "include_prompt": False})
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "a bird : "}}))
    model = load(folder, device="cpu")
    text = "the dog plays in the garden " * 8
    for name, before in (("query", "a bird : "), (None, "")):
        skip = len(model.tokenizer.encode(before)) - 1 if name else 0
        windows = windows_of(model.tokenizer.encode(before + text), 20)
        x_nH = np.concatenate([model.hidden([window.ids])[0][window.own].numpy() for window in windows])[skip:]
        weight_n1 = np.arange(skip + 1, skip + len(x_nH) + 1)[:, None]
        wanted = {
            "mean": lambda x: x.mean(0),
            "max": lambda x: x.max(0),
            "weightedmean": lambda x, w=weight_n1: (x * w).sum(0) / w.sum(),
            "lasttoken": lambda x: x[-1],
            "mean_sqrt_len_tokens": lambda x: x.sum(0) / np.sqrt(len(x)),
        }[mode](x_nH)
        np.testing.assert_allclose(model.embed([text], prompt=name)[0], wanted, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_matryoshka_dimensions_have_length_one_again(bert_folder: Path, tmp_path: Path, normalize: bool):
    more = [("2_Normalize", "Normalize")] if normalize else []
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode": "mean"}, more)
    model = load(folder, device="cpu")
    found = model.embed(TWO, dimensions=8)
    np.testing.assert_allclose(found, theirs(folder, TWO, truncate_dim=8, normalize_embeddings=normalize), atol=1e-5)
    assert found.shape == (2, 8) and model.embed([], dimensions=8).shape == (0, 8)


@pytest.mark.parametrize("hidden", [True, False])
def test_weighted_layers_equal_sentence_transformers(bert_folder: Path, tmp_path: Path, hidden: bool):
    """If config.json does not ask for all hidden states, sentence-transformers ignores the module."""
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode": "mean"})
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    modules = json.loads((folder / "modules.json").read_text())
    name = "sentence_transformers.models.WeightedLayerPooling"
    modules.insert(1, {"idx": 1, "name": "layers", "path": "1_Layers", "type": name})
    (folder / "modules.json").write_text(json.dumps(modules))
    config = json.loads((folder / "config.json").read_text()) | {"output_hidden_states": hidden}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Layers").mkdir()
    about = {"word_embedding_dimension": 48, "layer_start": 1, "num_hidden_layers": layers}
    (folder / "1_Layers" / "config.json").write_text(json.dumps(about))
    save_file({"layer_weights": torch.rand(layers)}, folder / "1_Layers" / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert bool(equal(folder, tmp_path / "again").pooling.layers) == hidden


def test_an_encoder_in_a_folder_of_its_own(bert_folder: Path, tmp_path: Path):
    """0_Transformer, as in older folders; saved, the encoder is in the folder itself."""
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode": "mean"})
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in [path for path in folder.iterdir() if path.is_file() and path.name not in ("modules.json",)]:
        file.rename(inner / file.name)
    (inner / "manifest.json").unlink(missing_ok=True)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert equal(folder, tmp_path / "again").pooling.size == 20
    assert load(tmp_path / "again", device="cpu").pooling.size == 20
    modules[0]["type"] = "sentence_transformers.models.BoW"
    (folder / "modules.json").write_text(json.dumps(modules))
    refuses("begin with a BoW module", load, folder, device="cpu")


@pytest.mark.parametrize("form", ["its own", "with more", "older", "model2vec"])
def test_a_static_embedding_has_no_layers(bert_folder: Path, tmp_path: Path, form: str):
    from safetensors.torch import load_file, save_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding
    from tokenizers import Tokenizer as Backend

    torch.manual_seed(0)
    backend = Backend.from_file(str(bert_folder / "tokenizer.json"))
    if form == "with more":
        backend.enable_truncation(5)
    more = [Dense(24, 8), Normalize()] if form == "with more" else []
    prompts = {"query": "the cat: "}
    model = SentenceTransformer(modules=[StaticEmbedding(backend, embedding_dim=24), *more], prompts=prompts)
    folder = tmp_path / "static"
    model.save(str(folder))
    if form == "older":
        (folder / "0_StaticEmbedding").mkdir()
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).rename(folder / "0_StaticEmbedding" / name)
        modules = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(json.dumps([{**modules[0], "path": "0_StaticEmbedding"}]))
    elif form == "model2vec":
        (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
        table = load_file(folder / "model.safetensors")["embedding.weight"]
        save_file({"embeddings": table}, folder / "model.safetensors")
    texts = ["The dog plays", "", "a cat", "cat", "The dog plays in the house with a cat " * 20]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = load(folder, device="cpu")
        ours.save(tmp_path / "again")
        for one in (ours, load(tmp_path / "again", device="cpu")):
            np.testing.assert_allclose(one.embed(texts, long="cut"), theirs(folder, texts), atol=1e-6)
            found = one.embed(texts, long="cut", prompt="query")
            np.testing.assert_allclose(found, theirs(folder, texts, prompt_name="query"), atol=1e-6)
        np.testing.assert_allclose(theirs(tmp_path / "again", texts), theirs(folder, texts), atol=1e-6)
    assert load(folder, device="cpu", dtype="int8").embed(texts).shape == (5, 8 if more else 24)
    assert ours.attention("a cat").weights.shape == (0, 1, 2, 2)


def router(folder: Path, encoder: Path, form: str = "static queries") -> Path:
    """A folder with a Router, as sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Router,
        StaticEmbedding,
        Transformer,
    )
    from tokenizers import Tokenizer as Backend

    torch.manual_seed(0)
    prompts = {"query": "the cat: ", "short": "a "}
    modules = [Transformer(str(encoder), max_seq_length=20), Pooling(48)]
    query, document = [*modules, Dense(48, 8)], [*modules, Dense(48, 8), Normalize()]
    if form == "static queries":
        static = StaticEmbedding(Backend.from_file(str(encoder / "tokenizer.json")), embedding_dim=48)
        modules = [Router.for_query_document([static], modules), Normalize()]
    elif form == "one encoder":
        modules = [Router.for_query_document(query, document)]
    elif form == "two encoders":
        query = [Transformer(str(encoder)), Pooling(48, pooling_mode="cls"), Dense(48, 8)]
        modules = [Router({"query": query, "other": document}, default_route="other")]
    else:
        modules += [Router({"text": [Normalize()], "query": [Dense(48, 8)], "document": [Dense(48, 8)]})]
    SentenceTransformer(modules=modules, prompts=prompts, similarity_fn_name="dot").save(str(folder))
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["static queries", "one encoder", "two encoders", "after the pooling"])
def test_the_routes_of_a_router_equal_sentence_transformers(bert_folder: Path, tmp_path: Path, form: str):
    from sentence_transformers import SentenceTransformer

    folder = router(tmp_path / "both", bert_folder, form)
    model = load(folder, device="cpu")
    model.save(tmp_path / "again")
    other = "other" if form == "two encoders" else "document"
    texts = [*TWO, "", "The dog plays in the house with a cat " * 4]
    found = []
    for ours in (model, load(tmp_path / "again", device="cpu")):
        vectors = [ours.embed(texts, long="cut", prompt=name) for name in (None, "query", other, "short")]
        found.append(vectors)
        for place in (folder, tmp_path / "again"):
            theirs = SentenceTransformer(str(place), device="cpu")
            assert theirs.similarity_fn_name == "dot" and theirs.prompts.items() <= model.pooling.prompts.items()
            expected = [theirs.encode(texts), theirs.encode_query(texts), theirs.encode(texts, task=other)]
            for one, all_of_them in zip([*expected, theirs.encode(texts, prompt_name="short")], vectors):
                np.testing.assert_allclose(all_of_them, one, atol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(*found))
    assert np.abs(found[0][1][:, :8] - found[0][2][:, :8]).max() > 0.1
    model.save(tmp_path / "int8", int8=True)
    for coarse in (load(tmp_path / "int8", device="cpu"), load(folder, device="cpu", dtype="int8")):
        np.testing.assert_allclose(coarse.embed(texts, long="cut", prompt="query"), found[0][1], atol=0.2)


def test_what_is_not_done_with_a_router_is_refused(bert_folder: Path, tmp_path: Path):
    from everybert.inference.describe import describe_folder
    from everybert.inference.export import export_hf, export_onnx, quantise

    folder = router(tmp_path / "both", bert_folder, "two encoders")
    inner, model = folder / "query_0_Transformer", load(folder, device="cpu")
    several = "both is a Router of several encoders; give the folder of one, as .*other_0_Transformer"
    rows = [("a", "b"), ("the", "dog")]
    refuses(several, finetune, folder, "embed", rows, rows, tmp_path / "out", quiet=True)
    refuses(several, describe_folder, folder)
    finetune(inner, "embed", rows, rows, tmp_path / "own", mode="lora", epochs=1, quiet=True, device="cpu")
    refuses("an adapter would change one route", model.add_adapter, tmp_path / "own")
    refuses("is a Router of several encoders", export_onnx, folder, tmp_path / "out")
    refuses("is a Router of several encoders", export_hf, folder, tmp_path / "out")
    refuses("is a Router of several encoders", quantise, folder, tmp_path / "out", TWO)
    refuses("has no prompt 'passage'", model.embed, TWO, prompt="passage")

    model.save(tmp_path / "again")
    weights = tmp_path / "again" / "query_0_Transformer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refuses("query_0_Transformer/model.safetensors .*everybert info --accept", load, tmp_path / "again")

    about = json.loads((folder / "router_config.json").read_text())
    for part, value in (
        ("parameters", {"route_mappings": {"(None, 'text')": "query"}, "default_route": "query"}),
        ("parameters", {"default_route": None, "allow_empty_key": False}),
        ("structure", {"query": ["missing"]}),
        ("types", None),
    ):
        (folder / "router_config.json").write_text(json.dumps(about | {part: value}))
        refuses("chooses by more than the task, or without a default", load, folder, device="cpu")
    types = about["types"] | {"query_0_Transformer": "sentence_transformers.sentence_transformer.modules.bow.BoW"}
    (folder / "router_config.json").write_text(json.dumps(about | {"types": types}))
    refuses("begin with a BoW module", load, folder, device="cpu")


def test_what_a_static_embedding_has_not(bert_folder: Path, tmp_path: Path):
    from safetensors.torch import save_file

    static = tmp_path / "static"
    static.mkdir()
    shutil.copy(bert_folder / "tokenizer.json", static)
    (static / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.StaticEmbedding"}]))
    table = torch.randn(200, 8)
    save_file({"embedding.weight": table}, static / "model.safetensors")
    with pytest.raises(EverybertError, match="has no layers; fine-tune an encoder"):
        finetune(static, "classify", [("a", "b")], [("a", "b")], tmp_path / "out", quiet=True)
    save_file({"embeddings": table, "weights": table[:, 0].clone()}, static / "model.safetensors")
    with pytest.raises(EverybertError, match=r"has no config\.json"):
        load(static, device="cpu")


def test_pickled_dense_weights_need_permission(bert_folder: Path, tmp_path: Path):
    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode": "mean"}, [DENSE])
    add_dense(folder, "2_Dense", 48, 24)
    expected = load(folder, device="cpu").embed(TWO)
    torch.save(load_file(folder / "2_Dense" / "model.safetensors"), folder / "2_Dense" / "pytorch_model.bin")
    (folder / "2_Dense" / "model.safetensors").unlink()
    refuses("a pickle; if you trust it, allow_pickle=True", load, folder, device="cpu")
    model = load(folder, device="cpu", allow_pickle=True)
    np.testing.assert_array_equal(model.embed(TWO), expected)
    model.save(tmp_path / "again")
    np.testing.assert_allclose(theirs(tmp_path / "again", TWO), expected, atol=1e-5)


def test_a_limit_of_the_tokenizer_is_kept(bert_folder: Path, tmp_path: Path):
    folder = shutil.copytree(bert_folder, tmp_path / "model")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"model_max_length": 16}))
    load(folder, device="cpu").save(tmp_path / "again")
    assert load(tmp_path / "again", device="cpu").window == 16


@pytest.mark.parametrize(
    ("pooling", "dense", "cause"),
    [
        (None, {}, "have a Dense module in place 1"),
        ({}, {"module_input_name": "token_embeddings"}, "changes the vectors of tokens"),
        ({}, {"activation_function": "torch.nn.MultiheadAttention"}, "unknown form"),
        ({}, {"activation_function": "numpy.tanh"}, "unknown form"),
    ],
)
def test_what_we_do_not_compute_is_refused_at_load(bert_folder, tmp_path, pooling, dense, cause):
    """More of it is in tests/store/test_sentence_transformers.py."""
    folder = st_folder(bert_folder, tmp_path / "st", pooling or {}, [DENSE])
    add_dense(folder, "2_Dense", 48, 24, **dense)
    if pooling is None:
        modules = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(json.dumps([m for m in modules if "Pooling" not in m["type"]]))
    refuses(cause, load, folder, device="cpu")


def test_lowering_the_case_and_prompts_are_followed(roberta_folder: Path, tmp_path: Path):
    folder = st_folder(roberta_folder, tmp_path / "st", {"pooling_mode_mean_tokens": True}, do_lower_case=True)
    prompts = {"prompts": {"query": "The dog: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    equal(folder, tmp_path / "again")  # one of the texts has a capital


def test_without_files_the_mean_is_taken(bert: Model):
    texts = ["The dog plays", "a cat"]
    expected = [bert.tokens(text).vectors.mean(0) for text in texts]
    np.testing.assert_allclose(bert.embed(texts), expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(bert.embed(texts, normalize=True), axis=1), 1, atol=1e-6)
    cls = [bert.tokens(text).vectors[0] for text in texts]
    np.testing.assert_allclose(bert.embed(texts, pooling="cls"), cls, atol=1e-5)
    assert bert.embed([]).shape == (0, 48)
    np.testing.assert_array_equal(bert.embed("a cat"), bert.embed(["a cat"]))


def test_the_cls_of_a_long_text_hears_all_windows(bert: Model):
    start = "the dog plays in the garden . " * 6
    one, two = bert.embed([start + "the cat", start + "the bird"], pooling="cls")
    assert np.abs(one - two).max() > 1e-4


# ── tokenization ahead of compute ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("long", ["window", "cut"])
def test_many_runs_give_the_vectors_of_one(bert: Model, monkeypatch, long):
    """Tokenized in one go, in runs, and in runs without a thread."""
    whole = bert.embedded(MANY, long=long)
    monkeypatch.setattr(embedding, "CHARACTERS", {True: 200, False: 200})
    parts = bert.embedded(MANY, long=long)
    monkeypatch.setattr(embedding, "ahead", lambda work, items: map(work, items))
    plain = bert.embedded(MANY, long=long)
    assert (parts.vectors == plain.vectors).all()
    assert parts.tokens == whole.tokens and parts.cut == whole.cut
    torch.testing.assert_close(torch.from_numpy(parts.vectors), torch.from_numpy(whole.vectors), atol=1e-5, rtol=0)


@pytest.mark.parametrize("long", ["window", "cut"])
def test_an_accelerators_runs_fill_their_batches(bert: Model, monkeypatch, long):
    """Rehearsed on the CPU: a run's last, half-full batch waits for the next run; texts keep their order."""
    whole = bert.embedded(MANY, long=long)
    sizes = []
    check = bert.network.encoder.check

    def noted(batch: Ragged):
        sizes.append(len(batch.tokens_T))
        check(batch)

    monkeypatch.setattr(bert.network.encoder, "check", noted)
    monkeypatch.setattr(embedding, "on_cpu", lambda network: False)
    monkeypatch.setattr(embedding, "CHARACTERS", {True: 500, False: 500})
    for module in (embedding, engine):
        monkeypatch.setattr(module, "BUDGET_GPU", 256)
    monkeypatch.setattr(engine, "sorted_batches", lambda lengths, budget: ordered_batches(lengths, 256))
    found = bert.embedded(MANY, long=long)
    torch.testing.assert_close(torch.from_numpy(found.vectors), torch.from_numpy(whole.vectors), atol=1e-5, rtol=0)
    assert found.tokens == whole.tokens
    assert max(sizes) <= 256 and sum(size >= 256 - 96 for size in sizes) >= len(sizes) - 1


@pytest.mark.gpu
def test_vectors_on_the_device_are_those_of_the_cpu(bert: Model, bert_folder):
    device = load(bert_folder, device="cuda", dtype="bfloat16")
    for long in ("window", "cut"):
        wanted = torch.from_numpy(bert.embedded(MANY, long=long).vectors)
        for _ in range(3):  # run, recorded, replayed
            found = torch.from_numpy(device.embedded(MANY, long=long).vectors)
            assert torch.cosine_similarity(found, wanted).min() > 0.999
