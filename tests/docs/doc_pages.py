"""The code blocks of the documentation: found, run in order, compared with the outputs shown beneath them.

A page is run from top to bottom in a folder of its own: its python blocks share their names, its shell blocks go
through the command line in this process. What a block prints is compared with the ```output block right after it.

Comments before a block say what the test does differently (readers do not see them):

    <!-- test: pretrain += --steps 2 -->       words added to every `everybert pretrain` of the block
    <!-- test: numbers = free -->              decimals of the output may differ (random weights, timings)
    <!-- test: tier = slow -->                 run by `make test-slow`; `make test` checks its commands
    <!-- test: source = module:name -->        not run; the code of that name in src/, see `quote`

Commands other than `everybert` and `curl` are checked here, and run by test_commands.py.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import doc_world as world

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = ("SCALING.md", "CLUSTER.md", "DISTRIBUTED.md")
"""Pages about many machines: test_scaling_doc.py runs the first's commands, test_commands.py the others'."""
FROM_THE_HUB = ("sentence-transformers.md", "serve.md", "serving.md")
"""Pages that show a model of the hub; all others run with the bundled models alone, offline."""
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<language>[\w+-]*)(?P<rest>.*)$")
DIRECTIVE = re.compile(r"^\s*<!-- test: (?P<key>[^=]+?) (?P<sign>\+?=) (?P<value>.*?) -->\s*$")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
ENVIRONMENT = ("python3 -m venv .venv", ". .venv/bin/activate")
"""How a reader makes an environment; test_packaging.py installs the package into one."""
SHELLS = ("sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    line: int
    """Of its first line of text, counted from 1."""
    language: str
    text: str
    directives: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    """The text of the ```output block beneath it."""
    output_lines: tuple[int, int] = (0, 0)
    """Where that text lies: lines first … last − 1, counted from 0."""
    indent: int = 0

    @property
    def lines(self) -> tuple[int, int]:
        """Where its text lies: lines first … last − 1, counted from 0."""
        return self.line - 1, self.line - 1 + len(self.text.splitlines())


def pages() -> list[Path]:
    """README and every page of the documentation."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    """The blocks of a page, each with the comments before it and the output after it."""
    found: list[Block] = []
    lines = text.splitlines()
    directives: dict[str, str] = {}
    gap = 2  # blank lines since the last block
    at = 0
    while at < len(lines):
        if said := DIRECTIVE.match(lines[at]):
            directives[said["key"].strip()] = said["value"].strip()
        fence = FENCE.match(lines[at])
        if fence is None:
            if lines[at].strip():
                gap = 2
                directives = directives if said else {}
            else:
                gap += 1
            at += 1
            continue
        indent, start = len(fence["indent"]), at + 1
        at = start
        while at < len(lines) and lines[at].strip() != fence["ticks"]:
            at += 1
        body = "\n".join(line[indent:] for line in lines[start:at])
        if fence["language"] == "output" and found and gap <= 1:
            last = found[-1]
            found[-1] = Block(last.line, last.language, last.text, last.directives, body, (start, at), indent)
        else:
            found.append(Block(start + 1, fence["language"], body, directives, indent=indent))
        directives, gap = {}, 0
        at += 1
    return found


@dataclass
class Run:
    """A page being run."""

    page: Path
    whole: bool = True
    """Slow blocks too."""
    server: Any = None
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__page__"})

    def block(self, block: Block) -> str:
        """Run a block; what it printed."""
        if "source" in block.directives:
            return ""
        if is_slow(block) and not self.whole:
            for words in commands(block.text):
                check(words)
            return ""
        if block.language == "python":
            return self.python(block)
        if block.language in SHELLS:
            return "".join(self.shell(words, block) for words in commands(block.text))
        return ""

    def python(self, block: Block) -> str:
        """Run a python block with the page's names."""
        source = "\n" * (block.line - 1) + self.addressed(block.text)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, str(self.page), "exec"), self.names)
        return printed.getvalue()

    def shell(self, words: list[str], block: Block) -> str:
        """Run one command."""
        settings = {}
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            settings[name] = value
        if words[0] == "everybert":
            extra = [shlex.split(v) for k, v in block.directives.items() if " ".join(words[1:]).startswith(k)]
            words = words[1:] + [word for more in extra for word in more]
            if words[0] == "serve":
                if self.server:
                    self.server.stop()
                self.server = world.serve(words[1:], settings)
                return ""
            return world.command(words, settings)
        if words[0] == "curl":
            return world.curl([self.addressed(word) for word in words[1:]])
        check(words)
        return ""

    def addressed(self, text: str) -> str:
        """The text with the address of the page's own server."""
        return text.replace("http://127.0.0.1:8000", self.server.url) if self.server else text


def quote(reference: str) -> str:
    """The code that a `source` comment names: `everybert.model.heads:Network.forward | x = | return`.

    The two optional parts select what lies between the first lines that begin with these texts.
    """
    name, *limits = [part.strip() for part in reference.split(" | ")]
    module, _, inner = name.partition(":")
    text = ROOT.joinpath("src", *module.split(".")).with_suffix(".py").read_text("utf-8")
    node: Any = ast.parse(text)
    for part in inner.split("."):
        node = next((n for n in node.body if getattr(n, "name", None) == part), None)
        if node is None:
            raise ValueError(f"there is no {name}")
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    for i, limit in enumerate(limits):
        at = next((k for k, line in enumerate(lines) if line.strip().startswith(limit)), None)
        if at is None:
            raise ValueError(f"{name}: no line begins with {limit!r}")
        lines = lines[: at + 1] if i else lines[at:]
    return textwrap.dedent("\n".join(lines))


def write_quotes(page: Path) -> None:
    """Put the code of src/ as it stands now into a page."""
    text = page.read_text("utf-8")
    lines = text.splitlines()
    for block in reversed(blocks(text)):
        if "source" in block.directives:
            first, last = block.lines
            lines[first:last] = quote(block.directives["source"]).splitlines()
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def is_slow(block: Block) -> bool:
    """Whether it waits for `make test-slow`; only commands may."""
    slow = block.directives.get("tier") == "slow"
    assert not slow or (block.language in SHELLS and block.output is None), f"line {block.line}: no code may be slow"
    return slow


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words; comments and prompts are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "$":
            words = words[1:]
        if words:
            yield words


def check(words: list[str]) -> None:
    """Refuse a command that does not exist, or an option; test_commands.py runs it, some of it in `make test-slow`."""
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "everybert":
        parse(words[1:])
        return
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert words[1] in targets, f"the Makefile has no target {words[1]}"
    elif words[:2] == ["pip", "install"]:
        project = (ROOT / "pyproject.toml").read_text("utf-8")
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            for name in extra.split(","):
                assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"there is no extra {name}"
    elif words[0] == "python" and words[1].startswith("benchmarks/"):
        source = (ROOT / words[1]).read_text("utf-8")
        for flag in (w for w in words if w.startswith("--")):
            assert f'"{flag}"' in source, f"{words[1]} has no option {flag}"
    elif shlex.join(words) not in ENVIRONMENT:
        raise AssertionError(f"no test runs {shlex.join(words)!r}: teach doc_pages.py and test_commands.py to")


def parse(words: list[str]) -> None:
    """Refuse a command line that `everybert` would refuse; nothing is run."""
    name, command, rest = _command(words)
    command.make_context(name, rest)


def named(words: list[str]) -> None:
    """Refuse a command or an option that `everybert` does not have; arguments may be missing, as in running text."""
    _, command, rest = _command(words)
    options = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in rest:
        assert not word.startswith("-") or word.partition("=")[0] in options, f"everybert {words[0]} has no {word}"


def _command(words: list[str]) -> tuple[str, Any, list[str]]:
    """The command that words name, and the words left for it."""
    import typer

    from everybert.cli.main import app

    group: Any = typer.main.get_command(app)
    name, command, rest = group.resolve_command(typer.Context(group, info_name="everybert"), words)
    if hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"everybert {name} has no command {' '.join(rest[:1])}"
        name, command, rest = f"{name} {rest[0]}", command.commands[rest[0]], rest[1:]
    return name, command, rest


def same(shown: str, printed: str, free: bool = False) -> bool:
    """Whether an output is the one shown: words exactly, decimals within one and a half of their last digit."""
    shown, printed = (re.sub(r"[ \t]+\n", "\n", text.strip() + "\n") for text in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return free and _loose(shown) == _loose(printed)
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return free or all(abs(float(a) - float(b)) <= 1.5 * _unit(a) for a, b in pairs)


def _loose(text: str) -> str:
    """Words without the decimals, their signs and the spaces that line them up."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", text).replace("+#", "#"))


def _unit(number: str) -> float:
    """One of the last digit shown."""
    digits, _, power = number.partition("e")
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def run(page: Path, folder: Path, rewrite: bool = False, whole: bool = True) -> list[str]:
    """Run a page in a folder; what differs from what it shows. `rewrite` puts what was printed into the page."""
    text = page.read_text("utf-8")
    lines, wrong, edits = text.splitlines(), [], []
    state = Run(page, whole)
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    try:
        for block in blocks(text):
            where = f"{page.name}:{block.line}"
            try:
                with contextlib.nullcontext() if page.name in FROM_THE_HUB else world.offline():
                    printed = state.block(block)
            except Exception as error:
                raise AssertionError(f"{where} failed: {error}") from error
            if block.output is None:
                continue
            if not same(block.output, printed, block.directives.get("numbers") == "free"):
                wrong.append(f"{where} shows\n{block.output}\nbut printed\n{printed}")
                edits.append((block, printed))
    finally:
        os.chdir(before)
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
        if state.server:
            state.server.stop()
    if rewrite:
        for block, printed in reversed(edits):
            first, last = block.output_lines
            lines[first:last] = [" " * block.indent + line.rstrip() for line in printed.strip("\n").splitlines()]
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return wrong


if __name__ == "__main__":  # make docs-outputs; --quotes: only the quoted code and the notebooks, in seconds
    import tempfile

    import doc_notebooks
    import doc_reference

    chosen = [Path(name).resolve() for name in sys.argv[1:]] or [p for p in pages() if p.name not in ELSEWHERE]
    if sys.argv[1:] == ["--quotes"]:
        chosen = []
    for one in pages():
        write_quotes(one)
    with tempfile.TemporaryDirectory() as models, world.stand_ins(Path(models)):
        for one in chosen:
            with tempfile.TemporaryDirectory() as place:
                world.write_data(Path(place))
                changed = run(one, Path(place), rewrite=True)
            print(f"{one.relative_to(ROOT)}: {len(changed)} outputs rewritten" if changed else f"{one.name}: as shown")
    doc_reference.write()
    doc_notebooks.write()
