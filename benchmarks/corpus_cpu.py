"""Speed of corpus building on two cores: everybert, BERT's original script, datasets.map + group_texts.

    python benchmarks/corpus_cpu.py [--text FILE] [--megabytes 20] [--rounds 3]

All run in interleaved rounds on the same text with the same WordPiece vocabulary; the table has the median round.
everybert reads, removes duplicates, splits sentences, tokenizes and writes shards; masks are drawn later, with the
batches. BERT's approach (our reimplementation in pretraining_data.py, one process per half of the text) gets text whose
sentences are already split, and writes masked instances. datasets tokenizes lines with the same tokenizers library and
groups them into blocks of 512, in two processes. Without --text, the text is generated.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pretraining_data
from rich.console import Console
from rich.table import Table
from tokenizers import BertWordPieceTokenizer

from everybert.corpus.build import build_corpus
from everybert.text.readers import read_documents
from everybert.text.sentences import split_sentences
from everybert.text.tokenizer import Tokenizer

CORES, BLOCK = 2, 512


def invented(megabytes: float) -> str:
    """Sentences of generated words whose frequencies follow Zipf's law, some with punctuation."""
    rng = np.random.default_rng(0)
    syllables = np.array([a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er")])
    words = ["".join(rng.choice(syllables, n)) for n in rng.integers(1, 5, 60_000)]
    chances = 1 / np.arange(1, len(words) + 1)
    chances /= chances.sum()
    documents, size = [], 0
    while size < megabytes * 1e6:
        lines = []
        for _ in range(rng.integers(2, 30)):
            sentence = [words[i] for i in rng.choice(len(words), rng.integers(5, 35), p=chances)]
            sentence[rng.integers(len(sentence) - 1)] += ","
            lines.append(" ".join(sentence).capitalize() + ".")
        documents.append(" ".join(lines))
        size += len(documents[-1])
    return "\n\n".join(documents)


def cut(text: Path, megabytes: float) -> str:
    """Whole documents from the start of a file."""
    documents, size = [], 0
    for document in read_documents(text):
        documents.append(document)
        size += len(document.encode())
        if size >= megabytes * 1e6:
            break
    return "\n\n".join(documents)


def everybert(work: Path) -> int:
    out = work / "corpus"
    shutil.rmtree(out, ignore_errors=True)
    return build_corpus(work / "text.txt", work / "tokenizer", out, workers=CORES)["counts"]["tokens"]


def first_script(work: Path) -> int:
    vocabulary = Tokenizer.load(work / "tokenizer").vocab()
    with multiprocessing.get_context("spawn").Pool(CORES) as pool:
        halves = [(work / f"half{n}.txt", vocabulary, work / f"half{n}.out") for n in range(CORES)]
        return sum(pool.starmap(pretraining_data.create, halves))


def datasets_map(work: Path) -> int:
    import datasets

    datasets.disable_progress_bars()
    cache = work / "datasets"
    shutil.rmtree(cache, ignore_errors=True)
    lines = datasets.Dataset.from_text(str(work / "text.txt"), cache_dir=str(cache), num_proc=1)
    backend = Tokenizer.load(work / "tokenizer")

    def tokenize(batch):
        ids = backend.ids_batch([line for line in batch["text"] if line.strip()])
        return {"input_ids": ids, "attention_mask": [[1] * len(some) for some in ids]}

    def group_texts(batch):
        joined = {name: list(chain.from_iterable(lists)) for name, lists in batch.items()}
        total = len(joined["input_ids"]) // BLOCK * BLOCK
        return {name: [all_[i : i + BLOCK] for i in range(0, total, BLOCK)] for name, all_ in joined.items()}

    tokens = lines.map(tokenize, batched=True, num_proc=CORES, remove_columns=["text"])
    return tokens.map(group_texts, batched=True, num_proc=CORES).num_rows * BLOCK


def prepare(work: Path, text: str) -> None:
    """Write the text, its halves with one sentence per line, and a tokenizer trained on it."""
    (work / "text.txt").write_text(text, "utf-8")
    documents = text.split("\n\n")
    for n in range(CORES):
        lines = ["\n".join(s for line in d.split("\n") for s in split_sentences(line)) for d in documents[n::CORES]]
        (work / f"half{n}.txt").write_text("\n\n".join(lines), "utf-8")
    backend = BertWordPieceTokenizer(lowercase=True)
    backend.train_from_iterator(documents, vocab_size=30_000, show_progress=False)
    Tokenizer(backend._tokenizer).save(work / "tokenizer")


def measure(contenders: dict[str, Callable[[Path], int]], work: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Median wall time and processor time; the latter depends less on other load."""
    clock: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    tokens = {}
    for _ in range(rounds):
        for name, run in contenders.items():
            started, used = time.perf_counter(), processor_seconds()
            tokens[name] = run(work)
            clock[name].append(time.perf_counter() - started)
            busy[name].append(processor_seconds() - used)
    median = statistics.median
    return {
        name: {"seconds": median(clock[name]), "cpu_seconds": median(busy[name]), "tokens": tokens[name]}
        for name in contenders
    }


def processor_seconds() -> float:
    """Processor time of this process and its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, help="text file, blank lines between documents")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # two processes, two cores
    contenders = {
        "everybert corpus build": everybert,
        "BERT's original script (reimplemented)": first_script,
        "datasets.map + group_texts": datasets_map,
    }
    try:
        import datasets  # noqa: F401
    except ImportError:
        print("datasets is not installed and skipped (pip install datasets)")
        del contenders["datasets.map + group_texts"]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        text = cut(options.text, options.megabytes) if options.text else invented(options.megabytes)
        prepare(work, text)
        results = measure(contenders, work, options.rounds)
    megabytes = len(text.encode()) / 1e6
    if options.json:
        print(json.dumps({"megabytes": megabytes, "cores": CORES, "results": results}))
        return
    ours = results["everybert corpus build"]
    columns = ("", "seconds", "CPU s", "MB/s", "tokens/s", "everybert is", "by CPU")
    table = Table(*columns, title=f"{megabytes:.1f} MB of text, {CORES} cores")
    for name, result in results.items():
        ratios = [f"{result[key] / ours[key]:.1f}× as fast" for key in ("seconds", "cpu_seconds")]
        seconds = result["seconds"]
        rates = (f"{megabytes / seconds:.2f}", f"{result['tokens'] / seconds:,.0f}")
        own = result is ours
        table.add_row(name, f"{seconds:.1f}", f"{result['cpu_seconds']:.1f}", *rates, *([] if own else ratios))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
