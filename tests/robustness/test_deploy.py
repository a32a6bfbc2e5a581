"""The deployment files name things that exist. Tests have no container builder, so each step is checked by itself."""

import re
import shlex
from pathlib import Path

import doc_pages
import pytest

ROOT = Path(__file__).parents[2]


def test_the_image_copies_what_the_build_needs_and_serves():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for name in line.split()[:-1]}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    needed = {*re.findall(r'^readme = "(.*)"', project, re.MULTILINE), "recipes", "src", "pyproject.toml"}
    assert needed <= copied, "what the wheel is built of"
    assert text.index("USER everybert") < text.index("ENTRYPOINT"), "no root at run time"
    words = re.findall(r'"([^"]+)"', text[text.index("ENTRYPOINT") :])
    assert words[:2] == ["everybert", "serve"]
    doc_pages.parse(words[1:])


def test_compose_and_systemd_pass_options_that_exist():
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((ROOT / "contrib/deploy/compose.yaml").read_text("utf-8"))["services"]["everybert"]
    assert (ROOT / "contrib/deploy" / service["build"] / "Dockerfile").resolve() == ROOT / "Dockerfile"
    unit = (ROOT / "contrib/deploy/everybert.service").read_text("utf-8")
    start = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])
    assert start[1] == "serve"
    for words in (service["command"], start[2:]):
        doc_pages.named(["serve", *words])
