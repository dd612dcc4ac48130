"""What README and docs say holds: links lead somewhere, commands run, the notebook and code blocks work."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from posbench.pipeline.compose import compose
from posbench.pipeline.config import check_config
from posbench.run.folder import PREDICTIONS
from tests.cli import test_examples, test_experiments, test_kills, test_tasks
from tests.conftest import Result, config_of, run_folders
from tests.plugins import forget, install_example

reader = test_tasks.reader

ROOT = Path(__file__).parents[1]
READ = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
"""Pages that show runs; the next ones show verbs too."""
TOLD = [
    *READ,
    *(
        ROOT / f"{name}/README.md"
        for name in ("outputs", "experiments", "experiments/results")
    ),
]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs").glob("*.ipynb"),
    TOLD[-3],
]
PAGES += [*(ROOT / "experiments").rglob("*.md"), *(ROOT / "posbench").rglob("*.md")]
VERBS = (
    "diagnose",
    "order",
    "ls",
    "fetch",
    "validate",
    "report",
    "rescore",
    "show",
    "figures",
    "lm_eval",
    "check-data",
    "compare",
    "export",
    "verify",
    "push",
    "submit",
    "jobs",
    "collect",
    "resume",
)

APART = (
    "diagnose",
    "order",
    "fetch",
    "figures",
    "lm_eval",
    "validate",
    "export",
    "verify",
    "push",
    "submit",
    "jobs",
    "collect",
    "resume",
)
"""Verbs that have tests of their own."""
SHORT = {"shape": "small", "tokens": "8", "pairs": "[4]", "examples": "2"}
"""Of a throughput, whose documents set what takes minutes."""


def prose(file: Path) -> str:
    """A page's text without code; of a notebook its text cells."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "markdown"
        )
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(file: Path) -> set[str]:
    """What a link to a heading ends in, as GitHub makes it."""
    seen = Counter[str]()
    found = set()
    for title in re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```", "", file.read_text(), flags=re.S | re.M),
        re.M,
    ):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(file: Path) -> Iterator[str]:
    """Links and images of a page that lead to no file of the repository; the site has no folders."""
    for link in re.findall(r"\]\(([^()\s]+)\)|<img [^>]*src=\"([^\"]+)\"", prose(file)):
        target, _, anchor = unquote("".join(link)).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        to = (file.parent / target).resolve() if target else file
        # Other folders are this machine's: what a reader gets is the repository.
        if (
            not to.is_file()
            or not to.is_relative_to(ROOT)
            or (anchor and anchor not in anchors(to))
        ):
            yield "".join(link)


@pytest.mark.parametrize(
    "file", PAGES, ids=lambda file: file.relative_to(ROOT).as_posix()
)
def test_links_and_images_lead_somewhere(file: Path) -> None:
    assert not list(broken(file))


def test_a_broken_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# A b, c\n\n```\n# d\n```\n")
    good = '[a](b.md) [b](b.md#a-b-c) `[x](y)` <https://x.org> [c](https://x.org/y) <img src="b.md">'
    (tmp_path / "e").mkdir()
    bad = '[a](c.md) [b](b.md#d) ![c](c.png) <img width="3" src="d.png"> [e](/etc/hosts) [f](e)'
    (tmp_path / "a.md").write_text(f"{good}\n{bad}\n")
    assert list(broken(tmp_path / "a.md")) == [
        "c.md",
        "b.md#d",
        "c.png",
        "d.png",
        "/etc/hosts",
        "e",
    ]


def shown(file: Path) -> Iterator[list[str]]:
    """Commands of a page, as lines of a block or between backticks, without those that have placeholders."""
    for line in file.read_text().splitlines():
        for found in re.findall(
            r"(?:`|^(?:    )?)posbench((?: [^`#]*)?)(?=`|#|$)", line
        ):
            text = re.split(r"  +", found.strip())[0]
            if not re.search(r"[A-Z]{3}|my_(files|words)", text):
                yield shlex.split(text)


def is_run(args: Sequence[str]) -> bool:
    """Whether a command runs the pipeline; a single word without a value is prose or a verb."""
    return not args or (args[0] not in VERBS and any("=" in arg for arg in args))


RUNS = list(
    dict.fromkeys(
        shlex.join(args) for file in READ for args in shown(file) if is_run(args)
    )
)


def told(text: str) -> dict[str, str]:
    """What a command sets."""
    return dict(arg.split("=", 1) for arg in shlex.split(text) if "=" in arg)


