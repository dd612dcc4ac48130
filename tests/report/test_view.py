"""One page over all runs: a row each with what the list of runs says, and links that lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from posbench.cli.main import main
from posbench.report.index import records
from posbench.report.links import read_head
from posbench.report.page import write_page
from posbench.report.view import write_view
from posbench.stats.glance import Glance
from tests.conftest import Result
from tests.messages import assert_refused, refused
from tests.report.test_index import made

SCALED = {"name": "scale_channel", "layers": [1, 2], "factor": 0.0}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs, one of which has a page, and the page of a diagnosis."""
    suite = tmp_path / "some outputs/kv_retrieval/v001"
    first = made(suite / "tiny__scale_channel__aaaa0001", SCALED, 1)
    made(suite / "tiny__none__bbbb0001", {"name": "none"}, 3)
    made(suite / "tiny__none__bbbb0003", {"name": "none"}, 5, "failed")
    (first / "report.html").write_text("page")
    diagnosis = tmp_path / "some outputs/diagnose/tiny__kv__12345678/report.html"
    diagnosis.parent.mkdir(parents=True)
    diagnosis.write_text("page")
    return tmp_path / "some outputs"


def test_every_run_has_a_row_and_a_link(runs: Path) -> None:
    page, count = write_view(runs)
    text = page.read_text()
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    rows = re.findall("<tr>(.*?)</tr>", body, re.DOTALL)
    assert count == len(rows) == 3
    for row, record in zip(rows, records(runs), strict=True):
        words = unescape(re.sub("<[^>]*>", " ", row))
        state = record["verdict"] or record["state"]
        assert str(record["run"]) in words and str(state) in words
        if record["score"] is not None:
            assert f"{100 * record['score']:.1f} [" in words
    addresses = [unescape(a) for a in re.findall('href="(.*?)"', text)]
    assert len(addresses) == 4
    for address in addresses:
        assert (page.parent / address).exists() and not address.startswith("/")
    assert "kv_retrieval/v001/tiny__scale_channel__aaaa0001/report.html" in addresses
    assert "diagnose/tiny__kv__12345678/report.html" in addresses
    assert not re.search("https?:", text)
    assert write_view(runs)[0] == page, "our own page is replaced"


def test_the_page_says_what_to_do_next(runs: Path) -> None:
    """The command after the newest run that is done: the failed one has no command that would repeat it."""
    text = unescape(write_view(runs)[0].read_text())
    newest = next(record for record in records(runs) if record["state"] == "done")
    (line,) = re.findall("<p>Next: (posbench .*?)</p>", text)
    assert str(newest["run"]) in line


def test_the_verdict_comes_first(runs: Path) -> None:
    """Of a run behind its name, and of a diagnosis before its title, in the words of its own page."""
    page = next(runs.glob("diagnose/*/report.html"))
    glance = Glance("not fixed", "bad", "It loses 5 % of <a>.")
    write_page(page.parent, "a & b: diagnosis", glance, [])
    text = write_view(runs)[0].read_text()
    header = re.findall("<th scope[^>]*>(.*?)</th>", text)
    assert header[:3] == ["run", "verdict", "what"]
    row = text.partition("<tbody>")[2].partition("</tr>")[0]
    assert re.findall('data-name="(.*?)"', row) == header
    (entry,) = re.findall("<li>(.*?)</li>", text)
    assert '<span class="red">not fixed</span>' in entry
    assert unescape(re.sub("<[^>]*>", "", entry)) == "not fixed: a & b: diagnosis"
    head = read_head(page)
    assert (head.word, head.tone, head.sentence) == (
        glance.word,
        glance.tone,
        glance.sentence,
    )


def test_the_command_prints_an_address_and_opens_nothing(
    runs: Path, posbench: Callable[..., Result]
) -> None:
    result = posbench("view", str(runs), verb=True)
    assert result.status == 0 and result.err == ""
    address = (runs / "index.html").as_uri()
    assert result.out == f"3 runs: {address}\n" and "some%20outputs" in address


def test_what_is_not_ours_is_not_replaced(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "index.html").write_text("mine")
    with refused("FOLDER", str(runs / "index.html"), hint="another folder"):
        write_view(runs)
    assert (runs / "index.html").read_text() == "mine"
    assert main(["view", str(tmp_path / "nowhere")]) == 2
    assert_refused(capsys.readouterr().err, "FOLDER", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert main(["view", str(tmp_path / "empty")]) == 2
    assert not (tmp_path / "empty/index.html").exists()
    assert main(["view", "a", "b"]) == 2
