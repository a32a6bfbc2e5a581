import bz2
import time

import pytest
from mediawiki import extract, prose, read_pages, read_texts
from refusals import refuses

from everybert.text.readers import read_documents

ARTICLE = """{{Short description|An island}}
{{Infobox island|name=Aland|area={{convert|3|km2}}}}
[[Datei:Aland.jpg|mini|A [[map]] of the island]]
'''Alandia''' ({{IPA|x}}; also ''Alandya'') is an [[island|isle]] in the [[sea]].<ref name="a">{{cite|1}}</ref>
It&nbsp;is small<ref name="a" /> &#38; green,<!-- really --> see [https://example.org its page].

== History ==
People came early.{{sfn|Foo|1999}} The length is <math>x^2</math> today.
* first item
** second item with a [[link]]
# third
: indented
; term : meaning
{| class="wikitable"
! Head !! Other
|-
| cell || cell
|}
<p>Bonjour&nbsp;! [[Star Lore: Return]] was filmed here, as [[:Category:Films|some films]] were.<br />So it is.
<gallery>
File:a.jpg|caption
</gallery>
{{unclosed
__NOTOC__
[[Category:Islands]]
[[de:Alandia]]
"""

PROSE = [
    "Alandia (also Alandya) is an isle in the sea.",
    "It is small & green, see its page.",
    "People came early. The length is today.",
    "Bonjour ! Star Lore: Return was filmed here, as some films were. So it is.",
    "unclosed",
]


def page(text, ns=0, extra="", model="wikitext"):
    body = text.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f"<page><title>T</title><ns>{ns}</ns><id>1</id>{extra}<revision><model>{model}</model>"
        f'<text xml:space="preserve">{body}</text></revision></page>'
    )


def dump(*pages):
    names = '<namespaces><namespace key="0"/><namespace key="6">Datei</namespace></namespaces>'
    head = f"<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.11/'><siteinfo>{names}</siteinfo>"
    return (head + "".join(pages) + "</mediawiki>").encode()


def test_only_prose_is_kept():
    assert prose(ARTICLE, frozenset(("file", "category", "datei"))).split("\n") == PROSE


@pytest.mark.parametrize(
    "text", ["{{{{{{", "[[[[a]]", "<ref>open", "{|\n|a", "'''''", "&#xfffffff;", "<b><i></b>", "\x01", "=="]
)
def test_broken_markup_does_not_stop_it(text):
    assert "Fine." in prose("Fine.\n" + text)


def test_odd_pages_take_linear_time():
    started = time.perf_counter()
    prose("\n" * 300_000 + " " * 300_000 + "(" * 100_000 + "Fine.")
    assert time.perf_counter() - started < 20


def test_articles_alone_are_read_from_a_packed_dump(tmp_path):
    path = tmp_path / "wiki.xml.bz2"
    pages = [
        page(ARTICLE),
        page("Talk.", ns=1),
        page("#REDIRECT [[X]]", extra='<redirect title="X"/>'),
        page("return {}", model="Scribunto"),
        page("* only a list"),
        page("Second article."),
    ]
    path.write_bytes(bz2.compress(dump(*pages)))
    assert len(list(read_pages(path))) == 3
    assert list(read_texts(path, processes=1)) == ["\n".join(PROSE), "Second article."]
    assert extract(path, tmp_path / "wiki.txt", processes=2) == 2
    assert list(read_documents(tmp_path / "wiki.txt")) == ["\n".join(PROSE), "Second article."]
    refuses(r"python contrib/mediawiki\.py .*wiki\.xml\.bz2 --out", list, read_documents(path))


def test_damaged_and_foreign_xml_are_told(tmp_path):
    path = tmp_path / "wiki.xml"
    path.write_bytes(dump(page("Fine."), page("Cut."))[:-40])
    refuses("cut short", list, read_pages(path))
    path.write_text("<html></html>")
    refuses("not a MediaWiki dump", list, read_pages(path))
    path.write_text("")
    refuses("cut short", list, read_pages(path))


@pytest.mark.parametrize(("opening", "closing"), [("{{", "}}"), ("{{{", "}}}"), ("{{a|", "}}"), ("<ref>", "</ref>")])
def test_markup_nested_five_thousand_deep(opening, closing):
    assert prose(f"Before it. {opening * 5000}x{closing * 5000} After it.").endswith("After it.")
