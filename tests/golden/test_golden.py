"""What the library computes is what it computed when data/outputs.json was recorded (see record.py).

Text, whole numbers and hashes of batches are compared exactly. Floats may differ by 1e-6 (relative or absolute) on
the recorded kind of processor with the recorded torch, by 1e-4 elsewhere; hashes of weights are compared there only.
Sentences meant for people (PROSE) may be reworded freely. One group: `pytest tests/golden -k pretraining`.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import record

RECORDED = json.loads(record.OUTPUTS.read_text())
SAME = RECORDED["machine"] == record.machine()
CLOSE = 1e-6 if SAME else 1e-4
SLOW = {"pretraining_kinds", "finetuning_options", "finetuning_modes"}
PROSE = {"message", "notes", "words", "advice", "remedy", "examples", "target", "title", "titles", "equation"}
ON_PURPOSE = {
    "finetuning_options/tag cut": "--long cut was ignored by tag: long texts were read in windows",
    "finetuning_options/answer cut": "--long cut was ignored by answer: long texts were read in windows",
    "finetuning_options/unknown option": 'the error sent the reader to "the task\'s options", which are nowhere',
    "finetuning_options/never finite": "the guard advised fine-tuners to change a recipe's [schedule]",
    "faults/finetune regress --model bert-mlm --train sts.tsv --calibrate --out out/x": "the same error",
    "faults/finetune classify --model bert-mlm --train train.tsv --scheme BIO --out out/x": "it ended in a traceback",
    "sentence_transformers/embed none": "embed([]) had the encoder's width where a Dense layer gives another",
}
"""Entries that are wrong as recorded: a difference there is said in a warning, until it is recorded anew."""


def is_text(value):
    return isinstance(value, str) or (isinstance(value, list) and all(map(is_text, value)))


def differences(was, now, path=""):
    """What differs, one line each."""
    key = path.rpartition(".")[2]
    if key in PROSE and is_text(was) and is_text(now):
        return []
    if key == "sha256" and not SAME:
        return []
    if path.endswith((".batches.others", ".batches.count")):  # how evaluations are batched is the engine's business
        return []
