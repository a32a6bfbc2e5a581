"""MediaWiki XML dumps to prose: articles only, without lists, tables, headings, templates and references.

This is what BERT's corpus kept of Wikipedia: "only the text passages" (Devlin et al. 2019, section 3.1). The
wikitext is parsed by mwparserfromhell; this file only decides what of it is prose.
"""

import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from everybert.errors import EverybertError
from everybert.text.files import ReadReport, open_bytes

LIST_MARK = "\x01"  # stands at the start of a list item's line until the line is dropped
DROPPED_TAGS = frozenset(
    ("ref", "references", "table", "gallery", "math", "chem", "ce", "code", "syntaxhighlight", "source", "pre")
    + ("timeline", "score", "hiero", "imagemap", "graph", "maplink", "mapframe", "templatestyles", "templatedata")
    + ("categorytree", "inputbox", "style", "script", "ul", "ol", "dl", "li", "dt", "dd")
)
LIST_TAGS = frozenset(("li", "dt", "dd"))
# Namespaces whose links show a file or file a page away; a dump adds its own language's names.
DROPPED_NAMESPACES = frozenset(("file", "image", "media", "category", "bild", "archivo", "fichier", "datei"))
DROPPED_KEYS = frozenset(("-2", "6", "14"))
DROPPED = {  # the parser's opening and closing tokens of what is not prose
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


def read_prose(path: Path, report: ReadReport | None = None) -> Iterator[str]:
    """The prose of every article of a dump, in order."""
    for wikitext, namespaces in read_pages(path, report):
        yield prose(wikitext, namespaces)


def read_pages(path: Path, report: ReadReport | None = None) -> Iterator[tuple[str, frozenset[str]]]:
    """(wikitext, names of the namespaces of files and categories) of every article that is not a redirect."""
    namespaces = DROPPED_NAMESPACES
    with open_bytes(path, report) as stream:
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
            raise EverybertError(f"{path} is damaged or cut short ({error}): fetch the dump again") from error


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
    """The running text of an article, a paragraph a line."""
    pieces: list[str] = []
    # The last argument skips style tags, which TIDY takes out: they parse slowly where they do not pair.
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
    """Neither a list item nor a row of an unbalanced table, and with a letter in it."""
    return not line.startswith((LIST_MARK, "|", "!", "{", "}", "*", "#")) and any(c.isalpha() for c in line)


def _walk(tokens: Iterator[Any], end: str, namespaces: frozenset[str], out: list[str]) -> str:
    """Append the prose up to a token named in `end` and return that token's name."""
    for token in tokens:
        name = type(token).__name__
        if name == "Text":
            out.append(token.text)
        elif name in DROPPED:
            _walk(tokens, DROPPED[name], namespaces, [])
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
