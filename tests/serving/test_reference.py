"""/docs is one page that needs nothing but this server, and shows every endpoint with its example."""

from __future__ import annotations

import json
import re
import shlex

from server import CLIENT, post

from everybert.serving.reference import page


def test_the_page_shows_every_endpoint_and_loads_nothing(url):
    answer = CLIENT.get(url + "/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    document = CLIENT.get(url + "/openapi.json").json()
    for path in document["paths"]:
        assert f"<code>{path}</code>" in answer.text
    assert not re.search(r"<script|<link|<img|@import|url\(", answer.text)
    outside = set(re.findall(r"https?://[^\s'\"<]+", answer.text)) - {url + path for path in document["paths"]}
    assert not outside
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert CLIENT.get(url + "/redoc").status_code == 404


def test_its_calls_can_be_made(url):
    """What the page tells people to type is answered, but for models that are not served here."""
    text = CLIENT.get(url + "/docs").text
    calls = re.findall(r"<pre>(curl [^<]*?-d [^<]*)</pre>", text)
    assert len(calls) >= 12
    for call in calls:
        words = shlex.split(call.replace("&#x27;", "'").replace("&quot;", '"').replace("&amp;", "&"))
        body = json.loads(words[-1])
        body.pop("model", None)
        assert post(url, words[1].removeprefix(url), body).status_code in (200, 422)


def test_what_the_document_says_is_text_and_not_markup():
    operation = {"description": "<script>alert(1)</script>", "responses": {"200": {"description": "<b>"}}}
    document = {"info": {"title": "<i>", "version": "1"}, "paths": {"/<x>": {"get": operation}}}
    assert not re.search(r"<script|<i>|<x>|<b>[^<]*</td", page(document, "http://x"))
