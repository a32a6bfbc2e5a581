"""Extract plain text from a MediaWiki XML dump, as input for `everybert corpus build`.

    python contrib/mediawiki.py wiki.xml.bz2 --out wiki.txt

Writes the articles of the main namespace, separated by blank lines, one paragraph per line. Redirects, lists, tables,
headings, templates and references are left out: BERT was trained on "only the text passages" of Wikipedia (Devlin et
al. 2019, section 3.1). Needs `pip install mwparserfromhell`, which parses the wikitext. The dump may be compressed
(.bz2, .gz, .xz, .zst).
"""

from __future__ import annotations

import argparse
import html
import multiprocessing
import re
from collections.abc import Iterator
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from everybert.errors import EverybertError
from everybert.files import atomic_file
from everybert.text.readers import open_bytes

LIST_MARK = "\x01"  # stands at the start of a list item's line until the line is dropped
DROPPED_TAGS = frozenset(
    ("ref", "references", "table", "gallery", "math", "chem", "ce", "code", "syntaxhighlight", "source", "pre")
    + ("timeline", "score", "hiero", "imagemap", "graph", "maplink", "mapframe", "templatestyles", "templatedata")
    + ("categorytree", "inputbox", "style", "script", "ul", "ol", "dl", "li", "dt", "dd")
)
LIST_TAGS = frozenset(("li", "dt", "dd"))
# Namespaces whose links are not part of the text; a dump adds the names in its own language.
DROPPED_NAMESPACES = frozenset(("file", "image", "media", "category", "bild", "archivo", "fichier", "datei"))
DROPPED_KEYS = frozenset(("-2", "6", "14"))
DROPPED = {  # the parser's opening and closing tokens of markup that is not text
    "TemplateOpen": "TemplateClose",
    "ArgumentOpen": "ArgumentClose",
    "HeadingStart": "HeadingEnd",
    "CommentStart": "CommentEnd",
}
INTERLANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*:")
TIDY = [
    (re.compile(r"'{2,}"), ""),  # bold and italic
    (re.compile(r"__[A-Z]+__"), ""),  # switches such as __NOTOC__
    (re.compile(r"</?[a-zA-Z][^<>]{0,200}>"), ""),  # left over from unbalanced markup, as are these:
    (re.compile(r"\{\{|\}\}|\[\[|\]\]"), ""),
    (re.compile(r"[ \t\xa0]+"), " "),
    (re.compile(r"\( ?(?:[,;:] ?)+"), "("),  # what dropped templates leave behind in brackets
    (re.compile(r" ?[,;]? ?\)"), ")"),
    (re.compile(r" ?\(\)"), ""),
    (re.compile(r" ([,.])(?=\s|$)"), r"\1"),
]


def extract(dump: Path, out: Path, processes: int | None = None) -> int:
    """Write the text of every article to `out`; returns the number of articles."""
    count = 0
    with atomic_file(out) as draft, draft.open("w", encoding="utf-8") as file:
        for text in read_texts(dump, processes):
            file.write(text + "\n\n")
            count += 1
    return count


def read_texts(dump: Path, processes: int | None = None) -> Iterator[str]:
    """The text of every article that has any, in order."""
    if processes == 1:
        yield from filter(None, starmap(prose, read_pages(dump)))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from filter(None, pool.imap(_prose, read_pages(dump), chunksize=64))


def _prose(page: tuple[str, frozenset[str]]) -> str:
    return prose(*page)


def read_pages(path: Path) -> Iterator[tuple[str, frozenset[str]]]:
    """(wikitext, names of the namespaces of files and categories) of every article that is not a redirect."""
    namespaces = DROPPED_NAMESPACES
    with open_bytes(path) as stream:
        try:
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            if _name(root) != "mediawiki":
                raise EverybertError(
                    f"{path} is not a MediaWiki dump (its root is <{_name(root)}>): convert it to text"
                )
            for event, element in events:
                if event == "start":
                    continue
                if _name(element) == "siteinfo":
                    namespaces = namespaces | _dropped_names(element)
                elif _name(element) == "page":
                    if (text := _article(element)) is not None:
                        yield text, namespaces
                    root.clear()  # the dump is far larger than memory
        except ElementTree.ParseError as error:
            raise EverybertError(f"{path} is damaged or cut short ({error}): download it again") from error


def _name(element: ElementTree.Element) -> str:
    """The element's name without the export format's version."""
    return element.tag.rpartition("}")[2]


def _dropped_names(siteinfo: ElementTree.Element) -> set[str]:
    found = (e for e in siteinfo.iter() if _name(e) == "namespace" and e.get("key") in DROPPED_KEYS)
    return {element.text.lower() for element in found if element.text}


def _article(page: ElementTree.Element) -> str | None:
    """The wikitext of a page of the main namespace; None for redirects, talk, templates and scripts."""
    parts = {_name(element): element for element in page.iter()}
    if "redirect" in parts or "text" not in parts:
        return None
    if "ns" in parts and parts["ns"].text != "0":
        return None
    if "model" in parts and parts["model"].text != "wikitext":
        return None
    return parts["text"].text or None


