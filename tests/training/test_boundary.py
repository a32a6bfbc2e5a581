"""SpanBERT's boundary objective reads the two tokens around a span, and nothing of the span itself."""

import pytest
import torch
from torch.nn import functional as F
from toy import tiny_recipe

from everybert.corpus.shards import Corpus, Layout
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.text.tokenizer import Tokenizer
from everybert.training.boundary import PLACES, add_boundary, boundary_loss
from everybert.training.data import Feed, Place
from everybert.training.step import pretrain_loss


@pytest.fixture(scope="module")
def batch(corpus):
    opened = Corpus.open(corpus)
    layout = Layout.of(Tokenizer.load(opened.tokenizer_path))
    recipe = tiny_recipe(examples__kind="full", mask={"strategy": "span", "boundary": True})
    step = next(Feed(recipe, opened, layout, torch.device("cpu")).steps(0, 1, Place()))
    counts = torch.cat((step.counts, torch.tensor([step.tokens])))
    return next(step.batches(counts))[1]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "heads": 2, "intermediate_size": 64, "layers": 2, "max_positions": 64}
    made = Network(EncoderConfig(vocab_size=128, **shape), {"mlm": None}).eval()
    add_boundary(made)
    return made


def test_boundaries_stand_outside_their_span(batch):
    extra = batch.extra
    masked = set(extra["mask_index"].tolist())
    rows = zip(*(extra[n].tolist() for n in ("mask_index", "span_left", "span_right", "span_place")))
    for index, left, right, place in rows:
        assert left < index < right
        assert place == index - left
        assert left not in masked and right not in masked
        assert batch.sequence_T[left] == batch.sequence_T[index] == batch.sequence_T[right]


@torch.no_grad()
def test_the_loss_is_its_formula(batch, network):
    loss, figures = boundary_loss(network, batch)
    plain, parts = pretrain_loss(network, batch)
    assert torch.allclose(figures[:2], parts)
    x, extra, head = network.encoder(batch), batch.extra, network.heads["boundary"]
    total = 0.0
    for i, label in enumerate(extra["mask_label"].tolist()):
        place = head.place.weight[min(int(extra["span_place"][i]), PLACES - 1)]
        h = torch.cat((x[extra["span_left"][i]], x[extra["span_right"][i]], place))
        h = head.first_norm(F.gelu(head.first(h)))
        h = head.second_norm(F.gelu(head.second(h)))
        logits = network.encoder.embeddings.token.weight @ h + network.heads["mlm"].bias
        total -= float(logits.log_softmax(-1)[label])
    assert float(figures[2]) == pytest.approx(total / float(extra["masked"]), rel=1e-4)
    assert float(loss) == pytest.approx(float(plain) + float(figures[2]), rel=1e-5)
