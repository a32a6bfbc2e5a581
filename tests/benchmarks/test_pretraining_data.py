import sys
from pathlib import Path

import numpy as np
from tokenizers import BertWordPieceTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import pretraining_data

LINES = ["The café's old town, near 北京!", "  A river\tsings (3.14) over naïve hills. ", "Zq\u200b\ufffd über-straße?"]


def test_the_rewritten_first_script_finds_the_same_pieces_and_fills_its_instances(tmp_path):
    backend = BertWordPieceTokenizer(lowercase=True)
    backend.train_from_iterator([*LINES[:2], "über"], vocab_size=120, show_progress=False)
    vocabulary = backend.get_vocab()
    for line in LINES:
        pieces = [p for w in pretraining_data.basic_tokens(line) for p in pretraining_data.word_pieces(w, vocabulary)]
        assert pieces == backend.encode(line, add_special_tokens=False).tokens
    (tmp_path / "in.txt").write_text("\n\n".join("\n".join(LINES * 5) for _ in range(4)), "utf-8")
    tokens = pretraining_data.create(tmp_path / "in.txt", vocabulary, tmp_path / "out")
    assert tokens == 20 * sum(len(backend.encode(line, add_special_tokens=False)) for line in LINES)
    row = 3 * pretraining_data.MAX_LENGTH + 2 * pretraining_data.MAX_MASKED + 1
    made = np.fromfile(tmp_path / "out", np.int32).reshape(-1, row)
    assert (made[:, 0] == vocabulary["[CLS]"]).all()
    assert (made[:, : pretraining_data.MAX_LENGTH] == vocabulary["[MASK]"]).any(1).mean() > 0.9
