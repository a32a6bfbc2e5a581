from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from everybert.errors import EverybertError
from everybert.inference import embedding
from everybert.inference.model import Model, load
from everybert.model import engine
from everybert.model.engine import in_order
from everybert.model.ragged import Ragged
from everybert.store.sentence_transformers import Dense, Pooling, write_pooling

WORDS = [
    *("river", "mountain", "engine", "whisper", "theorem", "bread", "quickly", "violet", "because", "seven"),
    *("markets", "remember", "umbrella", "under", "Python's", "co-operate", "3.14", "São", "naïve", "Zürich"),
    *("#hashtag", "e-mail@example.org", "https://example.org/a?b=c"),
]
ODD = [
    "",
    " ",
    "\n\t",
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


def theirs(folder: Path, texts: list[str]) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=32)


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
    from everybert.inference.model import pieces_of

    text = " ".join(sentences(80)[20:])
    encoding = minilm.tokenizer.encode(text)
    assert len(encoding) > 600
    total = np.zeros(384)
    for piece in pieces_of(encoding, 256):
        total += minilm.hidden([piece.ids])[0][piece.own].double().sum(0).numpy()
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


def test_a_dense_layer_equals_sentence_transformers(bert_folder: Path, tmp_path: Path):
    from safetensors.torch import save_file

    folder = st_folder(bert_folder, tmp_path / "st", {"pooling_mode_cls_token": True}, [("2_Dense", "Dense")])
    (folder / "2_Dense").mkdir()
    torch.manual_seed(0)
    tensors = {"linear.weight": torch.randn(24, 48), "linear.bias": torch.randn(24)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    settings = {"in_features": 48, "out_features": 24, "bias": True}
    settings["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(settings))
    model = load(folder, device="cpu")
    texts = ["The dog plays", "a cat sleeps in the house"]
    np.testing.assert_allclose(model.embed(texts), theirs(folder, texts), atol=1e-5)
    assert model.embed(texts, pooling="mean").shape == (2, 48)  # a pooling of one's own leaves the layer out
    model.save(tmp_path / "again")
    np.testing.assert_allclose(theirs(tmp_path / "again", texts), model.embed(texts), atol=1e-5)


def test_lowering_the_case_and_prompts_are_followed(roberta_folder: Path, tmp_path: Path):
    folder = st_folder(roberta_folder, tmp_path / "st", {"pooling_mode_mean_tokens": True}, do_lower_case=True)
    prompts = {"prompts": {"query": "The dog: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = load(folder, device="cpu")
    texts = ["The CAT Plays", "nobody"]
    np.testing.assert_allclose(model.embed(texts), theirs(folder, texts), atol=1e-5)


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
    big = bert.embed([start + start], pooling="max")[0]
    np.testing.assert_allclose(big, bert.tokens(start + start).vectors.max(0), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"pooling": "best"}, "no pooling 'best'"), ({"long": "drop"}, "window or cut")],
)
def test_settings_that_there_are_none_of(bert: Model, settings, message):
    with pytest.raises(EverybertError, match=message):
        bert.embed(["text"], **settings)


def test_modules_unknown_to_us_are_named(bert_folder: Path, tmp_path: Path):
    folder = st_folder(bert_folder, tmp_path / "st", {}, [("2_LSTM", "LSTM")])
    model = load(folder, device="cpu")
    with pytest.raises(EverybertError, match=r"LSTM.*pooling="):
        model.embed(["text"])
    assert model.embed(["text"], pooling="mean").shape == (1, 48)


# ── tokenization ahead of compute ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("long", ["window", "cut"])
def test_many_runs_give_the_vectors_of_one(bert: Model, monkeypatch, long):
    """Texts of 1 to 90 tokens (the window is 32): tokenized in one go, in runs, and in runs without a thread."""
    texts = [" ".join(["dog", "cat", "plays"][: 1 + i % 3] * (1 + i % 30)) for i in range(120)]
    whole = bert.embedded(texts, long=long)
    monkeypatch.setattr(embedding, "CHARACTERS", {True: 200, False: 200})
    parts = bert.embedded(texts, long=long)
    monkeypatch.setattr(embedding, "ahead", lambda work, items: map(work, items))
    plain = bert.embedded(texts, long=long)
    assert (parts.vectors == plain.vectors).all()
    assert parts.tokens == whole.tokens and parts.cut == whole.cut
    torch.testing.assert_close(torch.from_numpy(parts.vectors), torch.from_numpy(whole.vectors), atol=1e-5, rtol=0)


@pytest.mark.parametrize("long", ["window", "cut"])
def test_an_accelerators_runs_fill_their_batches(bert: Model, monkeypatch, long):
    """Rehearsed on the CPU: a run's last, half-full batch waits for the next run; texts keep their order."""
    texts = [" ".join(["dog", "cat", "plays"][: 1 + i % 3] * (1 + i % 30)) for i in range(120)]
    whole = bert.embedded(texts, long=long)
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
    monkeypatch.setattr(engine, "plan", lambda lengths, budget: in_order(lengths, 256))
    found = bert.embedded(texts, long=long)
    torch.testing.assert_close(torch.from_numpy(found.vectors), torch.from_numpy(whole.vectors), atol=1e-5, rtol=0)
    assert found.tokens == whole.tokens
    assert max(sizes) <= 256 and sum(size >= 256 - 96 for size in sizes) >= len(sizes) - 1


def test_what_is_no_text_is_named(bert: Model):
    with pytest.raises(EverybertError, match="not a string"):
        bert.embed(["a", 3])


@pytest.mark.gpu
def test_vectors_on_the_device_are_those_of_the_cpu(bert: Model, bert_folder):
    texts = [" ".join(["dog", "cat", "plays"][: 1 + i % 3] * (1 + i % 30)) for i in range(120)]
    device = load(bert_folder, device="cuda", dtype="bfloat16")
    for long in ("window", "cut"):
        wanted = torch.from_numpy(bert.embedded(texts, long=long).vectors)
        for _ in range(3):  # run, recorded, replayed
            found = torch.from_numpy(device.embedded(texts, long=long).vectors)
            assert torch.cosine_similarity(found, wanted).min() > 0.999


def test_no_texts_give_no_vectors_of_the_right_width(tmp_path, bert: Model, bert_folder):
    """A Dense layer (LaBSE) or several poolings change the width."""
    assert bert.embed([]).shape == (0, 48)
    for name, pooling in {
        "dense": Pooling(dense=(Dense(torch.ones(5, 48), None),)),
        "two": Pooling(modes=("cls", "mean")),
    }.items():
        shutil.copytree(bert_folder, tmp_path / name)
        write_pooling(tmp_path / name, pooling, 48)
        model = load(tmp_path / name, device="cpu")
        assert model.embed([]).shape == (0, model.embed(["a dog"]).shape[1])
