"""The gallery shows every figure of the newest runs, with their own numbers, and names what it leaves out."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from posbench.cli.main import main
from posbench.plots.base import FORMATS, save, sign
from posbench.report.collect import collect_entries
from posbench.report.gallery import write_gallery
from posbench.report.paper import paper_cells, paper_table
from posbench.report.tables import latex
from posbench.report.text import list_decided_claims
from posbench.run.folder import RunDir, open_run_dir
from posbench.stats.findings import FINDING_COLUMNS
from tests.browser import looks
from tests.frames import metrics, sweep
from tests.messages import assert_line_names, assert_names, refused
from tools import pages

pytestmark = pytest.mark.figures

SPECIAL = r"a & b % c $ d # e _ f { g } h ~ i ^ j \ k < l > m | n"


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stem of a small figure in all formats."""
    figure = Figure(figsize=(3, 2), layout="constrained")
    figure.add_subplot().plot([0, 1])
    figure.set_label("n = 20")
    sign(figure, ["tiny"])
    stem = tmp_path_factory.mktemp("figure") / "drawn"
    return save(figure, stem, FORMATS).with_suffix("")


def claims(*rows: tuple[str, str, str, float], kind: str = "paper") -> pd.DataFrame:
    """A findings.csv of (model, verdict, claim, value)."""
    told = dict(
        kind=kind,
        statistic="s",
        n=20,
        p=0.01,
        p_holm=0.01,
        note="",
        ci_low=-1.0,
        ci_high=9.0,
    )
    found = [
        dict(zip(("model", "verdict", "claim", "value"), row, strict=True), **told)
        for row in rows
    ]
    return pd.DataFrame(found, columns=list(FINDING_COLUMNS))


def run(
    folder: Path,
    picture: Path,
    figures: tuple[str, ...] = ("curve",),
    done: bool = True,
    **tables: pd.DataFrame,
) -> Path:
    """A run folder that holds these tables and figures."""
    (folder / "figures").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(config(folder.parents[1].name, folder.name))
    )
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    drawn(folder, picture, figures)
    command = f"posbench experiment={folder.parents[1].name}"
    book = RunDir(folder, "r1")
    packages = {"torch": "2.9", "transformers": "5.6"}
    made = {
        "command": command,
        "started": "2026-01-02T03:04:05",
        "hardware": "a CPU",
        "packages": packages,
    }
    book.write_facts("provenance.json", made)
    book.write_facts(
        "status.json",
        {"state": "done" if done else "failed", "error": None, "stages": {}},
    )
    if done:
        book.seal(command)
    return folder


def config(suite: str, name: str) -> dict[str, object]:
    facts = {
        "name": suite,
        "title": f"Paper, {suite}",
        "paper": "yu2025",
        "covers": ["Figure 3"],
    }
    return {
        "model": {"name": name.split("__")[0]},
        "experiment": {**facts, "claims": ["the <middle> is lost"]},
    }


def drawn(folder: Path, picture: Path, figures: tuple[str, ...]) -> None:
    for name in figures:
        for kind in FORMATS:
            drawing = picture.with_suffix(f".{kind}").read_bytes()
            # No two pictures are equal; readers of all formats skip a comment behind their end.
            file = folder / "figures" / f"{name}.{kind}"
            file.write_bytes(drawing + f"<!-- {folder}/{name} -->".encode())
    (folder / "figures" / "captions.json").write_text(
        json.dumps({n: f"What {n} shows." for n in figures})
    )
    (folder / "report.html").write_text(f"<p>{folder.name}</p>")


def swept(
    folder: Path,
    picture: Path,
    runs: list[Path],
    figures: tuple[str, ...],
    **tables: pd.DataFrame,
) -> Path:
    """A sweep over runs of its suite, whose outputs have moved since."""
    (folder / "figures").mkdir(parents=True)
    jobs = [
        {
            "overrides": [f"model={r.name[:4]}", f"study.x={i}"],
            "folder": f"old/{r.parent.name}/{r.name}",
            "status": 0,
        }
        for i, r in enumerate(runs)
    ]
    jobs.append({"overrides": ["study.x=lost"], "folder": None, "status": 2})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    drawn(folder, picture, figures)
    RunDir(folder).seal("posbench -m study.x=0,1")  # a sweep keeps no books
    return folder


