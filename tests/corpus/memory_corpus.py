"""A corpus in memory with the attributes of `everybert.corpus.shards.Corpus`, for the tests beside it."""

import numpy as np

from everybert.corpus.shards import ExampleLayout, offsets, ranges

SPECIALS = 5  # [PAD] [UNK] [CLS] [SEP] [MASK]


class MemoryCorpus:
    def __init__(self, documents, languages=None, names=(), vocab_size=1000, seed=0):
        """`documents` lists, for each document, the lengths of its sentences."""
        lengths = [n for document in documents for n in document]
        self.document_sentences = offsets(np.array([len(d) for d in documents], dtype=np.int64))
        self.sentence_offsets = offsets(np.array(lengths, dtype=np.int64))
        self.document_language = None if languages is None else np.array(languages, dtype=np.uint8)
        self.languages = tuple(names)
        self.documents, self.sentences = len(documents), len(lengths)
        self.token_count = int(self.sentence_offsets[-1])
        rng = np.random.default_rng(seed)
        self.ids = rng.integers(SPECIALS, vocab_size, self.token_count).astype(np.uint16)
        self.vocab_size = vocab_size
        self.phrases = None

    def gather(self, starts, stops):
        return self.ids[ranges(starts, stops - starts)]

    def unigram(self):
        return np.bincount(self.ids, minlength=self.vocab_size)

    def collocations(self):
        return self.phrases


def random_corpus(tokens=100_000, seed=0, sentence=24, sentences=20, **kwargs):
    """Documents of about so many sentences of about so many tokens."""
    rng = np.random.default_rng(seed)
    documents, total = [], 0
    while total < tokens:
        document = rng.geometric(1 / sentence, rng.geometric(1 / sentences)).tolist()
        documents.append(document)
        total += sum(document)
    return MemoryCorpus(documents, seed=seed, **kwargs)


def layout(vocab_size=1000, continues=0.3, seed=0, **kwargs):
    """BERT's layout over a made-up vocabulary, some of whose pieces continue words."""
    special = np.arange(vocab_size) < SPECIALS
    pieces = (np.random.default_rng(seed).random(vocab_size) < continues) & ~special
    return ExampleLayout(2, 3, 0, 4, vocab_size, special, pieces, **kwargs)
