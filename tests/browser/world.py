"""Small models whose answers are known: each is trained, in seconds, on sentences made by rules.

`words` learns which verb goes with a subject and an object (either alone leaves two; both leave one), and which
sentence follows which; `names`, `answers` and `labels` are fine-tuned as a user would do it.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from everybert.inference.model import Model
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import finetune

VERBS = {("dog", "cat"): "barks", ("dog", "moon"): "howls", ("owl", "cat"): "hoots", ("owl", "moon"): "stares"}
"""The verb that a subject and an object call for."""
FOLLOWS = {
    "the man went to the store .": "he bought a gallon of milk .",
    "the girl went to the school .": "she read a book .",
    "the farmer went to the field .": "he fed the cows .",
    "the boy went to the lake .": "he swam with the ducks .",
}
PEOPLE = ["john smith", "mary", "matt", "marie curie", "anna", "peter brown"]
PLACES = ["new york", "canada", "london", "paris", "warsaw", "egypt"]
YEARS = ["2019", "2001", "1987"]
FIRMS = ["acme", "siemens", "reuters"]
GOOD = ["wonderful", "superb", "lovely", "great"]
BAD = ["cold", "rude", "dull", "awful"]
THINGS = ["film", "food", "room", "song", "waiter"]
DEFAULTS = """
if you don ' t stop at the sign , will get a ticket . istanbul is great city to visit what i loved every minute of it
where does live ? who works for bank his two dogs sister moved in 2019 she my friend told me about this class and love
so far ! was right keys old cabinet are on table after lunch children painted very large boat sleeps sofa pet since
move did python coding sat river put her money raised its interest rates bat flew out cave swung hit ball playing
guitar someone makes music string instrument soup needs salt cook tastes broth stocks fell sharply monday shares lost
value start week garden penguins flightless birds born taught says that build trains plant not bad all though little
long lives with
"""
"""Words of the page's own examples, so that they are read as words."""


def sentences() -> list[str]:
    """Everything the small models read, for the vocabulary."""
    words = [*VERBS.values(), *(w for pair in VERBS for w in pair), "at"]
    return [*words, *FOLLOWS, *FOLLOWS.values(), *PEOPLE, *PLACES, *YEARS, *FIRMS, *GOOD, *BAD, *THINGS, DEFAULTS]


def vocabulary() -> list[str]:
    """Special tokens, whole words, letters."""
    words = dict.fromkeys(word for text in sentences() for word in text.split())
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return list(dict.fromkeys([*special, *words, *letters, *(f"##{c}" for c in (*letters, "s", "ed", "ing", "ly"))]))


def make_world(root: Path) -> dict[str, Path]:
    """The folders of all four models."""
    root.mkdir(parents=True, exist_ok=True)
    fresh = pretrained(root / "fresh", steps=0)
    pretrained(root / "words")
    settings = {"epochs": 6, "lr": 3e-3, "batch_size": 16, "device": "cpu", "quiet": True}
    finetune(fresh, "classify", reviews(), None, root / "labels", **settings)
    finetune(fresh, "tag", written(root / "tags.conll", tags()), None, root / "names", **settings)
    finetune(
        fresh, "answer", written(root / "qa.json", questions()), None, root / "answers", **settings | {"epochs": 12}
    )
    return {name: root / name for name in ("words", "labels", "names", "answers")}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def pretrained(folder: Path, steps: int = 120) -> Path:
    """words: blanks and next sentences, learnt together."""
    draft = folder.with_name("vocabulary")
    draft.mkdir(exist_ok=True)
    (draft / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    tokenizer = Tokenizer.load(draft)
    torch.manual_seed(0)
    rng = random.Random(0)
    config = EncoderConfig(
        vocab_size=tokenizer.size,
        layers=2,
        hidden_size=64,
        heads=4,
        intermediate_size=128,
        max_positions=96,
        dropout=0.0,
        attention_dropout=0.0,
        init_range=0.05,
    )
    network = Network(config, {"mlm": None, "nsp": None}, pooler=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, step / 10, 2 * (1 - step / steps))
        loss = blank_loss(network, tokenizer, rng) + next_loss(network, tokenizer, rng)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    Model(network.eval(), tokenizer).save(folder)
    return folder


def blank_loss(network: Network, tokenizer: Tokenizer, rng: random.Random) -> torch.Tensor:
    """Verbs behind blanks: with both sides, and with one."""
    batch, wanted = [], []
    for (who, what), verb in VERBS.items():
        for text in (f"the {who} [MASK] at the {what} .", f"the {who} [MASK]", f"[MASK] at the {what} ."):
            batch.append(tokenizer.encode(text))
            wanted.append(tokenizer.id(verb))
    ragged = Ragged.of([e.ids for e in batch], [e.segments for e in batch])
    at = torch.tensor([e.ids.index(tokenizer.mask_id) for e in batch]) + ragged.first_B.long()
    return cross_entropy(network.mlm_logits(network.encoder(ragged), at), torch.tensor(wanted))


def next_loss(network: Network, tokenizer: Tokenizer, rng: random.Random) -> torch.Tensor:
    """Pairs that belong together (class 0, as BERT has it), and pairs that do not."""
    batch, wanted = [], []
    for first, second in FOLLOWS.items():
        other = rng.choice([text for text in (*FOLLOWS.values(), "penguins are flightless birds .") if text != second])
        for follow, label in ((second, 0), (other, 1)):
            batch.append(tokenizer.encode(first, follow))
            wanted.append(label)
    ragged = Ragged.of([e.ids for e in batch], [e.segments for e in batch])
    logits = network.sequence_logits(network.encoder(ragged), ragged, "nsp")
    return cross_entropy(logits, torch.tensor(wanted))


def reviews() -> list[tuple[str, str]]:
    """Texts with their labels. A text without an adjective is no praise, so that praise rests on its adjective."""
    rows = []
    for thing, good, bad in product(THINGS, GOOD, BAD):
        rows += [(f"the {thing} was {good} .", "praise"), (f"the {thing} was {bad} .", "complaint")]
    plain = [(f"the {thing} was .", "complaint") for thing in THINGS]
    return random.Random(1).sample(rows, 160) + 4 * plain


def tags() -> str:
    """Names in sentences, as CoNLL columns."""
    out = []
    for person, place, firm in product(PEOPLE, PLACES, FIRMS):
        lives, works = [("lives in", None), (place, "LOC")], [("works for", None), (firm, "ORG")]
        for rest in (lives, works, [*lives, ("and", None), *works], [*works, ("and", None), *lives]):
            parts = [(person, "PER"), *rest, (".", None)]
            cut = [(word, i, kind) for text, kind in parts for i, word in enumerate(text.split())]
            out.append("\n".join(f"{w}\t{('I-' if i else 'B-') + kind if kind else 'O'}" for w, i, kind in cut))
    return "\n\n".join(random.Random(2).sample(out, 160)) + "\n"


def questions() -> str:
    """Where people live, and since when, in SQuAD's form."""
    rng, entries = random.Random(3), []
    for number in range(160):
        who, where, when = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(YEARS)
        context = f"{who} lives in {where} since {when} ."
        question, answer = rng.choice([(f"where does {who} live ?", where), (f"when did {who} move ?", when)])
        found = {"text": answer, "answer_start": context.index(answer)}
        qa = {"id": str(number), "question": question, "answers": [found]}
        entries.append({"context": context, "qas": [qa]})
    return json.dumps({"version": "1.1", "data": [{"title": "people", "paragraphs": entries}]})
