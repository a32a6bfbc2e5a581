"""config.json: every preset there and back, the defaults of transformers, and old formats."""

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from tiny_models import STEMS  # noqa: E402

from everybert.errors import EverybertError  # noqa: E402
from everybert.model.config import PRESETS  # noqa: E402
from everybert.store import config_json  # noqa: E402

KINDS = list(STEMS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json_and_mean_the_same_there(name: str):
    config = PRESETS[name]
    raw, ours_alone = config_json.write(config)
    assert config_json.read(json.loads(json.dumps(raw))) == config and not ours_alone
    kind = raw.pop("model_type")
    theirs = transformers.AutoConfig.for_model(kind, **raw).to_dict()
    assert config_json.read(json.loads(json.dumps(theirs))) == config


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("deberta-v2", "esm")])  # other positions there
def test_an_empty_config_means_what_it_means_there(kind: str):
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    assert config_json.read({"model_type": kind}) == config_json.read(json.loads(json.dumps(theirs)))


OLD_MODERNBERT = {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 300.0}


def test_both_generations_of_modernbert_configs():
    base = {
        "model_type": "modernbert",
        "num_hidden_layers": 4,
        "local_attention": 10,
        "vocab_size": 60,
        "pad_token_id": 0,
    }
    old = config_json.read(base | OLD_MODERNBERT)
    assert old.windows == (None, 5, None, 5)
    assert (old.rotary_theta, old.rotary_theta_local) == (5000.0, 300.0)
    new = transformers.ModernBertConfig(
        **{k: v for k, v in (base | OLD_MODERNBERT).items() if k != "model_type"}
    ).to_dict()
    assert "rope_parameters" in new
    assert config_json.read(json.loads(json.dumps({k: v for k, v in new.items() if k not in OLD_MODERNBERT}))) == old
    assert config_json.read(base | OLD_MODERNBERT | {"local_rope_theta": None}).rotary_theta_local == 5000.0


def test_longformer_windows_count_one_side():
    base = {"model_type": "longformer", "num_hidden_layers": 2, "max_position_embeddings": 42}
    assert config_json.read(base | {"attention_window": 8}).windows == (4, 4)
    config = config_json.read(base | {"attention_window": [4, 16]})
    assert config.windows == (2, 8) and config.max_positions == 40 and config.position_offset == 2
    for bad in (7, 0, [4, 3], "8", [4]):
        with pytest.raises(EverybertError):
            config_json.read(base | {"attention_window": bad})


def test_a_configuration_without_a_place_is_refused(tmp_path: Path):
    config = PRESETS["bert-tiny"].replace(norm="pre")
    with pytest.raises(EverybertError, match="bert layout has no place for norm = 'pre'"):
        config_json.write(config)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size 3"),
        ({"share_att_key": False}, "share_att_key"),
        ({"pos_att_type": "c2p"}, "only c2p and p2c together"),
        ({"relative_attention": None}, "relative_attention"),
    ],
)
def test_unsupported_settings_of_deberta_are_refused(change: dict, why: str):
    raw, _ = config_json.write(PRESETS["deberta-v3-base"])
    assert config_json.read(raw | {"pos_att_type": "p2c|c2p"}) == PRESETS["deberta-v3-base"]
    with pytest.raises(EverybertError, match=why):
        config_json.read(raw | change)