def prose(wikitext: str, namespaces: frozenset[str] = DROPPED_NAMESPACES) -> str:
    """The running text of an article, one paragraph per line."""
    pieces: list[str] = []
    # The last argument skips style tags, which TIDY removes: unpaired ones are slow to parse.
    tokens = iter(_tokenizer()().tokenize(wikitext, 0, True))
    _walk(tokens, "", namespaces, pieces)
    text = "".join(pieces)
    for pattern, replacement in TIDY:
        text = pattern.sub(replacement, text)
    paragraphs = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in paragraphs if _is_prose(line))


@cache
def _tokenizer() -> Any:
    """mwparserfromhell's tokenizer: building its tree as well would take thirty times as long."""
    try:
        from mwparserfromhell.parser import Parser
    except ImportError as error:
        raise EverybertError("reading MediaWiki dumps needs mwparserfromhell: pip install mwparserfromhell") from error
    return type(Parser()._tokenizer)


def _is_prose(line: str) -> bool:
    """Whether a line has letters and is neither a list item nor a row of an unbalanced table."""
    return not line.startswith((LIST_MARK, "|", "!", "{", "}", "*", "#")) and any(c.isalpha() for c in line)


def _walk(tokens: Iterator[Any], end: str, namespaces: frozenset[str], out: list[str]) -> str:
    """Append the prose up to a token named in `end` and return that token's name."""
    for token in tokens:
        name = type(token).__name__
        if name == "Text":
            out.append(token.text)
        elif name in DROPPED:
            _skip(tokens, name)
        elif name == "WikilinkOpen":
            _link(tokens, namespaces, out)
        elif name == "ExternalLinkOpen":
            if _walk(tokens, "ExternalLinkSeparator ExternalLinkClose", namespaces, []) == "ExternalLinkSeparator":
                _walk(tokens, "ExternalLinkClose", namespaces, out)
        elif name == "HTMLEntityStart":
            out.append(_entity(tokens))
        elif name == "TagOpenOpen":
            _tag(tokens, token, namespaces, out)
        elif name in end.split():
            return name
    return ""


def _skip(tokens: Iterator[Any], opening: str) -> None:
    """Leave out what has been opened, however deeply it is nested."""
    depth = 1
    while depth and (token := next(tokens, None)) is not None:
        depth += {opening: 1, DROPPED[opening]: -1}.get(type(token).__name__, 0)


def _link(tokens: Iterator[Any], namespaces: frozenset[str], out: list[str]) -> None:
    title: list[str] = []
    shown = title
    if _walk(tokens, "WikilinkSeparator WikilinkClose", namespaces, title) == "WikilinkSeparator":
        shown = []
        _walk(tokens, "WikilinkClose", namespaces, shown)
    if not _is_dropped_link("".join(title), namespaces):
        out.append("".join(shown).lstrip(":"))


def _is_dropped_link(title: str, namespaces: frozenset[str]) -> bool:
    prefix, colon, _ = title.partition(":")
    if not colon or not prefix:  # [[:Category:X]] is shown as text
        return False
    return prefix.strip().replace("_", " ").lower() in namespaces or INTERLANGUAGE.match(title) is not None


def _entity(tokens: Iterator[Any]) -> str:
    body = ""
    for token in tokens:
        match type(token).__name__:
            case "HTMLEntityEnd":
                break
            case "HTMLEntityNumeric":
                body += "#"
            case "HTMLEntityHex":
                body += "x"
            case "Text":
                body += token.text
    return html.unescape(f"&{body};")


def _tag(tokens: Iterator[Any], opening: Any, namespaces: frozenset[str], out: list[str]) -> None:
    head: list[str] = []
    self_closing = "TagAttrStart TagCloseOpen TagCloseSelfclose"
    how = _walk(tokens, self_closing, namespaces, head)
    if how == "TagAttrStart":
        how = _walk(tokens, "TagCloseOpen TagCloseSelfclose", namespaces, [])
    tag = "".join(head).strip().lower()
    if how == "TagCloseSelfclose":
        if tag in LIST_TAGS and opening.wiki_markup:
            out.append(LIST_MARK)
        elif tag == "br":
            out.append(" ")
        return
    _walk(tokens, "TagOpenClose", namespaces, [] if tag in DROPPED_TAGS else out)
    _walk(tokens, "TagCloseClose", namespaces, [])


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dump", type=Path, help="the dump: .xml, or compressed as .xml.bz2, .gz, .xz or .zst")
    parser.add_argument("--out", type=Path, required=True, help="the text file to write")
    parser.add_argument("--processes", type=int, help="processes to use (default: all cores)")
    given = parser.parse_args()
    try:
        print(f"{extract(given.dump, given.out, given.processes):,} articles written to {given.out}")
    except EverybertError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
