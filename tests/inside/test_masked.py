"""Masked tokens predicted from both sides and from each alone."""

import pytest
from refusals import refuses

from everybert.inside.masked import fill_sides


def read(model, *args, **more):
    return fill_sides(model.network, model.tokenizer, *args, size=model.window, **more)


def same(guesses, candidates):
    return [(g.token, g.id, pytest.approx(g.score, abs=1e-6)) for g in guesses] == [
        (c.token, c.id, c.score) for c in candidates
    ]


def test_each_side_equals_fill_on_that_half(words):
    text = "the cat sees a [MASK] dog and eats [MASK] ."
    first, second = read(words, text, top=6)
    both = words.fill(text, top=6)
    assert same(first.both, both[0]) and same(second.both, both[1])
    assert same(first.left, words.fill("the cat sees a [MASK]", top=6)[0])
    assert same(first.right, words.fill("[MASK] dog and eats [MASK] .", top=6)[0])
    assert same(second.left, words.fill("the cat sees a [MASK] dog and eats [MASK]", top=6)[1])
    assert same(second.right, words.fill("[MASK] .", top=6)[0])


def test_two_masks_in_a_pair(words):
    a, b = "the [MASK] eats", "a dog sees [MASK] ."
    one, two = read(words, a, b, top=4)
    assert same(one.left, words.fill("the [MASK]", top=4)[0])
    assert same(two.right, words.fill("[MASK] .", top=4)[0])
    swapped = read(words, "the [MASK] eats a dog sees [MASK] .", top=4)
    assert swapped[0].both != one.both, "the pair has a separator and segments of its own"
    assert one.both != one.left


def test_the_word_that_stood_there(words):
    text = "the cat sees a [MASK] dog"
    (masked,) = read(words, text, originals=["red"], top=words.tokenizer.size)
    place = next(i for i, guess in enumerate(masked.both) if guess.token == "red")
    assert masked.original.rank == place + 1
    assert masked.original.score == pytest.approx(masked.both[place].score)
    (masked,) = read(words, text, originals=["doging"])
    assert masked.original.score is None and masked.original.pieces == ["dog", "##ing"]
    (masked,) = read(words, text, originals=[None])
    assert masked.original is None


def test_mistakes_are_one_line(words, qa):
    refuses(r"no \[MASK\]; put \[MASK\] where", read, words, "the cat")
    refuses("103 tokens, the model reads 64", read, words, "cat " * 100 + "[MASK]")
    refuses("no mlm head", read, qa, "a [MASK]")
