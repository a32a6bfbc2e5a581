"""The lectures: eleven pages of one form, their links into the playground, and their notebooks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import parse_qsl

import doc_notebooks as notebooks
import doc_pages as pages
import pytest

LINK = re.compile(r"\(http://127\.0\.0\.1:8000/#(\w+)\?([^)]+)\)")
STATE = {
    "fill": {"text", "were"},
    "classify": {"text"},
    "names": {"text"},
    "answer": {"question", "context"},
    "next": {"first", "second"},
    "tokens": {"text"},
    "attention": {"text", "layer", "head"},
    "context": {"word", "texts"},
    "steps": {"text", "step"},
    "examples": {"text", "kind", "strategy", "static"},
}
"""What the lectures fill in, by panel; tests/browser/test_lectures.py opens every link."""


def name_of(page: Path) -> str:
    return page.stem


def test_there_are_eleven_in_order():
    found = [int(page.stem[:2]) for page in notebooks.lectures()]
    assert found == list(range(1, 12))
    index = (notebooks.LECTURES / "index.md").read_text("utf-8")
    for page in notebooks.lectures():
        assert f"]({page.name})" in index and f"](notebooks/{page.stem}.ipynb)" in index


@pytest.mark.parametrize("page", notebooks.lectures(), ids=name_of)
def test_a_lecture_has_commands_an_exercise_and_a_link_into_the_playground(page: Path):
    text = page.read_text("utf-8")
    blocks = pages.blocks(text)
    assert any(block.language in pages.SHELLS and block.output for block in blocks), "a command with its output"
    question, answer = text.partition("## Exercise")[::2]
    assert question and "<summary>Answer</summary>" in answer
    checked = pages.blocks(answer[answer.index("<summary>") :])
    assert any(re.search(r"^ *assert ", block.text, re.MULTILINE) for block in checked), "an answer that is checked"
    found = LINK.findall(text)
    assert found
    for panel, query in found:
        state = dict(parse_qsl(query, strict_parsing=True))
        assert state.pop("model") in ("everybert-classic", "everybert-small") and set(state) <= STATE[panel], query


def test_pseudo_code_stands_beside_lines_that_run():
    text = (notebooks.LECTURES / "05-encoder.md").read_text("utf-8")
    table = text[text.index("| pseudo-code") : text.index("```python")]
    code = "\n".join(block.text for block in pages.blocks(text) if block.language == "python")
    beside = re.findall(r"^\| .* \| `(.+)` \|$", table, re.MULTILINE)
    assert len(beside) == 8 and set(beside) <= {line.strip() for line in code.splitlines()}


@pytest.mark.parametrize("page", notebooks.sources(), ids=name_of)
def test_a_notebook_is_its_page(page: Path):
    made = notebooks.notebook(page)
    assert notebooks.path_of(page).read_text("utf-8") == made, "make docs-outputs"
    cells = json.loads(made)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for block in pages.blocks(page.read_text("utf-8")):
        if block.language == "python" and "source" not in block.directives:
            assert block.text in code
    assert not [cell for cell in cells if "<!--" in "".join(cell["source"]) or "details" in "".join(cell["source"])]
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == {page.stem for page in notebooks.lectures()}