@pytest.fixture
def many(tmp_path: Path, picture: Path) -> Path:
    """Outputs of four suites: plain runs, a sweep with figures, a sweep without, and damage."""
    out = tmp_path / "outputs"
    run(out / "fig3/v002/tiny__a", picture, ("old",))
    found = claims(
        ("tiny", "holds", "a_claim (Paper 2025)", 1.25),
        ("tiny", "inconclusive", "b", 2.0),
    )
    run(out / "fig3/v010/tiny__a", picture, ("curve", "map"), findings=found)
    run(
        out / "fig3/v010/tiny_b__a",
        picture,
        findings=claims(("tiny_b", "contradicted", "a_claim", -1.5)),
    )
    parts = [run(out / f"fig6/v001/tiny__{i}", picture, ("inner",)) for i in range(2)]
    swept(
        out / "fig6/v001/sweep__f__x",
        picture,
        parts,
        ("sweep",),
        summary=sweep([1.0, 0.0]),
    )
    first = run(out / "fig7/v001/tiny__s__1", picture, metrics=metrics())
    second = run(
        out / "fig7/v002/tiny__s__2", picture, metrics=metrics(after=[0.5, 0.5, 0.5])
    )
    run(out / "fig7/v002/tiny__s__3", picture, ("beside",))  # of no sweep
    swept(out / "fig7/v001/sweep__x__y", picture, [first, second], ())
    bad = run(out / "fig9/v001/tiny__bad", picture, metrics=metrics())
    (bad / "metrics.csv").write_text("model\n")
    run(out / "fig9/v001/tiny__open", picture, done=False)
    return out


SHOWN = {
    "fig3": {"tiny-curve", "tiny-map", "tiny_b-curve"},
    "fig6": {"sweep-sweep"},
    "fig7": {"tiny-x_0-curve", "tiny-x_1-curve"},
}


