"""Models whose code is on the hub: their config.json and tensor names, against `transformers` or a reference here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from tiny_models import make  # noqa: E402

from everybert.errors import EverybertError  # noqa: E402
from everybert.files import atomic_folder  # noqa: E402
from everybert.model.config import PRESETS  # noqa: E402
from everybert.model.heads import Network  # noqa: E402
from everybert.model.ragged import Ragged  # noqa: E402
from everybert.store import config_json  # noqa: E402
from everybert.store.huggingface import load_network, save_network  # noqa: E402

IDS = [4, 17, 33, 8, 52, 5, 9, 11, 20, 6]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def rewrite(folder: Path, drop: tuple[str, ...] = (), rename=lambda name: name, **fields) -> None:
    """Change the config.json of a folder and the names of its tensors."""
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in drop} | fields
    (folder / "config.json").write_text(json.dumps(raw))
    found = load_file(folder / "model.safetensors")
    save_file({rename(name): value for name, value in found.items()}, folder / "model.safetensors", {"format": "pt"})


def saved_back(folder: Path, out: Path) -> Path:
    loaded = load_network(folder)
    with atomic_folder(out) as tmp:
        save_network(loaded.network, tmp, raw_config=loaded.raw_config)
    return out


def hidden(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_network(folder).network.encoder(Ragged.of([IDS]))


def theirs(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).last_hidden_state[0]


NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 24,
    "n_positions": 40,
    "vocab_size": 60,
    "type_vocab_size": 2,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "prenorm": False,
    "causal": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "tie_word_embeddings": True,
}


def test_nomic_by_its_code_on_the_hub(tmp_path: Path):
    model = make("nomic_bert")
    model.save_pretrained(tmp_path / "hub")  # its tensors have the names of the hub
    (tmp_path / "hub" / "config.json").write_text(json.dumps(NOMIC))
    torch.testing.assert_close(hidden(tmp_path / "hub"), theirs(model), **CLOSE)
    again = transformers.AutoModel.from_pretrained(saved_back(tmp_path / "hub", tmp_path / "native"))
    assert torch.equal(theirs(again), theirs(model))
    assert (
        load_file(tmp_path / "native/model.safetensors").keys() == load_file(tmp_path / "hub/model.safetensors").keys()
    )


def ntk_rates(size: int, base: float, factor: float) -> torch.Tensor:
    """Fixed NTK scaling as published for gte: a larger base, and every rate divided by the same number."""
    return torch.tensor([(base * factor) ** (-2 * i / size) / factor ** (2 / size) for i in range(size // 2)])


@pytest.mark.parametrize("suffix", ["Model", "ForSequenceClassification"])
def test_gte_by_its_code_on_the_hub(tmp_path: Path, suffix: str):
    model = make("gte", suffix, rope_parameters={"rope_type": "default", "rope_theta": 300.0}, num_labels=2)
    model.save_pretrained(tmp_path / "hub")
    ntk = {"rope_theta": 300.0, "rope_scaling": {"type": "ntk", "factor": 3.0}, "position_embedding_type": "rope"}
    more = {"pack_qkv": True, "layer_norm_type": "layer_norm", "logn_attention_scale": False, "unpad_inputs": False}
    rename = lambda name: name.replace("gte.", "new.")  # noqa: E731
    names = {"model_type": "new", "architectures": [f"New{suffix}"]}
    rewrite(tmp_path / "hub", ("rope_parameters",), rename, **names, **ntk, **more)
    base = model if suffix == "Model" else model.gte
    base.rotary_emb.inv_freq.copy_(ntk_rates(8, 300.0, 3.0))
    torch.testing.assert_close(hidden(tmp_path / "hub"), theirs(base), **CLOSE)
    native = saved_back(tmp_path / "hub", tmp_path / "native")
    again = getattr(transformers, f"Gte{suffix}").from_pretrained(native).eval()
    torch.testing.assert_close(theirs(again if suffix == "Model" else again.gte), theirs(base), **CLOSE)
    with torch.no_grad():
        loaded, batch = load_network(native), Ragged.of([IDS])
        if suffix != "Model":
            logits = loaded.network.sequence_logits(loaded.network.encoder(batch), batch, "classify")
            torch.testing.assert_close(logits, model(torch.tensor([IDS])).logits, **CLOSE)


def test_jina_v3_by_its_code_on_the_hub(tmp_path: Path):
    model = make("jina_embeddings_v3")
    model.save_pretrained(tmp_path / "hub")

    def name(name: str) -> str:
        matrix = name.endswith(".weight") and "norm" not in name and "emb_ln" not in name
        return "roberta." + (name.replace(".weight", ".parametrizations.weight.original") if matrix else name)

    hub = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    hub |= {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["retrieval.query", "text-matching"]}
    rewrite(tmp_path / "hub", ("rope_parameters",), name, **hub)
    found = load_file(tmp_path / "hub" / "model.safetensors")
    adapter = "roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_A"
    save_file({**found, adapter: torch.ones(2, 4, 16)}, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    loaded = load_network(tmp_path / "hub")
    assert "adapters for tasks are not read" in str(loaded.report) and loaded.report.unused == (adapter,)
    torch.testing.assert_close(hidden(tmp_path / "hub"), theirs(model), **CLOSE)
    again = transformers.AutoModel.from_pretrained(saved_back(tmp_path / "hub", tmp_path / "native"))
    assert torch.equal(theirs(again), theirs(model))


# ── jina v2, which transformers does not have ────────────────────────────────────────────────────────────────

JINA = {
    "model_type": "bert",
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
}


def jina_tensors() -> dict[str, torch.Tensor]:
    """Random tensors under the published names."""
    torch.manual_seed(0)
    width, inner = JINA["hidden_size"], JINA["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (60, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm": (width,),
        "pooler.dense": (width, width),
    }
    for i in range(JINA["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        shapes |= {f"{at}attention.self.{name}": (width, width) for name in ("query", "key", "value")}
        shapes |= {f"{at}attention.output.dense": (width, width), f"{at}attention.output.LayerNorm": (width,)}
        shapes |= {f"{at}mlp.gated_layers.weight": (2 * inner, width), f"{at}mlp.wo": (width, inner)}
        shapes |= {f"{at}mlp.layernorm": (width,)}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight"):
            tensors[name] = torch.randn(shape) * 0.3
        else:
            tensors[f"{name}.weight"] = torch.randn(shape) * 0.3 + (len(shape) == 1)
            tensors[f"{name}.bias"] = torch.randn(shape[0]) * 0.1
    return tensors


def jina_reference(tensors: dict[str, torch.Tensor], ids: list[int], segments: list[int]) -> torch.Tensor:
    """The equations of Günther et al. 2023 and Press et al. 2022, one head at a time."""

    def linear(x, name):
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def slopes(heads):
        if math.log2(heads).is_integer():
            start = 2 ** (-8 / heads)
            return [start ** (i + 1) for i in range(heads)]
        lower = 2 ** math.floor(math.log2(heads))
        return slopes(lower) + slopes(2 * lower)[::2][: heads - lower]

    table, kinds = (tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
    x = norm(table[ids] + kinds[segments], "embeddings.LayerNorm")
    n, size = len(ids), JINA["hidden_size"] // JINA["num_attention_heads"]
    far = torch.tensor([[abs(i - j) for j in range(n)] for i in range(n)])
    for i in range(JINA["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = (linear(x, f"{at}attention.self.{name}") for name in ("query", "key", "value"))
        mixed = []
        for head, slope in enumerate(slopes(JINA["num_attention_heads"])):
            own = slice(head * size, head * size + size)
            scores = q[:, own] @ k[:, own].T / math.sqrt(size) - slope * far
            mixed.append(scores.softmax(-1) @ v[:, own])
        added = linear(torch.cat(mixed, -1), f"{at}attention.output.dense")
        x = norm(x + added, f"{at}attention.output.LayerNorm")
        gate, up = linear(x, f"{at}mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(F.gelu(gate) * up, f"{at}mlp.wo"), f"{at}mlp.layernorm")
    return x


def jina_folder(folder: Path, **fields) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(JINA | {"architectures": ["JinaBertModel"]} | fields))
    save_file(jina_tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_jina_v2_against_its_equations(tmp_path: Path):
    loaded = load_network(jina_folder(tmp_path / "jina"))
    assert str(loaded.report) == "" and loaded.config.family == "jina-bert"
    tensors = {name: value.requires_grad_() for name, value in jina_tensors().items()}
    rows = [IDS, IDS[::-1] * 3, [7]]
    segments = [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in rows]
    batch = Ragged.of(rows, segments)
    ours = loaded.network.encoder(batch)
    wanted = torch.cat([jina_reference(tensors, *pair) for pair in zip(rows, segments)])
    torch.testing.assert_close(ours, wanted, **CLOSE)
    probe = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (ours * probe).mean().backward(), (wanted * probe).mean().backward()
    layer = loaded.network.encoder.layers[0]
    for mine, name in (
        (layer.feed_forward.input, "mlp.gated_layers"),
        (layer.attention.output, "attention.output.dense"),
    ):
        torch.testing.assert_close(mine.weight.grad, tensors[f"encoder.layer.0.{name}.weight"].grad, **CLOSE)
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        out = loaded.network.encoder(Ragged.of([IDS]), watch=lambda name, x: seen.__setitem__(name, x))
        torch.testing.assert_close(out, jina_reference(tensors, IDS, [0] * len(IDS)), **CLOSE)
    assert seen["layers.1.attention.weights"].shape == (6, 10, 10)


def test_jina_v2_is_saved_as_it_was(tmp_path: Path):
    saved_back(jina_folder(tmp_path / "jina"), tmp_path / "again")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("jina", "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert raw["auto_map"] == JINA["auto_map"] and raw["model_type"] == "bert" and raw["emb_pooler"] == "mean"
    network = Network(load_network(tmp_path / "jina").config, {"mlm": None, "classify": 2})
    with atomic_folder(tmp_path / "heads") as tmp:
        save_network(network, tmp)
    back = load_network(tmp_path / "heads")
    assert set(back.network.heads) == {"classify", "mlm"} and back.config == network.config
    assert all(torch.equal(x, back.network.state_dict()[name]) for name, x in network.state_dict().items())


def test_the_published_slopes():
    assert PRESETS["jina-bert-base"].relative == "alibi"
    from everybert.model.embeddings import alibi_slopes

    device = torch.device("cpu")
    assert alibi_slopes(8, device).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(alibi_slopes(12, device)[8:], torch.tensor([2.0 ** -(i + 0.5) for i in range(4)]))


# ── EuroBERT, ESM-2 and RoFormer ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_euroberts_classifier_reads(tmp_path: Path, pooling: str, groups: int):
    model = make("eurobert", "ForSequenceClassification", classifier_pooling=pooling, num_key_value_heads=groups)
    model.save_pretrained(tmp_path / "hub")
    rewrite(tmp_path / "hub", ("classifier_pooling",), clf_pooling=pooling)  # as its code on the hub names it
    loaded, batch = load_network(tmp_path / "hub"), Ragged.of([IDS, IDS[:3]])
    with torch.no_grad():
        found = loaded.network.sequence_logits(loaded.network.encoder(batch), batch, "classify")
        wanted = torch.cat([model(torch.tensor([ids])).logits for ids in (IDS, IDS[:3])])
        torch.testing.assert_close(found, wanted, **CLOSE)
        again = type(model).from_pretrained(saved_back(tmp_path / "hub", tmp_path / "native")).eval()
        assert again.config.classifier_pooling == pooling
        torch.testing.assert_close(again(torch.tensor([IDS])).logits, wanted[:1], **CLOSE)


def test_euroberts_tied_head_has_no_tensors(tmp_path: Path):
    model = make("eurobert", "ForMaskedLM", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    loaded = load_network(tmp_path / "tied")
    assert str(loaded.report) == "" and not loaded.network.heads["mlm"].state_dict()
    with torch.no_grad():
        found = loaded.network.mlm_logits(loaded.network.encoder(Ragged.of([IDS])))
        torch.testing.assert_close(found, model(torch.tensor([IDS])).logits[0], **CLOSE)
    again = load_network(saved_back(tmp_path / "tied", tmp_path / "again")).network
    assert list(again.heads) == ["mlm"] and again.config.tied


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_esms_rotary_rates_are_as_precise_as_in_its_file(tmp_path: Path, precision: str):
    model = make("esm", "ForMaskedLM", mask_token_id=IDS[3])
    model.esm.rotary_embeddings.inv_freq.copy_(model.esm.rotary_embeddings.inv_freq.to(getattr(torch, precision)))
    model.save_pretrained(tmp_path / "odd")
    kept, table = load_file(tmp_path / "odd" / "model.safetensors"), "rotary_embeddings.inv_freq"
    published = {name: value for name, value in kept.items() if not name.endswith(table)}
    rates = next(value for name, value in kept.items() if name.endswith(table))
    published |= {f"esm.encoder.layer.{i}.attention.self.{table}": rates.clone() for i in range(2)}
    save_file(published, tmp_path / "odd" / "model.safetensors", {"format": "pt"})
    long = IDS * 4
    with torch.no_grad():
        wanted = model(torch.tensor([long])).logits[0]
        for folder in (tmp_path / "odd", saved_back(tmp_path / "odd", tmp_path / "again")):
            loaded = load_network(folder)
            assert loaded.config.rotary_precision == precision and loaded.config.mask_id == IDS[3]
            torch.testing.assert_close(loaded.network.mlm_logits(loaded.network.encoder(Ragged.of([long]))), wanted)
            there = type(model).from_pretrained(folder).eval()
            torch.testing.assert_close(there(torch.tensor([long])).logits[0], wanted)
        rewrite(tmp_path / "odd", rope_theta=500.0)
        with pytest.raises(EverybertError, match="does not follow from rope_theta"):
            load_network(tmp_path / "odd")


@pytest.mark.parametrize("changes", [{}, {"token_dropout": False}, {"emb_layer_norm_before": True}])
def test_masked_tokens_of_esm(tmp_path: Path, changes: dict):
    model = make("esm", "Model", **{"mask_token_id": 8} | changes)
    model.save_pretrained(tmp_path)
    rows = [IDS, [8, 8, 4], [4], IDS[::-1] * 2]
    with torch.no_grad():
        loaded, batch = load_network(tmp_path), Ragged.of(rows)
        wanted = torch.cat([model(torch.tensor([row])).last_hidden_state[0] for row in rows])
        torch.testing.assert_close(loaded.network.encoder(batch), wanted, **CLOSE)


@pytest.mark.parametrize("changes", [{"embedding_size": None}, {"rotary_value": False}, {"hidden_act": "relu"}])
def test_settings_of_roformer(tmp_path: Path, changes: dict):
    model = make("roformer", "ForSequenceClassification", **changes)
    model.save_pretrained(tmp_path / "theirs")
    loaded, batch = load_network(tmp_path / "theirs"), Ragged.of([IDS])
    with torch.no_grad():
        found = loaded.network.sequence_logits(loaded.network.encoder(batch), batch, "classify")
        torch.testing.assert_close(found, model(torch.tensor([IDS])).logits, **CLOSE)
        again = type(model).from_pretrained(saved_back(tmp_path / "theirs", tmp_path / "ours")).eval()
        torch.testing.assert_close(again(torch.tensor([IDS])).logits, found, **CLOSE)
    with pytest.raises(EverybertError, match="longer than this model's 40 positions"):
        loaded.network.encoder.check(Ragged.of([[5] * 41]))


def test_a_roformer_that_reads_from_the_left(tmp_path: Path):
    model = make("roformer", "ForCausalLM", is_decoder=True)
    model.save_pretrained(tmp_path)
    network = load_network(tmp_path).network
    with torch.no_grad():
        found = network.mlm_logits(network.encoder(Ragged.of([IDS])))
        torch.testing.assert_close(found, model(torch.tensor([IDS])).logits[0], **CLOSE)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────

REFUSED = [
    ("nomic-bert-2048", {"moe_every_n_layers": 2}, "moe_every_n_layers 2"),
    ("nomic-bert-2048", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor"),
    ("nomic-bert-2048", {"prenorm": True}, "prenorm"),
    ("nomic-bert-2048", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
    ("nomic-bert-2048", {"head_dim": 32}, "head_dim 32"),
    ("gte-multilingual-base", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ("gte-multilingual-base", {"logn_attention_scale": True}, "logn_attention_scale"),
    ("gte-multilingual-base", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ("gte-multilingual-base", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'linear'"),
    ("gte-multilingual-base", {"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
    ("gte-multilingual-base", {"rope_parameters": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "'ntk'"),
    ("gte-multilingual-base", {"rope_parameters": "yarn"}, "'yarn'"),
    ("jina-bert-base", {"feed_forward_type": "original"}, "feed_forward_type"),
    ("jina-embeddings-v3", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("eurobert-210m", {"attention_bias": True}, "attention_bias True"),
    ("eurobert-210m", {"mlp_bias": True}, "mlp_bias True"),
    ("eurobert-210m", {"num_key_value_heads": 5}, "12 is not a multiple of key_value_heads 5"),
    ("eurobert-210m", {"num_key_value_heads": 0}, "12 is not a multiple of key_value_heads 0"),
    ("eurobert-210m", {"head_dim": 32}, "head_dim 32"),
    ("eurobert-210m", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "'llama3'"),
    ("eurobert-210m", {"classifier_pooling": "last"}, "one of cls, mean, late"),
    ("esm2-8m", {"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
    ("esm2-8m", {"position_embedding_type": None}, "position_embedding_type None"),
    ("esm2-8m", {"is_folding_model": True}, "is_folding_model"),
    ("esm2-8m", {"mask_token_id": None}, "mask_token_id must be a whole number"),
    ("esm2-8m", {"is_decoder": True}, "no left-to-right esm"),
]


@pytest.mark.parametrize(("name", "change", "why"), REFUSED)
def test_settings_that_are_refused(name: str, change: dict, why: str):
    raw, _ = config_json.write(PRESETS[name])
    assert config_json.read(raw) == PRESETS[name]
    with pytest.raises(EverybertError, match=why):
        config_json.read(raw | change)


def test_jinas_model_of_code_is_refused(tmp_path: Path):
    """Its queries and keys are normalised, and its tensors have other names."""
    jina_folder(tmp_path / "code")
    rewrite(tmp_path / "code", rename=lambda name: name.replace("attention.output.LayerNorm", "layer_norm_1"))
    with pytest.raises(EverybertError, match="the weights lack"):
        load_network(tmp_path / "code")
