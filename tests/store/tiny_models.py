"""Tiny random models of every family, as `transformers` makes them: the oracle of the folder tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
STEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "camembert": ("Camembert", {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
    "albert": ("Albert", {"embedding_size": 8, "num_hidden_groups": 2, "inner_group_num": 2, "num_hidden_layers": 4}),
    "longformer": ("Longformer", {"attention_window": [4, 8]}),
    "modernbert": (
        "ModernBert",
        {
            "num_hidden_layers": 4,
            "local_attention": 8,
            "pad_token_id": 3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "data2vec-text": ("Data2VecText", {}),
    "xlm-roberta-xl": ("XLMRobertaXL", {}),
    "mpnet": ("MPNet", {}),
    "electra": ("Electra", {"embedding_size": 8}),
    "deberta-v2": (
        "DebertaV2",
        {
            "relative_attention": True,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 8,
        },
    ),
    "ernie": ("Ernie", {"use_task_id": True}),
    "nomic_bert": ("NomicBert", {}),
    "gte": ("Gte", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 1.5}}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {}),
    "eurobert": (
        "EuroBert",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "mask_token_id": 3,
        },
    ),
    "esm": (
        "Esm",
        {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 17, "pad_token_id": 1},
    ),
    "roformer": ("RoFormer", {"embedding_size": 8, "rotary_value": True}),
    "megatron-bert": ("MegatronBert", {}),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", {}),
}
COMMON = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
FEW = ("nomic_bert", "gte", "eurobert", "esm")
"""Families without classes for questions and choices."""
CLASSES = {
    kind: (
        *(COMMON if kind not in FEW else COMMON[:-1]),
        *(("ForMultipleChoice",) if kind not in (*FEW, "jina_embeddings_v3", "roformer") else ()),
        *(("ForPreTraining",) if kind in ("bert", "albert", "megatron-bert", "ernie", "electra") else ()),
        *(("ForNextSentencePrediction",) if kind in ("bert", "megatron-bert", "ernie") else ()),
    )
    for kind in STEMS
}
EVERY = [(kind, suffix) for kind, suffixes in CLASSES.items() for suffix in suffixes]


def make(kind: str, suffix: str = "Model", seed: int = 0, **changes: Any) -> Any:
    """A random model of that class, every parameter different from its initial value."""
    import transformers

    stem, own = STEMS[kind]
    base = {k: v for k, v in SMALL.items() if kind != "distilbert" or k in ("vocab_size", "max_position_embeddings")}
    config = getattr(transformers, stem + "Config")(**{**base, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, stem + suffix)(config).eval()
    with torch.no_grad():
        for value in filter(lambda value: value.requires_grad, model.parameters()):
            value.add_(torch.randn_like(value) * 0.1)
    return model


def saved(folder: Path, kind: str, suffix: str = "Model", seed: int = 0, **changes: Any) -> Path:
    """The folder of such a model."""
    make(kind, suffix, seed, **changes).save_pretrained(folder)
    return folder
