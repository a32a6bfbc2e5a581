"""What a config.json asks for is done as transformers does it, or refused: each field of each family, one by one.

The weights stay as they are; a field gets another value; transformers reads the folder too. (That every class of every
family loads, computes and is saved alike: tests/store/test_huggingface.py. Gradients: tests/model/test_parity.py.)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_huggingface import outputs  # noqa: E402
from tiny_models import STEMS, make  # noqa: E402

from everybert.errors import EverybertError  # noqa: E402
from everybert.model.ragged import Ragged  # noqa: E402
from everybert.store.huggingface import load_network  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
OTHER: dict[str, list[Any]] = {
    "hidden_act": ["relu", "gelu_new", "silu", "mish", "tanh"],
    "hidden_activation": ["relu", "gelu_new", "mish"],
    "activation": ["relu", "gelu_new", "mish"],
    "classifier_activation": ["relu", "gelu_new", "tanh"],
    "classifier_pooling": ["mean", "cls"],
    "position_embedding_type": ["absolute", "relative_key", "relative_key_query"],
    "pooler_hidden_act": ["relu", "gelu", "tanh"],
    "summary_activation": ["relu", "gelu"],
    "summary_type": ["last", "first", "mean"],
    "norm_rel_ebd": ["none", "layer_norm", "layer_norm|x"],
    "pos_att_type": [["c2p"], ["p2c"], [], "c2p|p2c"],
    "attention_window": [4, [2, 2], [8, 4]],
    "layer_types": [["full_attention"] * 4, ["sliding_attention"] * 4],
    "pad_token_id": [0, 3],  # which are not in the ids that are read
    "problem_type": ["regression", "multi_label_classification"],
}
"""Fields with values of their own; others are negated, incremented or multiplied."""
SKIPPED = ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "id2label", "label2id")
"""What names the class and its labels: tests/store/test_bad_folders.py."""
SUFFIXES = ("ForMaskedLM", "ForSequenceClassification")
FAST = [("bert", "ForMaskedLM"), ("albert", "ForSequenceClassification"), ("deberta-v2", "ForMaskedLM")]


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values of a field."""
    if name in OTHER:
        yield from OTHER[name]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(0, value - 1))
    elif isinstance(value, float):
        yield from (value * 3 + 0.01, 0.5)
    elif value is None:
        yield from (1, 0.5, True)


def cases() -> list[Any]:
    every = [(kind, suffix) for kind in STEMS for suffix in SUFFIXES]
    return [pytest.param(*one, marks=[] if one in FAST else [pytest.mark.slow]) for one in every]


def refused(call: Any, *given: Any, **more: Any) -> Any:
    """The value of a call, or None if it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(*given, **more)
    except Exception:  # transformers raises many types
        return None


@pytest.mark.parametrize(("kind", "suffix"), cases())
def test_a_field_is_obeyed_or_refused(kind: str, suffix: str, tmp_path: Path):
    model = make(kind, suffix)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wrong, read = [], 0
    for name, value in config.items():
        for other in others(name, value) if name not in SKIPPED else ():
            (tmp_path / "config.json").write_text(json.dumps(config | {name: other}))
            try:
                loaded = load_network(tmp_path)
            except EverybertError:
                continue
            theirs, lacks = refused(type(model).from_pretrained, tmp_path, output_loading_info=True) or (0, {})
            if not theirs or any(lacks.values()):  # transformers does not take it, or not with these weights
                continue
            pair = refused(outputs, loaded.network, theirs.eval(), suffix)
            if pair is None:  # by transformers, not by us
                loaded.network.encoder(Ragged.of([[4, 17, 2]]))
                continue
            read += 1
            if not torch.allclose(*pair, atol=1e-5, rtol=1e-4):
                wrong.append((name, value, other))
    assert not wrong and read > 10, (wrong, read)