def needs_no_weights(text: str) -> bool:
    """Whether a command runs on an embedded model in this process, and in less than hours."""
    values = told(text)
    config = test_experiments.EVERY.get(values.get("experiment", ""), {})
    weights = config.get("experiment", {}).get("needs_weights")
    hours = (
        values.get("study") == "embedded_model" or values.get("study.preset") == "paper"
    )
    served = "model.base_url" in values  # tests of their own start the servers
    lacks = weights or hours or served or values.get("runtime") == "gpu"
    return values.get("model", "tiny").startswith("tiny") and not lacks


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plug-in that the documents install."""
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    install_example(tmp_path / "site-packages")
    forget()
    yield
    forget()


@pytest.mark.usefixtures("plugin")
def test_the_runs_that_documents_show_compose_and_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    # An experiment alone is checked by tests of its own; nothing at all would check every choice.
    for text in RUNS:
        if text and not re.fullmatch(r"experiment=\w+", text):
            for job in compose(shlex.split(text)).composed:
                check_config(job)


def shrunk(text: str, reader: Path, files: Path) -> list[str]:
    """A command with all that costs time made small, unless it sets that itself."""
    values = told(text)
    args = shlex.split(text)
    if values.get("study") == "throughput":
        args = [
            f"{key}={SHORT.get(key.removeprefix('study.'), value)}"
            for key, value in values.items()
        ]
    if values.get("experiment") in test_experiments.EVERY:
        small = test_experiments.shrunken(values["experiment"], reader, files)
    elif "--config-dir" in args:
        small = (
            test_examples.SMALL[2:]
            if "experiment" in values
            else ["runtime.resamples=100"]
        )
    elif "study" in values:
        small = test_kills.JOBS[values["study"]].settings
    elif (
        "search"
        in config_of(
            *(
                arg
                for arg in args
                if arg != "-m" and not arg.startswith("method.factor")
            )
        ).stages
    ):
        small = test_kills.JOBS[values.get("search", "channel")].settings
    else:
        small = test_kills.FEW
    group = r"(study|search|method|experiment|stages)="
    own = [
        s.replace("{{", "{").replace("}}", "}") for s in small if not re.match(group, s)
    ]
    return [*args, *(s for s in own if s.split("=")[0] not in values)]


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("text", [*filter(needs_no_weights, RUNS)])
def test_the_runs_that_documents_show_run(
    text: str,
    reader: Path,
    tmp_path: Path,
    outputs: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "files").mkdir()
    result = posbench(*shrunk(text, reader, tmp_path / "files"))
    assert result.status == 0, result.err
    assert all(
        (folder / "DONE").is_file() for folder in run_folders(outputs)
    ) and run_folders(outputs)


def verbs(file: Path) -> Iterator[list[str]]:
    """Verbs with arguments that a page shows, placeholders included; prose names verbs without any."""
    for found in re.findall(
        r"(?:`|^(?:    )?)posbench ([a-z_-]+ [^`#\n]+)", file.read_text(), re.MULTILINE
    ):
        args = shlex.split(re.split(r"  +", found.strip())[0])
        if args[0] in VERBS:
            yield args


@pytest.mark.slow
def test_the_verbs_that_documents_show_run(
    small: list[str],
    tmp_path: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two runs and a study; what downloads, takes hours or sends jobs is tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    study = ["study=bucket_search", *test_kills.JOBS["bucket_search"].settings[1:]]
    for args in (small, study, [*small, "runtime.resamples=101"]):
        assert posbench(*args).status == 0
    runs = [
        folder
        for folder in run_folders(tmp_path / "outputs")
        if "random" in folder.name
    ]
    (tmp_path / "my_words.jsonl").symlink_to(ROOT / "tests/data/own/words.jsonl")
    logged = (ROOT / "tests/data/logs/plain.jsonl.gz").read_bytes()
    (tmp_path / "my_log.jsonl").write_bytes(gzip.decompress(logged))
    here = {
        "FILE.jsonl": "FILE",
        "FILE": "tests/data/own/documents.jsonl",
        "RUN1": str(runs[0]),
        "RUN2": str(runs[1]),
        "RUN": str(runs[0]),
        "DIR": str(runs[0]),
    }
    with (runs[0] / PREDICTIONS).open(encoding="utf-8") as rows:
        here[" ID"] = f" {json.loads(next(rows))['id']}"
    hashes = cycle(folder.name.rpartition("__")[2] for folder in runs)
    for text in sorted({shlex.join(args) for file in TOLD for args in verbs(file)}):
        if text.split()[0] not in APART:
            for placeholder, file in here.items():
                text = text.replace(placeholder, file)
            text = re.sub(r"\b[0-9a-f]{8}\b", lambda _: next(hashes), text)
            result = posbench(*shlex.split(text), verb=True)
            assert result.status == 0, (text, result.err)


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M
    )
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == block.rpartition("  # ")[2].strip()


def cells() -> list[str]:
    notebook = json.loads(
        (ROOT / "docs" / "first_hour.ipynb").read_text(encoding="utf-8")
    )
    # Outputs would go stale, and every run would change the file: the site makes them.
    assert not any(
        cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"]
    )
    return [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
def test_the_notebook_removes_the_bias_that_it_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names: dict[str, Any] = {}
    for cell in cells():
        exec(compile(cell, "first_hour.ipynb", "exec"), names)
    assert names["gain"].ci_low > 0 and names["change"].ci_low > 0
    at = names["by_position"](names["before"])["mean"]
    assert at.iloc[[0, -1]].mean() > at.iloc[3:6].mean() + 0.3