class Page(html.parser.HTMLParser):
    """Images, links and words of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.images: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "img":
            self.images.append(str(told["src"]))
        if tag == "a":
            self.links.append(str(told["href"]))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_every_figure_of_the_newest_runs_is_in_the_page_and_on_disk(many, picture):
    file = write_gallery(many)
    assert file == many / "gallery" / "index.html"
    page = Page(file)
    wanted = {
        f"figures/{suite}/{name}.svg"
        for suite, names in SHOWN.items()
        for name in names
    }
    assert set(page.images) == wanted and wanted <= set(page.links)
    found = {p.relative_to(file.parent).as_posix() for p in file.parent.rglob("*.svg")}
    assert found == wanted
    for name in wanted:
        for kind in FORMATS:
            copied = (file.parent / name).with_suffix(f".{kind}")
            drawing = picture.with_suffix(f".{kind}").read_bytes()
            assert copied.read_bytes().startswith(drawing)
            assert copied.relative_to(file.parent).as_posix() in page.links
    for link in page.links:
        there = (
            link[1:] in page_ids(file)
            if link.startswith("#")
            else (file.parent / link).is_file()
        )
        assert there, link
    assert page.words.count("What curve shows.") == 4  # fig3 twice, fig7 twice
    assert (
        "the <middle> is lost" in page.words.lower()
        and "<middle>" not in file.read_text()
    )
    assert_names(
        page.words, "tiny, tiny_b", "torch 2.9", "transformers 5.6", "2026-01-02"
    )


def test_a_run_that_several_sweeps_show_is_counted_once(
    tmp_path: Path, picture: Path
) -> None:
    """Of a sweep over two studies the runs of the second lie in another suite, where a sweep may hold them, too."""
    out = tmp_path / "outputs"
    verdicts = {
        "a/v001/tiny__1": ["holds", "inconclusive"],
        "a/v001/tiny__2": ["holds", "holds"],
        "b/v001/tiny__1": ["contradicted", "holds"],
        "b/v001/tiny__2": ["inconclusive", "holds"],
    }
    runs = []
    for name, words in verdicts.items():
        rows = [("tiny", word, f"claim {i}", 1.0) for i, word in enumerate(words)]
        runs.append(run(out / name, picture, findings=claims(*rows)))
    sweep_of_both = swept(out / "a/v001/sweep__study__1", picture, runs, ())
    jobs = json.loads((sweep_of_both / "jobs.json").read_text())
    for job, folder in zip(jobs, runs, strict=False):
        job["folder"] = f"old/{folder.relative_to(out).as_posix()}"
    (sweep_of_both / "jobs.json").write_text(json.dumps(jobs))
    RunDir(sweep_of_both).seal("posbench -m study=a,b")
    sentence = "4 runs. Verdicts on claims of the papers: 5 hold, 1 contradicted, 2 inconclusive."
    page = Page(write_gallery(out))
    assert f"1 experiment, {sentence}" in page.words
    single = run(out / "b/v001/tiny__3", picture)
    page = Page(write_gallery(out))
    assert f"2 experiments, {sentence.replace('4 runs', '5 runs')}" in page.words
    assert [entry.runs[-1].path for entry in collect_entries(out)][1:] == [single]
    # Now the runs of b are those of a sweep of b, too.
    swept(out / "b/v001/sweep__x__1", picture, runs[2:], ("sweep",))
    page = Page(write_gallery(out))
    assert f"2 experiments, {sentence}" in page.words


def test_verdicts_of_several_settings_are_not_called_claims(
    tmp_path: Path, picture: Path
) -> None:
    """Two seeds of one model, of which two jobs share a run: a claim, two verdicts."""
    runs = [
        run(
            tmp_path / f"fig/v001/tiny__{seed}",
            picture,
            findings=claims(("tiny", word, "claim", 1.0)),
        )
        for seed, word in enumerate(("holds", "contradicted"))
    ]
    swept(tmp_path / "fig/v001/sweep__x__1", picture, [*runs, runs[0]], ())
    (entry,) = collect_entries(tmp_path)
    assert [result.label for result in entry.results] == ["tiny-x_0", "tiny-x_1"]
    text = write_gallery(tmp_path).read_text()
    assert "1 claim" in text and "in 2 settings: of 2 verdicts, 1 holds" in text
    _, (_, rows) = entry.tables["claims"]
    assert [row[1] for row in rows] == ["tiny-x_0", "tiny-x_1"]


def test_an_entry_begins_with_its_verdict_and_its_copy_leads_to_the_runs(
    many: Path,
) -> None:
    """Of one page what that page says first, of several how the claims fared."""
    sweep_page = many / "fig6/v001/sweep__f__x/report.html"
    chip = '<p class="chip good">no bias</p><p class="result">All &lt;alike&gt;.</p>'
    link = '<a href="../tiny__0/report.html#position=1">run</a>'
    sweep_page.write_text(f"{chip}{link}")
    RunDir(sweep_page.parent).renew(["report.html"])
    page = write_gallery(many)
    text = page.read_text()
    parts = dict(re.findall('<section id="(.*?)">(.*?)</section>', text, re.DOTALL))
    heads = {
        name: re.findall('<span class="chip (.*?)">(.*?)</span>', part)
        for name, part in parts.items()
    }
    assert heads == {
        "fig3": [("bad", "1 of 3 hold")],
        "fig6": [("good", "no bias")],
        "fig7": [],
        "fig9": [],
    }
    assert "</span> All &lt;alike&gt;." in parts["fig6"]
    assert "Whole pages" not in parts["fig9"], "it has none"
    copy = page.parent / "pages/fig6/sweep.html"
    ((address, part),) = re.findall('href="(.*?)#(.*?)"', copy.read_text())
    target = (copy.parent / address).resolve()
    assert (target, part) == (
        many / "fig6/v001/tiny__0/report.html",
        "position=1",
    )


def test_a_caption_has_its_own_figures_and_a_picture_is_shown_once(
    picture: Path, tmp_path: Path
) -> None:
    figures = ("convergence", "theory", "curve")
    suite = tmp_path / "fig2/v001"
    for model in ("tiny", "tiny_b"):
        folder = run(suite / f"{model}__a", picture, figures)
        (folder / "figures/theory.svg").write_bytes(
            picture.with_suffix(".svg").read_bytes()
        )
        told = yaml.safe_load((folder / "config.yaml").read_text())
        told["experiment"]["panels"] = {
            "Figure 2": ["tiny_b/curve", "absent/curve"],
            "Figure 3": ["tiny_b/theory"],
            # twice the same figure, as two names find it in a run of one model
            "Figure 4": ["tiny_b/theory", "tiny_b/theory", "tiny/nothing"],
            # the same picture in the other model's run
            "Figure 5": ["tiny/theory"],
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(told))
        open_run_dir(folder).seal("posbench")
    (entry,) = collect_entries(tmp_path)
    shown = [(p.covers, p.result.label, p.figure) for p in entry.panels]
    assert shown == [
        ("Figure 2", "tiny_b", "curve"),
        (
            "Figure 2",
            "tiny",
            "curve",
        ),  # of the first run, where the named one is not shown
        ("Figure 3, Figure 4, Figure 5", "tiny_b", "theory"),
        ("", "tiny", "convergence"),
        ("", "tiny_b", "convergence"),
    ]
    text, images = pages.gallery_page([entry], "gallery")
    assert len(images) == 3 and "convergence" not in text
    assert "tiny_b: Figure 3, Figure 4, Figure 5: What theory shows." in text
    page = Page(write_gallery(tmp_path))
    assert page.images[1:] == [f"figures/fig2/{m}-{f}.svg" for _, m, f in shown]


def test_a_further_model_stands_beside_with_the_figures_of_its_page(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first"
    further = tmp_path / "further"
    run(first / "fig3/v001/tiny__a", picture)
    run(first / "fig6/v001/tiny__b", picture)
    run(further / "fig3/v001/small__a", picture)
    run(further / "fig8/v001/small__b", picture)
    own_page = tmp_path / "results" / "small.md"
    gallery = tmp_path / "docs" / "gallery.md"
    for file in (own_page, gallery):
        file.parent.mkdir()
    make_own = ["gallery", str(further), "--out", str(own_page)]
    make_both = ["gallery", str(first), "--out", str(gallery)]
    make_both += ["--beside", str(own_page)]

    assert pages.main(make_both) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"gallery DIR --out {own_page}" in error and not gallery.exists()
    assert pages.main(make_own) == 0
    assert pages.main(make_both) == 0
    text = gallery.read_text()
    links = re.findall(r"!\[.*\]\((.+)\)", text)
    assert links == [
        "gallery/fig3-tiny-curve.svg",
        "../results/small/fig3-small-curve.svg",
        "gallery/fig6-tiny-curve.svg",
    ]
    assert all((gallery.parent / link).is_file() for link in links)
    (anchor,) = re.findall(r"\(\.\./results/small\.md#(.+?)\)", text)
    assert "### Paper, fig3" in own_page.read_text() and anchor == "paper-fig3"
    assert "small" in text.partition("on [")[2][:20]


def page_ids(file: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', file.read_text()))


def test_runs_of_one_model_are_called_by_their_tasks(
    picture: Path, tmp_path: Path
) -> None:
    for number, task in enumerate(("mmlu", "ceval", "mmlu")):
        folder = run(tmp_path / f"table4/v001/tiny__{number}", picture)
        told = yaml.safe_load((folder / "config.yaml").read_text())
        told["task"] = {"name": task}
        (folder / "config.yaml").write_text(yaml.safe_dump(told))
        open_run_dir(folder).seal("posbench")
        (entry,) = collect_entries(tmp_path)
        labels = [result.label for result in entry.results]
        wanted = ["tiny", "tiny-mmlu tiny-ceval", "tiny__0 tiny__1 tiny__2"][number]
        assert labels == wanted.split()


def test_runs_that_only_a_hash_tells_apart_are_called_by_their_settings(
    picture: Path, tmp_path: Path
) -> None:
    def prefixes(*channels: int) -> list[str]:
        for number, channel in enumerate(channels):
            folder = tmp_path / f"fig10/v001/tiny__{number}"
            if not folder.exists():
                run(folder, picture)
            told = yaml.safe_load((folder / "config.yaml").read_text())
            study = {"name": "channel_subtraction", "channel": channel, "seed": 0}
            told["study"] = study
            (folder / "config.yaml").write_text(yaml.safe_dump(told))
            open_run_dir(folder).seal("posbench")
        (entry,) = collect_entries(tmp_path)
        return [entry.label_prefix(result) for result in entry.results]

    assert prefixes(591) == [""]
    assert prefixes(591, 262) == ["tiny, channel=591: ", "tiny, channel=262: "]
    # Two that no setting tells apart keep their folders' names.
    names = ["tiny, channel=591: ", "tiny__1: ", "tiny__2: "]
    assert prefixes(591, 262, 262) == names


def test_of_many_runs_the_newest_are_shown(
    picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        folder = run(tmp_path / f"fig3/v001/tiny__{number}", picture)
        book = open_run_dir(folder)
        facts = {k: v for k, v in book.facts("provenance.json").items() if k != "run"}
        book.write_facts(
            "provenance.json", facts | {"started": f"2026-01-0{3 - number}T00:00:00"}
        )
        book.seal("posbench")
    (tmp_path / "fig3/v001/tiny__0/figures/curve.svg").write_bytes(b"")
    monkeypatch.setattr("posbench.report.collect.MAX_RUNS", 1)
    (entry,) = collect_entries(tmp_path)
    assert [result.folder.name for result in entry.results] == ["tiny__1"], (
        "the newest whole one"
    )
    assert_names(entry.faults[0], "tiny__0", "damaged", "figures/curve.svg")
    (older,) = entry.faults[1:]
    assert_names(older, "1 older", "fig3", "posbench ls runs")


def test_a_suite_and_a_version_have_a_gallery_of_their_own(many, tmp_path, capsys):
    assert main(["report", str(many / "fig3")]) == 0
    assert set(Page(many / "fig3/gallery/index.html").images) == {
        f"figures/fig3/{n}.svg" for n in SHOWN["fig3"]
    }
    assert main(["report", str(many / "fig3/v002"), "--out", str(tmp_path / "g")]) == 0
    assert Page(tmp_path / "g/index.html").images[0] == "figures/fig3/tiny-old.svg"
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "g/index.html")
    assert (
        main(["report", str(many / "fig3/v002/tiny__a"), "--out", str(tmp_path / "g")])
        == 2
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["report", str(empty)]) == 2 and "DIR" in capsys.readouterr().err


def test_tables_hold_the_numbers_of_the_runs(many):
    tables = write_gallery(many).parent / "tables"
    own = [
        pd.read_csv(many / f"fig3/v010/{n}__a/findings.csv") for n in ("tiny", "tiny_b")
    ]
    found = pd.read_csv(tables / "fig3.csv")
    pd.testing.assert_frame_equal(
        found[list(FINDING_COLUMNS)],
        pd.concat(own, ignore_index=True),
        check_dtype=False,
    )
    assert found["run"].tolist() == ["tiny", "tiny", "tiny_b"]
    told = (tables / "fig3.md").read_text()
    assert (
        "| contradicted | tiny_b | a_claim | -1.50 [-1.00, 9.00] | s | 0.01 | 20 |"
        in told
    )
    sums = pd.read_csv(many / "fig6/v001/sweep__f__x/summary.csv")
    scores = pd.read_csv(tables / "fig6.csv")
    pd.testing.assert_frame_equal(scores, sums, check_dtype=False)
    both = pd.read_csv(tables / "fig7.csv")
    assert (
        both[(both["metric"] == "accuracy") & (both["run"] == "tiny-x_1")][
            "value"
        ].tolist()[4:7]
        == [0.5] * 3
    )
    assert {p.stem for p in tables.iterdir()} == set(SHOWN) and len(
        list(tables.iterdir())
    ) == 9


def test_a_papers_cells_come_first_and_are_counted(many, picture):
    folder = run(many / "table1/v001/tiny__m", picture, metrics=metrics())
    row = dict(
        model="tiny",
        method="scale_channel",
        task="kv",
        metric="accuracy",
        source="Table 1",
        n=500,
    )
    places = {"0": 0.97, "1": 0.2, "2": 0.9, "all": 0.93}
    reference = [
        {**row, "gold_position": place, "value": value}
        for place, value in places.items()
    ]
    (folder / "reference.json").write_text(
        json.dumps(
            [*reference, {**row, "model": "big", "gold_position": "0", "value": 0.5}]
        )
    )
    RunDir(folder, "r1").seal("posbench experiment=table1")
    page = write_gallery(many)
    found = pd.read_csv(page.parent / "tables/table1.csv")
    assert found["paper"].tolist() == list(places.values()) and found["ours"].tolist()[
        :3
    ] == [
        0.96,
        0.9,
        0.92,
    ]
    assert found["difference"].round(9).tolist()[:3] == [-0.01, 0.7, 0.02]
    told = (page.parent / "tables/table1.md").read_text().splitlines()
    assert told[0] == "| model | method |  | 0 | 1 | 2 | all |" and told[2].startswith(
        "| tiny | scale_channel | paper % | 97.0 |"
    )
    tally = found["verdict"].value_counts()
    assert (
        f"Cells of the paper: {tally['agrees']} agree" in Page(page).words
        and tally["differs"] == 1
    )
    assert (page.parent / "tables/table1-scores.csv").is_file()


def test_what_is_damaged_unfinished_or_failed_is_named_and_left_out(many):
    words = " ".join(Page(write_gallery(many)).words.split())
    for said in (
        "v001/tiny__bad is damaged (metrics.csv); make it again: posbench experiment=fig9",
        "v001/tiny__open is unfinished; go on with: posbench experiment=fig9",
        "failed: study.x=lost (exit status 2)",
    ):
        assert said in words
    assert (
        not (many / "gallery/figures/fig9").exists() and "We see: Nothing" not in words
    )
    # A damaged run of a newer version does not hide the whole ones of an older.
    shutil.copytree(many / "fig9/v001/tiny__bad", many / "fig3/v011/tiny__a")
    (entry,) = (entry for entry in collect_entries(many) if entry.name == "fig3")
    assert [result.folder.parent.name for result in entry.results] == [
        "v010"
    ] * 2 and len(entry.faults) == 1


def test_a_sweep_that_is_drawn_again_stays_whole(many):
    folder = many / "fig6/v001/sweep__f__x"
    assert main(["report", str(folder)]) == 0
    assert open_run_dir(folder).damaged() == [] and open_run_dir(folder).done
    (entry,) = (entry for entry in collect_entries(many) if entry.name == "fig6")
    (result,) = entry.results
    assert result.figures["sweep"].startswith("Left: score over all positions")
    (folder / "figures" / "sweep.svg").write_bytes(b"")
    assert open_run_dir(folder).damaged() == ["figures/sweep.svg"]


def test_a_second_gallery_takes_the_place_of_the_first_and_of_nothing_else(
    many, tmp_path
):
    page = write_gallery(many)
    before = {p: p.read_bytes() for p in page.parent.rglob("*") if p.is_file()}
    write_gallery(many)
    assert {p: p.read_bytes() for p in page.parent.rglob("*") if p.is_file()} == before
    shutil.rmtree(many / "fig3")
    write_gallery(many)
    assert "fig3" not in page.read_text() and not list(page.parent.rglob("*fig3*"))
    other = tmp_path / "mine"
    other.mkdir()
    (other / "index.html").write_text("my page")
    with refused("--out", str(other), allowed=("folder", "gallery"), hint="folder"):
        write_gallery(many, other)
    assert [p.name for p in other.iterdir()] == ["index.html"]
    assert sorted(p.name for p in many.iterdir() if "gallery" in p.name) == ["gallery"]


def test_latex_has_no_special_character_left(many):
    text = latex(["a_b", "what & why"], [[SPECIAL, "1"], ["x" * 60, "<0.001"]])
    body = re.search(r"\\toprule(.*)\\bottomrule", text, re.DOTALL)
    assert body
    # What LaTeX knows is taken out; of the signs only the ends of cells and lines may be left.
    known = r"\\text(?:backslash|ascii(?:tilde|circum)|less|greater|bar)\b(?:\s*\{\})?"
    known += r"|\\[&%$#_{}]|\\midrule|\\space"
    plain = re.sub(known, "", body[1])
    assert not re.search(r"[%$#_{}~^<>|]", plain), plain
    assert (
        plain.count("&") == 3
        and plain.count("\\\\") == 3
        and plain.replace("\\\\", "").count("\\") == 0
    )
    assert re.search(r"\\begin\{tabular\}\{p\{0\.30\\linewidth\}l\}", text)
    assert "longtable" in latex(["a"], [["1"]] * 41)
    written = {
        file.stem: file.read_text()
        for file in (write_gallery(many).parent / "tables").glob("*.tex")
    }
    assert set(written) == set(SHOWN) and "a\\_claim" in written["fig3"]


def test_a_papers_cells_stand_in_its_layout():
    row = dict(model="tiny", method="none", task="kv", metric="accuracy")
    places = {"0": 0.97, "1": 0.2, "all": 0.7}
    table, _ = paper_cells(
        metrics(), [{**row, "gold_position": p, "value": v} for p, v in places.items()]
    )
    header, lines = paper_table(table)
    assert header == ["model", "method", "", "0", "1", "all"]
    assert [line[2:] for line in lines] == [
        ["paper %", "97.0", "20.0", "70.0"],
        [
            "ours %",
            "98.0 [95.0, 100.0]".replace("100.0", "101.0"),
            "60.0 [57.0, 63.0]",
            "84.0 [81.0, 87.0]",
        ],
        ["difference", "+1.0", "+40.0", "+14.0"],
        ["verdict", "agrees", "differs", "differs"],
    ]


def test_what_we_see_names_the_decided_claims():
    rows = [
        ("tiny", "holds", "A (Paper 2025, Figure 1)", 1.0),
        ("tiny_b", "holds", "A (Paper 2025, Figure 1)", 1.0),
    ]
    rows += [
        ("tiny", "holds", "B (the middle)", 1.0),
        ("tiny_b", "contradicted", "B (the middle)", 1.0),
    ]
    rows += [("tiny", "inconclusive", "C", 1.0), ("tiny_b", "not testable", "C", 1.0)]
    said = list_decided_claims(
        pd.concat([claims(*rows), claims(("tiny", "holds", "D", 1.0), kind="control")])
    )
    holds, _, others = said.partition("Contradicted")
    assert_names(holds, "A (both models)", "(tiny)")
    assert_names(others, "(tiny_b)", "1 inconclusive", "1 not testable")
    assert (
        list_decided_claims(claims(("", "holds", "D", 1.0), kind="control"))
        == "Holds: D."
    )
    assert (
        list_decided_claims(claims(("", "inconclusive", "D", 1.0))) == "1 inconclusive."
    )
    mixed = claims(
        ("tiny", "holds", "E (p. 1)", 1.0), ("tiny", "inconclusive", "E (p. 1)", 0.1)
    )
    assert "Holds: E (not in every test)." in list_decided_claims(mixed)
    many = list_decided_claims(
        claims(*[("tiny", "holds", f"claim {i}", 1.0) for i in range(9)])
    )
    assert many.count("claim ") == 4 and many.endswith("; 5 more.")


def test_what_we_see_of_a_search_and_of_a_study_of_times(tmp_path, picture):
    check = dict(
        measure="loss",
        found=0.9,
        unmodified=1.5,
        gain=0.6,
        ci_low=0.4,
        ci_high=0.8,
        n=120,
    )
    times = dict(
        work="8 tokens", base="none", way=["none", "ms_poe"], ratio=[1.0, 1.25]
    )
    times |= dict(ratio_min=[1.0, 1.2], ratio_max=[1.0, 1.5])
    run(tmp_path / "found/v001/tiny__a", picture, held_back=pd.DataFrame([check]))
    folder = run(
        tmp_path / "slow/v001/tiny__b",
        picture,
        done=False,
        generation=pd.DataFrame(times),
    )
    (folder / "study.json").write_text(
        json.dumps({"study": "latency", "tables": ["generation"]})
    )
    RunDir(folder, "r1").seal("")
    found, slow = collect_entries(tmp_path)
    told = (
        "loss 0.9, unmodified 1.5 on 120 held-back prompts, gain 0.600 [0.400, 0.800]"
    )
    assert found.summary == f"The search lowers the loss: {told}."
    said = "ms_poe takes 1.25 times the time of unmodified (8 tokens; 1.20 to 1.50 over rounds)."
    assert slow.summary == said


def test_the_gallery_in_the_documentation(many, tmp_path, capsys):
    page = tmp_path / "docs" / "shown.md"
    page.parent.mkdir()
    page.write_text("# Gallery\n\n<!-- gallery -->\n<!-- /gallery -->\nend\n")
    (page.with_suffix("")).mkdir()
    for name in ("old.png", "old.svg"):
        (page.with_suffix("") / name).write_bytes(b"")
    assert pages.main(["gallery", str(many), "--out", str(page)]) == 0, (
        capsys.readouterr().err
    )
    text = page.read_text()
    assert text.startswith("# Gallery") and text.endswith("end\n")
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (
        len(images) == len(set(images)) == 6 and "shown/fig6-sweep-sweep.svg" in images
    )
    assert {f"shown/{p.name}" for p in page.with_suffix("").iterdir()} == set(images)
    assert_line_names(text, "We see", "Holds", "a_claim (tiny)", "a_claim (tiny_b)")
    assert "The <middle> is lost." in text and "tiny__bad is damaged" in text
    page.write_text("no marks")
    assert (
        pages.main(["gallery", str(many), "--out", str(page)]) == 2
        and page.read_text() == "no marks"
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(width, many):
    found = looks(write_gallery(many), width)
    assert found["lost"] == [] and found["shown"] == 9 and found["width"] == width
    assert found["page"] <= width and found["cut"] == []
