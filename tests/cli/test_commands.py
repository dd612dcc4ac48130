"""The verbs, the default run, and sweeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from posbench import __version__, load, paths
from posbench.cli.ls import GROUP_OF_KIND
from posbench.cli.main import VERBS
from posbench.errors import choices
from posbench.report import paper, sweep, text
from posbench.report.folder import read_csv
from posbench.run.folder import open_run_dir
from posbench.schema import build
from posbench.tasks import KVRetrieval
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names, assert_names, assert_refused

FIXED = [
    "method.channel=3",
    "method.factor=0.5",
    "method.layers=[1,2]",
    "stages=[evaluate]",
]


def test_help_and_version(posbench: Callable[..., Result]) -> None:
    for flag in ("-h", "--help", "help"):
        result = posbench(flag, verb=True)
        assert (
            result.status == 0
            and "posbench task=kv_retrieval model=mistral7b method=scale_channel"
            in result.out
        )
        assert result.out.count("\n") < 55 and all(
            f"\n  {verb}  " in result.out for verb in VERBS
        )
    assert posbench("--version", verb=True).out == f"posbench {__version__}\n"


def test_ls_names_every_file(posbench: Callable[..., Result]) -> None:
    everything = posbench("ls", verb=True)
    assert everything.status == 0
    for verb, group in GROUP_OF_KIND.items():
        listed = posbench("ls", verb, verb=True).out
        assert [line.split("\t")[0] for line in listed.splitlines()[1:]] == choices(
            *paths.group_folders(group)
        )
        assert listed in everything.out
    assert all(
        name in everything.out for name in choices(*paths.group_folders("experiment"))
    )
    assert "stages=[search]" in posbench("ls", "methods", verb=True).out


def test_a_broken_job_of_a_sweep_is_no_ok(posbench: Callable[..., Result]) -> None:
    sweep = ["-m", "model=tiny", "method=none,scale_channel"]
    broken = [*sweep, "model.scale_channel.channel=3"]
    result = posbench("validate", *broken, verb=True)
    assert result.status == 2 and result.out.startswith("BAD")
    assert_refused(result.err, "model.scale_channel.channel", 3)
    assert posbench("fetch", "--dry-run", *broken, verb=True).status == 2


def test_validate_names_the_jobs_of_a_sweep(posbench: Callable[..., Result]) -> None:
    result = posbench("validate", "-m", "task.limit=4", "task.pairs=16,8", verb=True)
    first, second = result.out.split("\njob ")[1:]
    assert first.startswith("1 of 2: task.pairs=16\n")
    assert second.startswith("2 of 2: task.pairs=8\n")
    alone = posbench("validate", "task.limit=4", "task.pairs=8", verb=True)
    assert "job " not in alone.out
    assert second.partition("\n")[2] == alone.out.partition("\n")[2]


def test_no_method_at_all_is_refused(posbench: Callable[..., Result]) -> None:
    result = posbench("validate", "~method", verb=True)
    assert result.status == 2
    assert_refused(result.err, "method", hint="method=none")


def test_validate_checks_everything_and_runs_nothing(
    posbench: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "posbench.pipeline.execute.execute",
        lambda *args, **kwargs: pytest.fail("validate ran a job"),
    )
    # Two of each group: test_config.py composes all of them.
    monkeypatch.setattr(
        "posbench.cli.verbs.choices", lambda *folders: choices(*folders)[:2]
    )
    result = posbench("validate", verb=True)
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    groups = [
        f"{g}={n}"
        for g in GROUP_OF_KIND.values()
        for n in choices(*paths.group_folders(g))[:2]
    ]
    for name in [
        *groups,
        *(f"experiment={n}" for n in choices(*paths.group_folders("experiment"))[:2]),
    ]:
        assert any(line.startswith("ok ") and name in line.split() for line in lines), (
            name
        )
    assert len(lines) == 2 * (len(GROUP_OF_KIND) + 1)
    assert list(tmp_path.iterdir()) == []
    result = posbench("validate", "-m", "task.pairs=16,1,65", verb=True)
    assert (
        result.status == 2
        and result.err.count("\n") == 2
        and "task.pairs = 1:" in result.err
        and "task.pairs = 65:" in result.err
    )


def test_cfg_prints_the_composed_config(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("--cfg", "job", "task.pairs=16")
    assert (
        result.status == 0 and "pairs: 16" in result.out and "name: tiny" in result.out
    )
    assert not outputs.exists()


def test_the_default_run_on_the_embedded_model(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """``posbench`` as typed first, with fewer examples: all four stages and everything that the folder
    promises."""
    few = [
        "task.limit=4",
        "task.calibration_examples=6",
        "search.strings=40",
        "runtime.intervene_examples=2",
    ]
    result = posbench(*few, "runtime.resamples=100")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert folder.parent == outputs / "kv_retrieval/v001" and folder.name.startswith(
        "tiny__scale_channel__"
    )
    names = {p.name for p in folder.iterdir()}
    assert names >= {
        "config.yaml",
        "provenance.json",
        "status.json",
        "predictions.jsonl",
        "metrics.csv",
        "search.csv",
        "channels.csv",
        "found.yaml",
        "attention.csv",
        "figures",
        "report.html",
        "DONE",
    }
    table = pd.read_csv(folder / "metrics.csv", dtype={"gold_position": str})
    assert (
        set(table["method"]) == {"none", "scale_channel"}
        and len(set(table["gold_position"])) == 10
    )
    assert list((folder / "figures").iterdir())
    facts = json.loads((folder / "provenance.json").read_text())
    assert (
        facts["command"].startswith("posbench task.limit=4")
        and facts["posbench"] == __version__
    )
    assert "report.html" in result.out
    page = (folder / "report.html").read_text()
    names = ["time", "tokens/s", "peak memory"]
    assert (
        all(f"<td>{name}" in page for name in names) and "\ntime: search " in result.out
    )
    assert set(json.loads((folder / "status.json").read_text())["spent"]) >= {
        "search",
        "evaluate",
        "report",
    }


def test_a_sweep_judges_its_methods_and_asks_each_value_once(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """The unmodified model is no fix that failed, and one setting has no range."""
    methods = ["model=tiny", "method=none,documents_twice", "task.limit=4,4"]
    result = posbench("-m", *methods, "stages=[evaluate,report]")
    assert result.status == 0, result.err
    assert len([f for f in run_folders(outputs) if "sweep" not in f.name]) == 2
    head = result.out.rpartition("average over gold positions")[2]
    assert " in 1 of 2" not in head and "runs from" not in head


def test_a_sweep_over_a_task_keeps_each_runs_own_baseline(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    rest = [o for o in small if not o.startswith(("stages", "task.seed"))]
    result = posbench(
        "-m",
        *rest,
        *FIXED,
        "task.seed=0,1",
        "method.factor=1,0",
    )
    assert result.status == 0, result.err
    (swept,) = outputs.glob("kv_retrieval/v001/sweep__*")
    summary = read_csv(swept / "summary.csv")
    header, rows, _ = sweep.sweep_table(summary, sweep.swept_columns(summary))
    assert len(rows) == 4
    for row in rows:
        cells = dict(zip(header[1:], row[1:], strict=True))
        own = pd.read_csv(
            outputs / "kv_retrieval" / cells["run"] / "metrics.csv",
            dtype={"gold_position": str},
        )
        own = own[
            (own["gold_position"] == "all") & (own["metric"] == "accuracy")
        ].set_index("method")["value"]
        assert cells["unmodified"].startswith(f"{100 * own['none']:.1f} [")
        assert cells["accuracy"].startswith(f"{100 * own['scale_channel']:.1f} [")


def test_a_paper_is_compared_with_the_runs_in_its_setting_only(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    rest = [
        o
        for o in small
        if not o.startswith(("stages", "task.pairs", "task.positions", "model.name"))
    ]
    setting = [
        "experiment.reference.setting.pairs=12",
        "experiment.reference.setting.prompt=compact",
        "model.name=mistral7b",
    ]
    result = posbench(
        "-m",
        "experiment=yu2025_table1_kv",
        *rest,
        *FIXED,
        *setting,
        "task.pairs=8,12",
        "stages=[evaluate,report]",
    )
    assert result.status == 0, result.err
    (swept,) = outputs.glob("yu2025_table1_kv/v001/sweep__*")
    summary = read_csv(swept / "summary.csv")
    reference = json.loads((swept / "reference.json").read_text())
    _, rows = paper.reference_table(*paper.paper_cells(summary, reference))
    ran = [row for row in rows if row[0] != "not measured"]
    assert len(ran) == 2 * 6, "two methods, five positions and the average, of one run"
    assert {row[2] for row in rows if row not in ran} == {"ms_poe"}, (
        "which no run measured"
    )
    here = (
        (summary["task.pairs"].astype(str) == "12")
        & (summary["gold_position"] == "all")
        & (summary["metric"] == "accuracy")
    )
    fits = summary[here]
    assert len(fits) == 2
    average = {row[2]: row[5] for row in rows if row[3] == "all"}
    for method, value in zip(fits["method"], fits["value"], strict=True):
        assert average[method].startswith(f"{100 * value:.1f} [")


def test_shortened_prompts_are_counted(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    args = [
        *small,
        *FIXED,
        "stages=[intervene,evaluate,report]",
        "task.positions=[0,11]",
        "model.context_window=41",
    ]
    refused = posbench(*args)
    assert (
        refused.status == 2
        and "task.truncation=middle" in refused.err
        and run_folders(outputs) == []
    )
    result = posbench(*args, "task.truncation=middle")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    lm = load(config["model"]["path"])
    task = build(
        KVRetrieval,
        {k: v for k, v in config["task"].items() if k != "_target_"},
        "task",
    )
    lengths = {e.id: len(lm.encode(e.prompt).ids) for e in task.examples("evaluation")}
    over = {name: length - 40 for name, length in lengths.items() if length > 40}
    rows = [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 48 and all(
        row["dropped"] == over.get(row["id"], 0) for row in rows
    )
    mean = sum(over.values()) / len(over)
    sentence = f"{len(over)} of 24 prompts were shortened to the context window (mean {mean:.0f} tokens removed)."
    assert (
        sentence in " ".join(result.out.split())
        and sentence in (folder / "report.html").read_text()
    )
    assert "intervene: " in result.out
    # A prompt counts once, whatever the number of methods, and the mean is over the shortened ones.
    rows = [
        {"id": name, "dropped": n, "method": method}
        for method in "ab"
        for name, n in (("x", 0), ("y", 10), ("z", 20))
    ]
    assert text.describe_cut_prompts(rows).startswith(
        "2 of 3 prompts were shortened to the context window (mean 15 tokens"
    )
    assert text.describe_cut_prompts(rows[:1]) == ""


def test_a_typed_channel_is_the_only_one_searched(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    result = posbench(
        *small,
        "method.channel=3",
        "search.factors=[0.5,-1.0]",
        "stages=[search,intervene]",
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert set(pd.read_csv(folder / "search.csv")["channel"]) == {3}
    applied = json.loads((folder / "method.json").read_text())
    found = yaml.safe_load((folder / "found.yaml").read_text())["scale_channel"]
    assert (
        applied["channel"] == 3
        and applied["factor"] == found["factor"]
        and applied["layers"] == found["layers"]
    )
    assert_line_names(result.out, "paste", "YAML")
    two = posbench(*small, "method.channel=[3,5]")
    assert two.status == 2
    assert_refused(
        two.err,
        "method.channel",
        allowed="one channel",
        hint="stages=[intervene,evaluate,report]",
    )


@pytest.mark.parametrize(
    ("code", "target", "allowed", "hint"),
    [
        ("def x(:", "broken_one.Own", "invalid syntax", "line 1"),
        ("import absent_package", "broken_two.Own", "import path", "absent_package"),
        (
            "from pathlib import Path",
            "broken_three.Path",
            "a dataclass",
            "dataclass",
        ),
    ],
)
def test_a_mistake_in_ones_own_module_is_one_line(
    code: str,
    target: str,
    allowed: str,
    hint: str,
    posbench: Callable[..., Result],
    tmp_path: Path,
) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / f"{target.split('.')[0]}.py").write_text(code)
    (tmp_path / "method" / "own.yaml").write_text(f"_target_: {target}\n")
    result = posbench("--config-dir", str(tmp_path), "method=own", "model=tiny")
    assert result.status == 2
    assert_refused(result.err, "method._target_", target, allowed=allowed, hint=hint)


def test_a_users_own_method_and_a_chat_template_move_the_hash(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "from posbench.methods.unmodified import Unmodified\nclass Own(Unmodified):\n    pass\n"
    module = tmp_path / "ownmethod.py"
    conf = tmp_path / "conf" / "method"
    conf.mkdir(parents=True)
    module.write_text(code)
    (conf / "own.yaml").write_text("_target_: ownmethod.Own\nname: own\n")
    monkeypatch.syspath_prepend(tmp_path)
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    rest = [o for o in small if not o.startswith(("stages", "model.path"))]
    command = [
        "--config-dir",
        str(conf.parent),
        *rest,
        f"model.path={copy}",
        "method=own",
        "stages=[evaluate]",
    ]
    template = copy / "chat_template.jinja"
    changes = (
        lambda: None,
        lambda: module.write_text(code + "CHANGED = 1\n"),
        lambda: template.write_text("x{{ messages[0].content }}"),
    )
    for change in changes:
        change()
        result = posbench(*command)
        assert result.status == 0 and "finished before" not in result.out, result.err
    assert len(run_folders(outputs)) == 3


def test_a_sweep_ends_with_one_table(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    result = posbench("-m", *small, *FIXED, "method.factor=1,0")
    assert result.status == 0, result.err
    assert len(run_folders(outputs)) == 2
    (swept,) = outputs.glob("kv_retrieval/v001/sweep__*")
    assert swept.name.startswith("sweep__method-factor__")
    summary = pd.read_csv(
        swept / "summary.csv", dtype={"gold_position": str, "method.factor": str}
    )
    assert set(summary["method.factor"]) == {"1", "0"}
    average = summary[
        (summary["gold_position"] == "all")
        & (summary["metric"] == "accuracy_difference")
    ].set_index("method.factor")
    assert average.loc["1", "value"] == 0.0
    # Each run's own rows, unchanged, under its setting.
    for folder in run_folders(outputs):
        own = pd.read_csv(folder / "metrics.csv", dtype={"gold_position": str})
        part = summary[summary["run"] == f"{folder.parent.name}/{folder.name}"]
        pd.testing.assert_frame_equal(
            part[list(own.columns)].reset_index(drop=True), own
        )
        # Also of the run that made the rows of both.
        status = json.loads((folder / "status.json").read_text())
        in_stages = sum(cost["seconds"] for cost in status["spent"].values())
        assert status["seconds"] > in_stages - 0.1
    assert (swept / "report.html").is_file()
    assert [job["status"] for job in json.loads((swept / "jobs.json").read_text())] == [
        0,
        0,
    ]
    assert posbench("report", str(swept), verb=True).status == 0


def test_a_failing_job_does_not_stop_the_others(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    result = posbench("-m", *small, *FIXED, "method.channel=16,3,-1")
    assert result.status == 2
    assert result.err.count("posbench: ") == 2 and "Traceback" not in result.err
    assert (
        "method.channel = [16]" in result.err and "method.channel = [-1]" in result.err
    )
    assert len(run_folders(outputs)) == 1
    (swept,) = outputs.glob("kv_retrieval/v001/sweep__*")
    assert [job["status"] for job in json.loads((swept / "jobs.json").read_text())] == [
        2,
        0,
        2,
    ]


def test_a_defect_in_one_job_does_not_stop_the_others(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from posbench.pipeline import execute as runner

    execute = runner.execute
    seen = []

    def defective(config, **arguments):  # type: ignore[no-untyped-def]
        seen.append(config)
        if len(seen) == 1:
            return execute(None, **arguments)  # a defect: it fails in posbench
        return execute(config, **arguments)

    monkeypatch.setattr(runner, "execute", defective)
    assert posbench("-m", *small, *FIXED, "method.factor=1,0").status == 1
    assert (
        len(seen) == 2
        and [open_run_dir(folder).done for folder in run_folders(outputs)].count(True)
        == 1
    )
    # A defect of what jobs share stops none of them.
    seen.append(None)
    monkeypatch.setattr("posbench.pipeline.stages.evaluate.fill", int)
    assert posbench("-m", *small, *FIXED, "method.factor=0.5,0.25").status == 0
    assert len(seen) == 5
    # On its own the defect is shown as what it is.
    seen.clear()
    with pytest.raises(AttributeError):
        posbench(*small, *FIXED)


def test_a_sweep_of_failures_only(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    result = posbench("-m", *small, *FIXED, "method.channel=16,17")
    assert (
        result.status == 2
        and run_folders(outputs) == []
        and not list(outputs.glob("**/sweep__*"))
    )


@pytest.fixture
def own(tmp_path: Path, checkpoint: Path) -> Path:
    """A user's own config folder with a model."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    constants = "scale_channel: {channel: 3, factor: 0.0, layers: [1, 2]}"
    text = f"name: mine\npath: {checkpoint}\ndtype: float32\n{constants}\n"
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(text)
    return tmp_path / "conf"


