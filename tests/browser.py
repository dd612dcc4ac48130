"""What a browser makes of a page: what is cut, wider than the window, or lost."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tarfile
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
    || !(e instanceof SVGElement) && e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
    .map(e => e.outerHTML.slice(0, 80))})</script>"""

AXE = """<script>onload = async () => {
  const found = await axe.run(document);
  document.title = JSON.stringify(found.violations
    .filter(v => ["serious", "critical"].includes(v.impact))
    .map(v => [v.id, v.nodes.map(n => n.html.slice(0, 80))]));
}</script>"""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--allow-file-access-from-files",
    "--virtual-time-budget=20000",
)


def looks(page: Path, width: int) -> dict[str, Any]:
    """Images lost, shown, and shrunk until their letters are too small, width of window and page, and what is
    cut, in a window of so many pixels; a wide figure may be scrolled, a table may not."""
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
    found: dict[str, Any] = title_of(outer)
    check.unlink()
    outer.unlink()
    return found


def axe_faults(page: Path, axe: Path, is_dark: bool) -> list[Any]:
    """What axe-core finds serious or critical in a page: each rule with the elements that break it.

    Args:
        page: The page.
        axe: Its script, see :func:`axe_core`.
        is_dark: Whether the reader prefers dark pages.
    """
    check = page.parent / "axe_check.html"
    text = page.read_text().replace("<details>", "<details open>")
    script = f"<script>{axe.read_text()}</script>{AXE}"
    check.write_text(text.replace("</body>", f"{script}</body>"))
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    faults: list[Any] = title_of(check, scheme, "--window-size=1280,900")
    check.unlink()
    return faults


def axe_core(folder: Path) -> Path:
    """The script of axe-core, which npm downloads into a folder; without npm or the network the test is skipped."""
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("needs npm, for axe-core")
    call = [npm, "pack", "axe-core@4.14.1", "--silent"]
    packed = subprocess.run(
        call, cwd=folder, capture_output=True, text=True, timeout=300
    )
    if packed.returncode:
        pytest.skip(f"npm cannot download axe-core: {packed.stderr.strip()[-200:]}")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        archive.extract("package/axe.min.js", folder, filter="data")
    return folder / "package" / "axe.min.js"


def title_of(page: Path, *flags: str) -> Any:
    """What a script of a page has written into its title as JSON."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs chromium")
    call = [browser, *FLAGS, *flags, "--dump-dom", f"file://{page}"]
    dom = subprocess.run(
        call, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    title = re.search("<title>(.*?)</title>", dom, re.DOTALL)
    assert title, dom
    return json.loads(html.unescape(title[1]))
