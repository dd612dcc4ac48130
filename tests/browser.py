"""What a browser makes of a page: what is cut, wider than the window, or lost."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHECK = """<script>onload = () => document.title = JSON.stringify({
  lost: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src.slice(0, 80)),
  shown: document.images.length, width: innerWidth, page: document.scrollingElement.scrollWidth,
  small: [...document.querySelectorAll("figure img[style]")]
    .filter(i => i.clientWidth < 0.69 * i.getAttribute("width"))
    .map(i => i.alt),
  cut: [...document.querySelectorAll("body *")].filter(e => !e.closest("figure .wide"))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1
    || e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.outerHTML.slice(0, 80))})</script>"""


def looks(page: Path, width: int) -> dict[str, Any]:
    """Images lost, shown, and shrunk until their letters are too small, width of window and page, and what is
    cut, in a window of so many pixels; a wide figure may be scrolled, a table may not."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs chromium")
    # Late images load at once, folded parts are open; a window is never as narrow as a phone, a frame is.
    text = (
        page.read_text()
        .replace('loading="lazy"', "")
        .replace("<details>", "<details open>")
    )
    check = page.parent / "check.html"
    outer = page.parent / "frame.html"
    check.write_text(text.replace("</body>", f"{CHECK}</body>"))
    script = "onload = () => document.title = document.querySelector('iframe').contentDocument.title"
    frame = f'<iframe src="check.html" width="{width}" height="900" style="border:0"></iframe>'
    outer.write_text(f"{frame}<script>{script}</script>")
    flags = [
        "--headless",
        "--no-sandbox",
        "--allow-file-access-from-files",
        "--virtual-time-budget=20000",
    ]
    call = [browser, *flags, "--dump-dom", f"file://{outer}"]
    dom = subprocess.run(
        call, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    check.unlink()
    outer.unlink()
    title = re.search("<title>(.*?)</title>", dom, re.DOTALL)
    assert title, dom
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found