def test_a_config_dir_of_the_user(
    own: Path, posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    rest = [o for o in small if not o.startswith(("model", "stages"))]
    result = posbench(
        "--config-dir", str(own), "model=mine", *rest, "stages=[evaluate]"
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert folder.name.startswith("mine__scale_channel__")
    assert "3\n" in (folder / "config.yaml").read_text()
    wrong = posbench("--config-dir", str(own), "model=mien")
    assert wrong.status == 2
    assert_refused(
        wrong.err, "model", "mien", allowed=("mine", "mistral7b"), hint="mine"
    )
    assert (
        posbench("validate", "--config-dir", str(own), "model=mine", verb=True).status
        == 0
    )
    listed = posbench("ls", "models", "--config-dir", str(own), verb=True).out
    assert "mine" in listed and "mistral7b" in listed


def test_own_files_that_extend_others_are_listed(
    own: Path, posbench: Callable[..., Result]
) -> None:
    files = {
        "task/short": "defaults: [kv_retrieval]\npairs: 8\n",
        "task/shorter": "# Two pairs.\ndefaults: [short]\npairs: 2\n",
        "experiment/bare": "experiment: {name: bare, title: Bare.}\n",
    }
    for name, yaml_text in files.items():
        (own / name).parent.mkdir(exist_ok=True)
        (own / f"{name}.yaml").write_text(yaml_text)
    listed = posbench("ls", "tasks", "--json", f"--config-dir={own}", verb=True)
    assert listed.status == 0, listed.err
    rows = {row.pop("name"): row for row in json.loads(listed.out)}
    assert rows["shorter"] == rows["short"] == rows["kv_retrieval"]
    flag = ("--config-dir", str(own))
    listed = posbench("ls", "experiments", *flag, verb=True)
    assert listed.status == 0 and "Bare." in listed.out, listed.err


def test_an_experiment_with_a_config_dir_of_the_user(
    own: Path, posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(
        "--config-dir", str(own), "experiment=yu2025_fig6", "model=mine", "--cfg", "job"
    )
    assert result.status == 0, result.err
    assert (
        "name: mine" in result.out
        and "name: yu2025_fig6" in result.out
        and not outputs.exists()
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama2_13b", ["Open question", "channel 4923", "cannot settle it"]),
        ("vicuna_13b_16k", ["Open question", "channel 4283", "cannot settle it"]),
        (
            "mpt_30b",
            [
                "Open questions",
                "plot channel 1942 of this model, not 6926",
                "method.last=all",
            ],
        ),
    ],
)
def test_open_questions_about_published_constants_are_read_by_who_uses_them(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    checkpoint: Path,
    model: str,
    words: list[str],
) -> None:
    """The files' own text, on a small checkpoint that stands in for the weights."""
    rest = [o for o in small if not o.startswith(("model", "stages"))]
    fits = [
        "model.scale_channel.channel=3",
        "model.scale_channel.layers=[1,2]",
        "model.revision=null",
    ]
    stand_in = [
        f"model={model}",
        f"model.path={checkpoint}",
        "model.dtype=float32",
        *fits,
        "stages=[evaluate,report]",
    ]
    result = posbench(*rest, *stand_in)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    page = " ".join(
        (folder / "report.html").read_text().split("<h2>Config</h2>")[0].split()
    )
    for shown in (" ".join(result.out.split()), page):
        assert_names(shown, "constants", "Yu", "2025", "Table 4")
        assert all(word in shown for word in words)
    # Other constants are not the paper's, and nothing is said about them.
    other = posbench(*rest, *stand_in, "method.channel=5", "stages=[evaluate]")
    assert (
        other.status == 0 and "channel 5" in other.out and "constants:" not in other.out
    )


def test_a_model_without_positions_is_another_run(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    rest = [o for o in small if not o.startswith("stages")]
    for rope in ("checkpoint", "none"):
        result = posbench(*rest, *FIXED, f"model.rope={rope}")
        assert result.status == 0, result.err
    plain, without = run_folders(outputs)
    assert (plain / "predictions.jsonl").read_text() != (
        without / "predictions.jsonl"
    ).read_text()


@pytest.mark.parametrize(("positions", "status"), [("[0,9]", 0), ("[0,5,9]", 2)])
def test_a_gold_item_that_is_cut_away_is_no_wrong_answer(
    posbench: Callable[..., Result], outputs: Path, positions: str, status: int
) -> None:
    call = ["model=tiny", "method=none", "stages=[evaluate]", "task.pairs=10"]
    call += ["task.limit=2", f"task.positions={positions}", "runtime.device=cpu"]
    cut = ["task.truncation=middle", "model.context_window=36"]
    result = posbench(*call, *cut)
    assert result.status == status, result.err
    if status:
        assert_refused(result.err, "task.truncation", allowed=("gold item", "item 5"))
        assert not run_folders(outputs)
