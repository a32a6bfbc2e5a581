"""What the browser tests share: where Chromium is, how large a page is, what every panel shows."""

from __future__ import annotations

import os
import shutil

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZES = {"laptop": {"width": 1366, "height": 820}, "phone": {"width": 390, "height": 844}}
PANELS = {
    "fill": "#fill?model=words&text=the+cat+sees+a+%5BMASK%5D+dog+.&were=%5B%22red%22%5D",
    "classify": "#classify?model=labels&text=good+food+,+bad+song+!",
    "names": "#names?model=ner&text=john+smith+lives+in+london",
    "answer": "#answer?model=qa&question=where+does+john+lives&context=john+smith+lives+in+london+and+mary+in+paris",
    "next": "#next?model=words&first=the+cat+eats&second=it+likes+food",
    "similar": "#similar?model=words&texts=the+cat+eats%0Aa+dog+eats%0Ared+and+blue",
    "tokens": "#tokens?model=words&text=the+cat+likes+qu%C3%A9+%F0%9F%90%8D",
    "attention": "#attention?model=words&text=the+cat+sees+a+red+dog+.&pair=where+does+it+eats",
    "context": "#context?model=words&word=red&texts=the+red+cat%0Aa+red+song+and+food%0Ared+food",
    "steps": "#steps?model=words&text=the+cat+%5BMASK%5D+food&step=4&layer=1",
}
"""Every panel with something to show."""


def chromium() -> str | None:
    """Where Chromium is: $CHROMIUM, or on the path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def own_address(address: str, url: str) -> bool:
    return address.startswith((url, "data:", "blob:", "file:", "about:"))


def ready(page) -> None:
    """Wait until a result is drawn and nothing is under way."""
    page.wait_for_selector(".result[aria-busy=false] > *")
    page.wait_for_timeout(120)
    page.wait_for_selector(".result[aria-busy=false] > *")
