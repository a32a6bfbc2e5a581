"""Static against contextual vectors: the same linear probe on two tables and on every layer, and a picture.

    python benchmarks/static_contextual.py --corpus CORPUS --tag train.conllu,dev.conllu --classify train.tsv,dev.tsv
        [--model everybert-small] [--tokens 10000000] [--most 20000] [--picture static.svg] [--json]

CORPUS is a folder of `everybert corpus build` with the tokenizer of the model. Rows:

word2vec    a row per token, from the same text: the shifted positive PMI of tokens at most five apart, reduced by a
            truncated SVD to the width of the model, which is what skip-gram with negative sampling factorises
            (Levy and Goldberg 2014)
table       the model's own token embeddings, before positions and context
embeddings, layer 1 …    the model's hidden states

Words (tag) are their first token, texts (classify) the mean over their tokens; the probe is a logistic regression on
standardised vectors (contrib/probe_layers.py), scored on held-out examples.

Legend: V vocabulary, H hidden, N words or texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "contrib"))

import numpy as np
from probe_layers import fit, probe_layers, reading
from scipy.sparse import coo_matrix, csr_matrix
from sklearn.decomposition import TruncatedSVD

from everybert.corpus.shards import Corpus
from everybert.errors import EverybertError
from everybert.inference.model import Model, load
from everybert.tasks import TASKS

APART, NEGATIVES, CHUNK = 5, 5, 1 << 20
"""Distance of tokens that count as neighbours; word2vec's k, the shift ln k; tokens that are counted at once."""


def word2vec(ids_T: np.ndarray, size: int, width: int) -> np.ndarray:
    """(V, H): shifted positive PMI of neighbouring tokens, reduced by a truncated SVD; rows by √Σ."""
    counts_VV = csr_matrix((size, size))
    for start in range(0, len(ids_T), CHUNK):
        part = ids_T[start : start + CHUNK + APART].astype(np.int64)
        pairs = [(part[:-gap], part[gap:]) for gap in range(1, APART + 1)]
        left, right = (np.concatenate(side) for side in zip(*pairs))
        found = coo_matrix((np.ones(len(left), np.float32), (left, right)), (size, size)).tocsr()
        counts_VV = counts_VV + found + found.T
    total, rows = counts_VV.sum(), np.asarray(counts_VV.sum(1)).ravel()
    pmi = counts_VV.tocoo()
    value = np.log(pmi.data * total / (rows[pmi.row] * rows[pmi.col])) - np.log(NEGATIVES)
    kept = value > 0
    positive_VV = csr_matrix((value[kept], (pmi.row[kept], pmi.col[kept])), (size, size))
    svd = TruncatedSVD(width, n_iter=4, random_state=0)
    return (svd.fit_transform(positive_VV) / np.sqrt(svd.singular_values_ + 1e-9)).astype(np.float32)


def static_features(
    model: Model, table_VH: np.ndarray, data: tuple[Sequence, Sequence], most: int
) -> tuple[np.ndarray, list[str]]:
    """(N, H) and N labels: rows of a table, for the words or texts that the layers are probed on."""
    vectors, labels = [], []
    for given, target in zip(*data):
        ids, first, own = reading(model.tokenizer, given, target, model.config.max_positions)
        vectors.append(table_VH[ids].mean(0, keepdims=True) if first is None else table_VH[np.array(ids)[first]])
        labels += own
        if len(labels) >= most:
            break
    return np.concatenate(vectors)[:most], labels[:most]


def compare(model: Model, tables: dict[str, np.ndarray], task: str, files: str, most: int) -> dict[str, float]:
    """Feature → accuracy on held-out words or texts."""
    train, comma, dev = files.partition(",")
    if not comma:
        raise EverybertError(f"--{task} {files}: write TRAIN,DEV")
    examples = [TASKS[task].read(path, None) for path in (train, dev)]
    first, second = ((found.inputs, found.targets) for found in examples)
    scores = {}
    for name, table_VH in tables.items():
        (x, y), (x_dev, y_dev) = (static_features(model, table_VH, data, most) for data in (first, second))
        scores[name] = fit(x, y, x_dev, y_dev)
    layers = probe_layers(model.network, model.tokenizer, first, second, most)
    names = ["embeddings", *(f"layer {i}" for i in range(1, len(layers.scores)))]
    return {"majority": layers.majority, **scores, **dict(zip(names, layers.scores))}


def picture(table: dict[str, dict[str, float]]) -> str:
    """The table as an SVG: a line per task, static features on the left."""
    names = [name for name in next(iter(table.values())) if name != "majority"]
    low = min(row[name] for row in table.values() for name in names) - 0.02
    high = max(row[name] for row in table.values() for name in names) + 0.02
    place = {name: 60 + 72 * i for i, name in enumerate(names)}
    width = 72 * len(names) + 90

    def y(value: float) -> float:
        return 260 - 220 * (value - low) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 310" font-family="sans-serif" font-size="12">'
    ]
    out += ['<rect width="100%" height="100%" fill="#ffffff"/>']
    for (task, row), colour in zip(table.items(), ("#2b4dbd", "#a3460a")):
        points = " ".join(f"{place[name]},{y(row[name]):.1f}" for name in names)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for name in names:
            x, at = place[name], y(row[name])
            out.append(f'<circle cx="{x}" cy="{at:.1f}" r="3" fill="{colour}"/>')
            out.append(
                f'<text x="{x}" y="{at - 8:.1f}" text-anchor="middle" fill="{colour}">{100 * row[name]:.1f}</text>'
            )
        last = names[-1]
        out.append(f'<text x="{place[last] + 12}" y="{y(row[last]) + 4:.1f}" fill="{colour}">{task}</text>')
    out += [f'<text x="{x}" y="290" text-anchor="middle" fill="#333">{name}</text>' for name, x in place.items()]
    return "\n".join([*out, "</svg>"]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tag", required=True, metavar="TRAIN,DEV", help="a treebank in CoNLL-U: parts of speech")
    parser.add_argument("--classify", required=True, metavar="TRAIN,DEV", help="labelled texts")
    parser.add_argument("--model", default="everybert-small")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens of the corpus that word2vec reads")
    parser.add_argument("--most", type=int, default=20_000, help="words or texts to read of each file")
    parser.add_argument("--picture", type=Path, help="an SVG to write")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        model, corpus = load(args.model), Corpus.open(args.corpus)
        corpus.check_tokenizer(model.tokenizer.digest)
        ids_T = corpus.tokens(0, min(args.tokens, corpus.token_count))
        table_VH = model.network.encoder.embeddings.token.weight.detach().float().cpu().numpy()
        tables = {"word2vec": word2vec(ids_T, model.tokenizer.size, table_VH.shape[1]), "table": table_VH}
        found: dict[str, Any] = {
            task: compare(model, tables, task, files, args.most)
            for task, files in (("tag", args.tag), ("classify", args.classify))
        }
    except EverybertError as error:
        sys.exit(f"error: {error}")
    if args.picture:
        args.picture.write_text(picture(found), encoding="utf-8")
    if args.json:
        print(json.dumps(found))
        return
    print("| features | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for name in next(iter(found.values())):
        print(f"| {name} | " + " | ".join(f"{100 * row[name]:.1f} %" for row in found.values()) + " |")


if __name__ == "__main__":
    main()
