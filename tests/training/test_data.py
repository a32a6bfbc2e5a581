"""The batches of a step are the same for every number of workers and ranks, and after every restart."""

import shutil

import pytest
import torch
from toy import tiny_recipe

from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer
from everybert.training.data import Place, RunContext
from everybert.training.distributed import World


def setting(folder, recipe, rank=0, ranks=1):
    found = Corpus.open(folder)
    tokenizer = Tokenizer.load(found.tokenizer_path)
    layout = ExampleLayout.of(tokenizer)
    return RunContext(recipe, folder, found, tokenizer, layout, torch.device("cpu"), World(rank, ranks))


def feed(folder, rank=0, ranks=1, **run):
    phases = [{"share": 0.5}, {"share": 0.5, "length": 16}]
    recipe = tiny_recipe(steps=12, batch__tokens=[256, 1024], mask__rate=[0.3, 0.1], phase=phases, **run)
    return setting(folder, recipe, rank, ranks)


def contents(steps):
    """Per step: {pack number: (tokens, masked places, draws)}, and where the data stood after it."""

    def lists(batch):
        return batch.tokens_T.tolist(), batch.targets.mask_index_M.tolist(), batch.targets.draw_M.tolist()

    return [({item.place.number: lists(item.batch) for item in step.items}, step.place) for step in steps]


@pytest.fixture(scope="module")
def straight(corpus):
    return contents(feed(corpus).steps(0, 12, Place()))


def test_steps_differ(straight):
    assert len(straight) == 12
    assert len({str(packs) for packs, _ in straight}) == 12
    sizes = [len(packs) for packs, _ in straight]
    assert sizes[0] == 1 and sizes[5] == 4  # the ramp from one pack a step to four
    assert straight[5][1].phase == 0 and straight[6][1].phase == 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_do_not_matter(corpus, straight, workers):
    assert contents(feed(corpus, run__workers=workers).steps(0, 12, Place())) == straight


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_packs(corpus, straight, ranks):
    parts = [contents(feed(corpus, rank=r, ranks=ranks).steps(0, 12, Place())) for r in range(ranks)]
    for step, (packs, _) in enumerate(straight):
        shared = [part[step][0] for part in parts]
        assert {n: p for share in shared for n, p in share.items()} == packs
        assert sum(map(len, shared)) == len(packs)


@pytest.mark.parametrize("step", [1, 4, 6, 9])
def test_resumes_at_any_step(corpus, straight, step):
    place = straight[step - 1][1]
    assert contents(feed(corpus).steps(step, 12, place)) == straight[step:]
    rank_one = contents(feed(corpus, rank=1, ranks=2).steps(step, 12, place))
    assert [p for p, _ in rank_one] == [{n: v for n, v in p.items() if n % 2} for p, _ in straight[step:]]


def test_span_boundaries_stand_outside_their_span(corpus):
    recipe = tiny_recipe(examples__kind="full", mask={"strategy": "span", "boundary": True})
    step = next(setting(corpus, recipe).steps(0, 1, Place()))
    batch = step.items[0].batch
    targets = batch.targets
    masked = set(targets.mask_index_M.tolist())
    columns = (targets.mask_index_M, targets.span_left_M, targets.span_right_M, targets.span_place_M)
    for index, left, right, place in zip(*(x.tolist() for x in columns)):
        assert left < index < right and place == index - left
        assert left not in masked and right not in masked
        assert batch.sequence_T[left] == batch.sequence_T[index] == batch.sequence_T[right]


def test_filled_batches_have_one_size_and_the_same_text(corpus):
    plain, filled = (next(feed(corpus, run__compile=fill).steps(5, 12, Place())) for fill in (False, True))
    assert {len(item.batch.tokens_T) for item in filled.items} == {256}
    for one, two in zip(plain.items, filled.items):
        assert torch.equal(two.batch.tokens_T[: one.counts[2]], one.batch.tokens_T)
        assert int(two.batch.targets.real) == one.counts[2] and one.counts == two.counts
    counts = filled.counts
    assert counts.tolist()[2] == sum(item.counts[2] for item in filled.items)
    assert all(batch.targets.tokens == counts[2] for _, batch in filled.batches(counts))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_changed_shard_is_one_line(corpus, tmp_path, workers):
    shutil.copytree(corpus, tmp_path / "c")
    (file,) = (tmp_path / "c/shards").glob("train*.tokens.bin")
    file.write_bytes(file.read_bytes()[::-1])
    steps = feed(tmp_path / "c", run__workers=workers).steps(0, 2, Place())
    with pytest.raises(EverybertError, match=r"^\S*tokens\.bin was changed or cut short: build the corpus again$"):
        next(steps)
