"""Every block of code and every command in README and the documentation runs, and prints what it is said to print."""

from __future__ import annotations

import re
from pathlib import Path

import doc_notebooks as notebooks
import doc_pages as pages
import doc_world as world
import pytest
from typer.testing import CliRunner

from everybert.cli.main import COMMANDS, app

PLAIN = {"", "text", "toml", "py", "json", "output", "math", "tsv", "conll", "yaml", "dockerfile"}
"""Languages that are shown and not run."""
PAGES = [p for p in pages.pages() if p.name not in pages.ELSEWHERE]


def name_of(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


@pytest.fixture(scope="module")  # no longer: other tests want the real hub
def models(tmp_path_factory: pytest.TempPathFactory):
    with world.stand_ins(tmp_path_factory.mktemp("models")):
        yield


SAMPLED = ("01-why-context.md", "04-attention.md")
"""Lectures that `make test` runs; the others are run by `make test-slow`."""


def waits(page: Path) -> bool:
    """Whether `make test-slow` alone runs a page."""
    return page in notebooks.lectures() and page.name not in SAMPLED


RUN = [p for p in PAGES if any(b.language in ("python", *pages.SHELLS) for b in pages.blocks(p.read_text("utf-8")))]
SLOW = [p for p in PAGES if waits(p) or any(map(pages.is_slow, pages.blocks(p.read_text("utf-8"))))]


@pytest.mark.parametrize("page", [p for p in RUN if not waits(p)], ids=name_of)
def test_a_page_runs_and_prints_what_it_shows(page: Path, models: None, tmp_path: Path, whole: bool = False):
    world.write_data(tmp_path)
    wrong = pages.run(page, tmp_path, whole=whole)
    assert not wrong, "\n\n".join(wrong) + "\nIf that is as it should be: make docs-outputs"


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_a_page_runs_with_its_slow_commands(page: Path, models: None, tmp_path: Path):
    test_a_page_runs_and_prints_what_it_shows(page, models, tmp_path, whole=True)


@pytest.mark.parametrize("page", pages.pages(), ids=name_of)
def test_every_block_is_of_a_language_that_we_know(page: Path):
    for block in pages.blocks(page.read_text("utf-8")):
        assert block.language in PLAIN | {"python", *pages.SHELLS}, f"{page.name}:{block.line}: {block.language}"


ELSEWHERE = [p for p in pages.pages() if p.name in pages.ELSEWHERE]


@pytest.mark.parametrize("page", ELSEWHERE, ids=name_of)
def test_commands_for_other_machines_have_options_that_exist(page: Path):
    shells = [b for b in pages.blocks(page.read_text("utf-8")) if b.language in pages.SHELLS]
    for words in (words for block in shells for words in pages.commands(block.text)):
        if words[0] not in ("ray", "openssl"):
            pages.check(words)


@pytest.mark.parametrize("page", pages.pages(), ids=name_of)
def test_quoted_code_is_the_code_as_it_stands(page: Path):
    for block in pages.blocks(page.read_text("utf-8")):
        if "source" in block.directives:
            assert block.text == pages.quote(block.directives["source"]), f"{page.name}:{block.line}: make docs-outputs"


@pytest.mark.parametrize("page", [p for p in pages.pages() if p.name != "LOG.md"], ids=name_of)  # LOG.md is history
def test_commands_in_running_text_exist(page: Path):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`everybert (\w+)[^`]*`", text):
        assert name in COMMANDS, f"{page.name} names everybert {name}"
    for line in re.findall(r"`everybert (\w[^`]* [^`]*)`", text):
        pages.named(re.sub(r"[][|…]", " ", line).split())
    for target in re.findall(r"`make ([\w-]+)`", text):
        pages.check(["make", target])
    for path in re.findall(r"`pytest (tests/[^` ]+)`", text):
        assert (pages.ROOT / path).exists(), f"{page.name} names {path}"
    for script in re.findall(r"`(?:python )?(?:benchmarks/)?(\w+\.py)\b", text):
        places = (pages.ROOT / "benchmarks", pages.ROOT / "src", pages.ROOT / "tests", pages.DOCS)
        assert any(next(place.rglob(script), None) for place in places), f"{page.name} names {script}"


def test_the_error_that_the_readme_shows_is_one_line_and_code_2(models: None):
    assert '`everybert fill "no mask"`' in (pages.ROOT / "README.md").read_text("utf-8")
    result = CliRunner().invoke(app, ["fill", "no mask"])
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1 and "[MASK]" in result.stderr


def test_the_tour_is_short():
    tour = next(b for b in pages.blocks((pages.ROOT / "README.md").read_text("utf-8")) if b.language == "python")
    assert len(tour.text.strip().splitlines()) <= 20


# ── the harness itself ───────────────────────────────────────────────────────────────────────────────────────

SAMPLE = """Text.

<!-- test: pretrain += --steps 2 -->
```sh
everybert pretrain x  # a comment
```

```python
print(1)
```

```output
1
```

    ```python
    x = 2
    ```

<!-- test: numbers = free -->

```sh
everybert info x
```
"""


def test_blocks_are_found_with_their_comments_and_outputs():
    first, second, third, fourth = pages.blocks(SAMPLE)
    assert first.directives == {"pretrain": "--steps 2"}
    assert (second.text, second.output, second.line) == ("print(1)", "1", 9)
    assert third.text == "x = 2" and third.output is None
    assert fourth.directives == {"numbers": "free"}


def test_outputs_are_compared_to_their_last_digit():
    assert pages.same("a 0.12", "a 0.13 ") and pages.same("x\n", "x")
    assert not pages.same("a 0.12", "a 0.15") and not pages.same("a 0.12", "b 0.12") and not pages.same("3", "4")
    assert pages.same("loss 7.1", "loss 12.9", free=True) and not pages.same("paris 0.9", "rome 0.9", free=True)
    assert pages.same("1.2e-07", "1.1e-07") and not pages.same("1.2e-07", "1.2e-05")


def test_a_wrong_output_and_a_failing_block_are_told(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('b')\n```\n```output\na\n```\n", encoding="utf-8")
    assert "page.md:2 shows\na\nbut printed\nb" in pages.run(page, tmp_path)[0]
    assert pages.run(page, tmp_path, rewrite=True) and not pages.run(page, tmp_path)
    page.write_text("```python\n1 / 0\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page.md:2 failed: division by zero"):
        pages.run(page, tmp_path)
    wrong = ("make coffee", "pip install everybert[tea]", "rm x", "everybert fill --sugar", "everybert corpus brew")
    for line in wrong:
        with pytest.raises(Exception, match=r"coffee|tea|rm x|sugar|brew"):
            pages.check(line.split())
    pages.check(["torchrun", "--nproc_per_node=8", "-m", "everybert", "pretrain", "bert-base", "--out", "run"])


def test_a_page_that_needs_the_hub_is_told(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text('```python\nimport everybert\n\neverybert.load("bert-base-uncased")\n```\n', encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page.md:2 failed: google-bert/bert-base-uncased is on the hub"):
        pages.run(page, tmp_path)


def test_a_quote_is_a_name_or_a_part_of_it():
    import inspect

    from everybert.model.heads import Pooler
    from everybert.text.windows import windows

    assert pages.quote("everybert.text.windows:windows") == inspect.getsource(windows).rstrip()
    assert inspect.getsource(Pooler.forward).strip().endswith(pages.quote("everybert.model.heads:Pooler.forward")[-30:])
    part = pages.quote("everybert.model.attention:_formula | scores = | weights =").splitlines()
    assert part[0].startswith("scores = ") and part[-1] == "weights = torch.softmax(scores, dim=-1)"
    for wrong in ("everybert.text.windows:doors", "everybert.text.windows:windows | nowhere"):
        with pytest.raises(ValueError):
            pages.quote(wrong)


def test_commands_are_read_as_a_shell_reads_them():
    text = "everybert fill 'a [MASK]' \\\n  --top 3  # why\n# nothing\n$ make demo\n"
    assert list(pages.commands(text)) == [["everybert", "fill", "a [MASK]", "--top", "3"], ["make", "demo"]]
