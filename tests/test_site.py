"""The documentation site: its list of pages is complete, and what docs/conf.py makes of a page holds."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def conf() -> dict[str, Any]:
    """The names of docs/conf.py."""
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def test_every_page_of_docs_is_listed_once(conf: dict[str, Any]) -> None:
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")]
    listed = [page for pages in conf["PAGES"].values() for page in pages]
    pages = {f"docs/{file.stem}" for file in files} - {conf["root_doc"]}
    assert pages <= set(listed) and len(listed) == len(set(listed))
    assert set(conf["SEARCH_WORDS"]) <= set(listed)


def test_words_of_retrieval_lead_to_the_pages_on_logs_and_servers(
    conf: dict[str, Any],
) -> None:
    words_of = {p: words.split(", ") for p, words in conf["SEARCH_WORDS"].items()}
    pages = {page for page, words in words_of.items() if "RAG" in words}
    assert pages == {"docs/order", "docs/own_data", "docs/endpoint"}


def test_llms_txt_has_a_sentence_of_every_page(conf: dict[str, Any]) -> None:
    text = conf["llms_txt"]()
    assert text.startswith("# posbench\n\n> ")
    entries = re.findall(r"^- \[(.+)\]\(_sources/(.+?)\): (.+)$", text, re.M)
    assert len(entries) == sum(map(len, conf["PAGES"].values()))
    for title, path, sentence in entries:
        file = ROOT / path
        assert file.is_file()
        assert f"# {title}" in file.read_text(encoding="utf-8")
        assert re.fullmatch(r"[\w'`].{20,330}[.?]", sentence), (path, sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One, as Yu et al. say. Two.", "One, as Yu et al. say."),
        ("A [link](a.md), *b* and `c.csv`\ngo on. Two.", "A link, b and c.csv go on."),
        ("```\nrun\n```\n\n![x](y.png)\n\n| a |\n\nWhy? So.", "Why?"),
    ],
)
def test_the_first_sentence_of_a_page(
    text: str, sentence: str, conf: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# A page\n\n{text}\n")
    assert conf["beginning"](file) == ("A page", sentence)


def test_a_figure_is_a_link_to_its_file_once(conf: dict[str, Any]) -> None:
    alone = '<p><img alt="a" src="../_images/a.png" /> and <a href="b.html">b</a></p>'
    linked = '<a class="reference" href="../_images/b.png"><img src="b.png" /></a>'
    assert conf["link_figures"](linked) == linked
    assert conf["link_figures"](alone) == alone.replace(
        '<img alt="a" src="../_images/a.png" />',
        '<a class="full-size" href="../_images/a.png"><img alt="a" src="../_images/a.png" /></a>',
    )


def test_breadcrumbs_escape_titles(conf: dict[str, Any]) -> None:
    html = conf["breadcrumbs"]([("../a.html", "a < b"), (None, "c")])
    assert '<li><a href="../a.html">a &lt; b</a></li><li>c</li>' in html


def test_the_repository_is_linked_where_the_project_names_one(
    conf: dict[str, Any],
) -> None:
    assert conf["theme_options"]({}) == {}
    assert conf["theme_options"]({"Homepage": "https://a.example"}) == {}
    (link,) = conf["theme_options"]({"Repository": "https://b.example"})["footer_icons"]
    assert link["url"] == "https://b.example"
    urls = conf["PYPROJECT"]["project"].get("urls", {})
    assert conf["html_theme_options"] == conf["theme_options"](urls)
