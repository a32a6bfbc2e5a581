"""Write a tiny checkpoint in the form of Google's BERT releases, with TensorFlow itself (not needed by the tests).

pip install tensorflow-cpu && python tests/contrib/data/make_checkpoint.py
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "google-bert"
CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 4,
    "initializer_range": 0.02,
    "intermediate_size": 6,
    "max_position_embeddings": 9,
    "num_attention_heads": 2,
    "num_hidden_layers": 11,
    "type_vocab_size": 2,
    "vocab_size": 13,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The variables of a BERT pre-training checkpoint."""
    H, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]

    def dense(at: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{at}/kernel": (rows, columns), f"{at}/bias": (columns,)}

    def norm(at: str) -> dict[str, tuple[int, ...]]:
        return {f"{at}/LayerNorm/gamma": (H,), f"{at}/LayerNorm/beta": (H,)}

    found = {
        "bert/embeddings/word_embeddings": (CONFIG["vocab_size"], H),
        "bert/embeddings/position_embeddings": (CONFIG["max_position_embeddings"], H),
        "bert/embeddings/token_type_embeddings": (CONFIG["type_vocab_size"], H),
        **norm("bert/embeddings"),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"bert/encoder/layer_{i}"
        for part in ("query", "key", "value"):
            found |= dense(f"{at}/attention/self/{part}", H, H)
        found |= dense(f"{at}/attention/output/dense", H, H) | norm(f"{at}/attention/output")
        found |= dense(f"{at}/intermediate/dense", H, inner)
        found |= dense(f"{at}/output/dense", inner, H) | norm(f"{at}/output")
    found |= dense("bert/pooler/dense", H, H) | dense("cls/predictions/transform/dense", H, H)
    found |= norm("cls/predictions/transform") | {"cls/predictions/output_bias": (CONFIG["vocab_size"],)}
    return found | {"cls/seq_relationship/output_weights": (2, H), "cls/seq_relationship/output_bias": (2,)}


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What the variable of that name holds: random, but anyone's to recompute."""
    return np.random.RandomState(zlib.crc32(name.encode())).randn(*shape).astype(np.float32)


def main() -> None:
    """Save the variables, two optimiser slots and the step, as the pre-training script did."""
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    HERE.mkdir(exist_ok=True)
    (HERE / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    everything = {name: value(name, shape) for name, shape in shapes().items()}
    for slot in ("adam_m", "adam_v"):
        everything[f"bert/embeddings/LayerNorm/beta/{slot}"] = np.ones(4, np.float32)
    variables = [tf.get_variable(name, initializer=tf.constant(array)) for name, array in everything.items()]
    variables.append(tf.get_variable("global_step", initializer=tf.constant(7, tf.int64)))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        saver = tf.train.Saver(variables)
        saver.save(session, str(HERE / "bert_model.ckpt"), write_meta_graph=False, write_state=False)


if __name__ == "__main__":
    main()
