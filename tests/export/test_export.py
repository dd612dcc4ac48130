"""``posbench export`` and ``verify`` on runs and on overrides."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from posbench import paths
from posbench.cli.main import main
from posbench.export.write import CARD, RECORD_FILE
from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import prepare
from posbench.report.folder import need_destination
from posbench.run.folder import RunDir, open_run_dir
from posbench.stats.verdict import FIXED, Verdict
from tests.conftest import Result, config_of, few, run_folders
from tests.frames import with_missing_answers
from tests.messages import assert_names, assert_refused, refused

SMALL = ["task.limit=4", "task.calibration_examples=12"]


def words(result: Result) -> str:
    return " ".join(result.out.split())


@pytest.fixture
def run(posbench: Callable[..., Result], outputs: Path, small: list[str]) -> Path:
    assert posbench(*small).status == 0
    return run_folders(outputs)[0]


def test_a_run_becomes_an_adapter(
    run: Path, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "fix"
    result = posbench(
        "export", str(run), "--to", "lora", "--force", "--out", str(out), verb=True
    )
    assert result.status == 0, result.err
    record = json.loads((out / RECORD_FILE).read_text())
    ran = json.loads((run / "method.json").read_text())
    node = record["raw"]["method"]
    assert {key: node[key] for key in ("channel", "factor", "layers")} == {
        key: ran[key] for key in ("channel", "factor", "layers")
    }
    assert ran["last"] == 1 and node["last"] == "all", "the twin is written"
    assert_names(words(result), "all tokens", "last")
    card = (out / CARD).read_text()
    assert (
        record["price"] in card
        and f"channel: {ran['channel']}" in card
        and "PeftModel" in card
    )
    assert posbench("verify", str(out), verb=True).status == 0
    # What is not as it was written is named.
    adapter = out / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace('"r": 1', '"r": 2'))
    again = posbench("verify", str(out), verb=True)
    assert (
        again.status == 2
        and "adapter_config.json" in again.err
        and "posbench export" in again.err
    )


def test_a_constant_that_was_typed_has_no_gain_of_the_search(
    posbench: Callable[..., Result], outputs: Path, small: list[str], tmp_path: Path
) -> None:
    stages = "stages=[search,evaluate,report]"
    assert posbench(*small, "method.factor=0.9", stages).status == 0
    (run,) = run_folders(outputs)
    typed = "typed in place of what was found: factor 0.9"
    out = tmp_path / "fix"
    call = ["export", str(run), "--to", "transformers", "--force", "--out", str(out)]
    result = posbench(*call, verb=True)
    assert result.status == 0, result.err
    card = (out / CARD).read_text()
    assert "factor: 0.9" in card and typed in card
    assert "held-back" not in card, "the gain is that of another factor"
    first_line, *_ = (run / "found.yaml").read_text().splitlines()
    assert first_line.startswith("# Verdict") and first_line.endswith(typed)
    page = (run / "report.html").read_text()
    assert f"did not evaluate them ({typed})" in page


def test_a_run_that_died_in_its_search_is_not_exported(
    posbench: Callable[..., Result],
    outputs: Path,
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its config holds the model's own constants, which the search was to replace."""

    def die(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("posbench.search.base.Search.write_found", die)
    assert posbench(*small).status != 0
    (run,) = run_folders(outputs)
    call = ["export", str(run), "--to", "transformers", "--out", str(tmp_path / "fix")]
    result = posbench(*call, verb=True)
    assert result.status == 2
    assert_refused(
        result.err, "RUN", run.name, allowed="search has ended", hint="finish it"
    )
    assert not (tmp_path / "fix").exists()


def test_a_base_that_reaches_less_far_than_the_window_is_told(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    for base, is_told in (("50", True), ("1e6", False)):
        out = tmp_path / base
        call = ["export", "model=tiny", "method=rope_base", f"method.base={base}"]
        result = posbench(*call, "--to", "checkpoint", "--out", str(out), verb=True)
        assert result.status == 0, result.err
        for text in (result.out, (out / CARD).read_text()):
            assert ("a base of 50 reaches" in text) == is_told


def test_files_of_another_method_than_the_evaluated_one_are_called_no_fix(
    run: Path,
    posbench: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = Verdict(FIXED, "by a half")
    monkeypatch.setattr("posbench.cli.export.run_verdict", lambda table: verdict)
    cards = {}
    for to in ("lora", "transformers"):
        out = tmp_path / to
        result = posbench("export", str(run), "--to", to, "--out", str(out), verb=True)
        assert result.status == 0, result.err
        cards[to] = (out / CARD).read_text()
    assert "A fix against" in cards["transformers"]
    assert "before folding" not in cards["transformers"]
    assert "A fix against" not in cards["lora"] and str(verdict) in cards["lora"]
    assert cards["lora"].count("(before folding: of the method") == 2


@pytest.mark.parametrize(
    ("methods", "to"),
    few(
        [
            ("[documents_twice,rope_base,scale_channel]", "checkpoint"),
            ("[question_first_and_last,rope_base]", "checkpoint"),
            ("[question_first_and_last,scale_channel]", "transformers"),
        ],
        1,
    ),
)
def test_changes_of_the_prompt_are_left_to_the_user(
    methods: str,
    to: str,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files hold the rest of the list, and say what to do with prompts."""
    monkeypatch.setattr(
        "posbench.cli.export.run_verdict", lambda table: Verdict(FIXED, "by a half")
    )
    small = ["task.limit=2", "task.pairs=8", "stages=[evaluate]"]
    assert posbench(f"method={methods}", *small).status == 0
    (run,) = run_folders(outputs)
    out = tmp_path / "fix"
    result = posbench("export", str(run), "--to", to, "--out", str(out), verb=True)
    assert result.status == 0, result.err
    change, *rest = methods.strip("[]").split(",")
    recipe = "documents" if change == "documents_twice" else "{question}"
    assert recipe in result.out
    node = json.loads((out / RECORD_FILE).read_text())["raw"]["method"]
    assert node["name"] == "-".join(rest)
    assert node.get("parts", {rest[0]: 0}).keys() == set(rest)
    card = (out / CARD).read_text()
    assert "Change the prompts, too" in card and recipe in card
    assert f"(with {change} as well)" in card and "A fix against" not in card
    assert "of the window of 512" in card and "of the window of 512" in result.out
    assert posbench("verify", str(out), verb=True).status == 0


@pytest.mark.parametrize(
    ("methods", "to"),
    few(
        [
            ("rope_base", "checkpoint"),
            ("scale_channel", "transformers"),
            ("[documents_twice,scale_channel]", "transformers"),
            ("[question_first_and_last,rope_base]", "checkpoint"),
        ],
        2,
    ),
)
def test_the_format_that_a_fixed_run_proposes_holds_its_method(
    methods: str, to: str, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    call = ["model=tiny", f"method={methods}", "task.limit=2"]
    assert config_of(*call).choice.export_format == to
    out = ["--to", to, "--out", str(tmp_path / "fix")]
    result = posbench("export", *call, *out, verb=True)
    assert result.status == 0, result.err


def test_a_run_is_named_alone(
    run: Path, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    words = ["export", str(run), "more", "--to", "lora", "--out", str(tmp_path / "x")]
    assert_refused(
        posbench(*words, verb=True).err,
        "export",
        allowed="one run alone",
        hint="leave out more",
    )


def test_the_price_is_that_of_a_plain_loop(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    import posbench as package
    from posbench.methods import ScaleChannel
    from posbench.schema import instantiate
    from posbench.tasks import Task

    call = [
        "export",
        "model=tiny",
        *SMALL,
        "--to",
        "lora",
        "--out",
        str(tmp_path / "fix"),
    ]
    assert posbench(*call, verb=True).status == 0
    told = json.loads((tmp_path / "fix" / RECORD_FILE).read_text())["price"]
    lm = package.load("tiny")
    task = instantiate(compose_one("model=tiny", *SMALL).raw["task"], Task, "task")
    means = {}
    for last in (1, "all"):
        losses = []
        for e in task.examples("calibration"):
            with ScaleChannel(
                channel=15, factor=-1.0, layers=(1, 3), last=last
            ).applied(lm):
                (row,) = lm.continuations(
                    [lm.encode(e.prompt).ids],
                    [[lm.answer_ids(e.prompt, e.answers[0])[1]]],
                )
            losses.append(-row[0][0] / len(lm.answer_ids(e.prompt, e.answers[0])[1]))
        means[last] = sum(losses) / len(losses)
    assert f"loss {means['all']:.4g} instead of {means[1]:.4g} nats" in told
    assert f"difference {means['all'] - means[1]:.3f} [" in told and told.endswith(
        "; 12 prompts"
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            ["model=tiny", "--to", "lora", "--exact"],
            "--exact = 'lora': allowed: a format",
        ),
        (
            ["model=tiny", "--to", "nothing"],
            "--to = 'nothing': allowed: checkpoint, lora",
        ),
        (["model=tiny", "--to", "lora", "method=none"], "nothing changes here"),
        (
            ["model=tiny", "search.deploy=lora", "--to", "lora"],
            "export = 'search.deploy=lora'",
        ),
        (["nowhere", "--to", "lora"], "DIR = 'nowhere': allowed: a run folder"),
        (["model=tiny", "--to", "lora", "method.channel=99"], "method.channel = [99]"),
        (
            ["model=tiny_nope", "model.rope=none", "--to", "lora"],
            "model.rope = 'none': allowed: checkpoint",
        ),
    ],
)
def test_refusals_leave_nothing(
    call: list[str], said: str, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    result = posbench("export", *call, "--out", str(tmp_path / "fix"), verb=True)
    assert result.status == 2 and said in result.err and result.err.count("\n") == 1
    assert not list(tmp_path.glob("*fix*"))


def test_what_stands_there_stays(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    result = posbench(
        "export", "model=tiny", "--to", "lora", "--out", str(tmp_path), verb=True
    )
    assert result.status == 2
    allowed = ("new folder", "posbench export")
    assert_refused(result.err, "--out", str(tmp_path), allowed=allowed, hint="folder")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_files_that_do_not_do_it_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from posbench.export import lora

    right = lora.factors

    def wrong(lm, change):
        return {name: (a, -b) for name, (a, b) in right(lm, change).items()}

    monkeypatch.setattr(lora, "factors", wrong)
    assert (
        main(
            [
                "export",
                "model=tiny",
                *SMALL,
                "--to",
                "lora",
                "--out",
                str(tmp_path / "fix"),
            ]
        )
        == 2
    )
    assert_refused(capsys.readouterr().err, "--to", hint="posbench export")
    assert not list(tmp_path.iterdir())


CONSTANTS = [
    "method=scale_channel",
    "method.channel=3",
    "method.factor=-0.5",
    "method.layers=[1,2]",
    "runtime.resamples=100",
]
WORDS = f"task.path={Path(__file__).parents[1] / 'data' / 'own' / 'words.jsonl'}"


def effects_on_card(folder: Path) -> list[str]:
    """The tasks under the side effects of a model card."""
    _, _, section = (folder / CARD).read_text().partition("## Side effects")
    section, _, _ = section.partition("## Made by")
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    return [cells[1].strip() for cells in rows[2:]]


@pytest.fixture
def side_effect_runs(
    checkpoint: Path, posbench: Callable[..., Result], tmp_path: Path
) -> list[str]:
    """Arguments of a model that has runs of other tasks, beside runs that are not its own."""
    model = ["model=tiny", f"model.path={checkpoint}"]
    # Another checkpoint under the same name.
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    runs = {
        "side": [*model, *CONSTANTS],
        "folded": [*model, *CONSTANTS, "method.last=all"],
        "other_factor": [*model, *CONSTANTS, "method.factor=0.5"],
        "other_weights": ["model=tiny", f"model.path={other}", *CONSTANTS],
    }
    for name, call in runs.items():
        task = ["task=own_data", f"task.name={name}", WORDS]
        result = posbench(*call, *task, "stages=[evaluate]")
        assert result.status == 0, result.err
    return model


def test_a_card_lists_the_side_effects_of_the_same_method_on_the_same_weights(
    side_effect_runs: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    call = ["export", *side_effect_runs, *CONSTANTS, *SMALL]
    call += ["task.pairs=8", "task.calibration_pairs=8"]
    out = tmp_path / "fix"
    end = ["--out", str(out), "--outputs", str(outputs)]
    written = posbench(*call, "--to", "checkpoint", *end, verb=True)
    assert written.status == 0, written.err
    # The files hold the method for all tokens; the side task was asked with that for the last one.
    assert effects_on_card(out) == ["folded", "side (before folding)"]
    assert "missing answers" not in (out / "README.md").read_text()
    (table,) = outputs.glob("folded/v*/*/metrics.csv")
    with_missing_answers(pd.read_csv(table, dtype=str)).to_csv(table, index=False)
    shutil.rmtree(out)
    written = posbench(*call, "--to", "checkpoint", *end, verb=True)
    assert written.status == 0, written.err
    assert "cannot tell (missing answers)" in (out / "README.md").read_text()


def test_the_unmodified_model_has_no_side_effects(
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    call = ["export", "model=tiny", "method=none", *SMALL, "--to", "gguf"]
    # A run of the same weights under a method.
    task = ["task=own_data", WORDS, "stages=[evaluate]", "runtime.resamples=100"]
    assert posbench("model=tiny", "method=scale_channel", *task).status == 0
    out = tmp_path / "base"
    end = ["--out", str(out), "--outputs", str(outputs)]
    written = posbench(*call, *end, verb=True)
    assert written.status == 0, written.err
    assert effects_on_card(out) == []


@pytest.mark.parametrize(
    "typed", [[], ["task.records=words", "task.prompt=compact", "task.pairs=8"]]
)
@pytest.mark.parametrize("has_run", [False, True])
def test_calibration_prompts_fit_the_window_as_in_validate(
    typed: list[str],
    has_run: bool,
    checkpoint: Path,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    # The default is 50 calibration pairs.
    call = [f"model={checkpoint}", "model.context_window=128", "task.limit=2", *typed]
    searched = prepare(compose_one(*call, "stages=[search,evaluate]")).config.task
    assert 2 < searched.calibration_pairs < 50
    origin = [*call, *CONSTANTS]
    if has_run:
        result = posbench(*origin, "stages=[evaluate]")
        assert result.status == 0, result.err
        origin = [str(run_folders(outputs)[0])]
    out = tmp_path / "fix"
    result = posbench("export", *origin, "--to", "lora", "--out", str(out), verb=True)
    assert result.status == 0, result.err
    task = json.loads((out / RECORD_FILE).read_text())["raw"]["task"]
    assert task["calibration_pairs"] == searched.calibration_pairs
    assert task["pairs"] == searched.pairs
    assert posbench("verify", str(out), verb=True).status == 0


def test_other_weights_are_named(
    small: list[str],
    checkpoint: Path,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    shutil.copytree(checkpoint, own)
    run = [key for key in small if not key.startswith("model.path=")]
    assert posbench(*run, f"model.path={own}").status == 0
    call = [
        "export",
        str(run_folders(outputs)[0]),
        "--to",
        "lora",
        "--force",
        "--out",
        str(tmp_path / "fix"),
    ]
    assert posbench(*call, verb=True).status == 0
    weights = load_file(own / "model.safetensors")
    save_file(
        {name: value * 1.5 for name, value in weights.items()},
        own / "model.safetensors",
        {"format": "pt"},
    )
    for again in (
        ["verify", str(tmp_path / "fix")],
        [*call[:-1], str(tmp_path / "other")],
    ):
        result = posbench(*again, verb=True)
        assert result.status == 2
        assert_refused(result.err, "model.path", allowed="run", hint="file")
    assert not (tmp_path / "other").exists()


def test_only_an_export_as_it_was_written_is_replaced(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "fix"
    call = ["export", "model=tiny", *SMALL, "--to", "lora", "--out", str(out)]
    assert posbench(*call, verb=True).status == 0 == posbench(*call, verb=True).status
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {
        out.joinpath(RECORD_FILE).stat().st_mode & 0o777
    }
    (out / "mine.yaml").write_text("mine")
    refused = posbench(*call, verb=True)
    assert (
        refused.status == 2
        and "--out" in refused.err
        and (out / "mine.yaml").read_text() == "mine"
    )
    (out / "mine.yaml").unlink()
    (out / CARD).write_text("my notes")
    assert (
        posbench(*call, verb=True).status == 2
        and (out / CARD).read_text() == "my notes"
    )


def test_a_run_keeps_its_files_for_itself(
    posbench: Callable[..., Result], tmp_path: Path, outputs: Path
) -> None:
    assert posbench("model=tiny", *SMALL, "stages=[intervene]").status == 0
    (run,) = run_folders(outputs)
    files = sorted(run.rglob("*"))
    call = ["export", "model=tiny", *SMALL, "--to", "lora", "--out"]
    link = tmp_path / "link"
    link.symlink_to(run / "figures")
    for out in (run, run / "fix", run / "figures" / "fix", link / "fix"):
        result = posbench(*call, str(out), verb=True)
        assert result.status == 2
        where = str(out.resolve())
        assert_refused(result.err, "--out", where, allowed=("outside", run.name))
        with refused("--out", str(out), allowed=("outside", run.name)):
            need_destination(out, lambda: True, "comparison")
        result = posbench("model=tiny", *SMALL, f"runtime.outputs={out}", verb=True)
        assert result.status == 2
        key = "runtime.outputs"
        assert_refused(result.err, key, str(out), allowed=("outside", run.name))
    assert sorted(run.rglob("*")) == files
    need_destination(run / ".." / "new", lambda: False, "comparison")


def test_weights_are_written_as_published_whatever_the_run_computed_in(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "fix"
    settings = ["method.channel=15", "method.factor=0.3", "method.layers=[1,3]"]
    result = posbench(
        "export", "model=tiny", "model.dtype=bfloat16", "method=scale_channel", *settings,
        "method.last=all", "--to", "checkpoint", "--out", str(out), verb=True,
    )  # fmt: skip
    assert result.status == 0, result.err
    assert_names(result.out, "float32", "bfloat16")
    written, published = (
        load_file(folder / "model.safetensors")
        for folder in (out, paths.PACKAGE / "embedded" / "models" / "tiny")
    )
    for name, weight in written.items():
        expected = published[name].clone()
        if re.search(r"layers\.[123]\..*[qk]_proj\.weight", name):
            expected[:, 15] *= 0.3
        assert torch.equal(weight, expected), name
    assert posbench("verify", str(out), verb=True).status == 0


def test_a_link_stays_a_link_and_the_working_folder_stays(
    posbench: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, link = tmp_path / "other_disk", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    command = [
        "export",
        "model=tiny",
        "method=rope_base",
        "--to",
        "checkpoint",
        "--out",
    ]
    made = posbench(*command, str(link), verb=True)
    assert made.status == 0, made.err
    assert link.is_symlink() and (place / "config.json").is_file()
    assert_names(made.out, "no weights", "config.json")
    assert {file.name for file in tmp_path.iterdir()} == {"other_disk", "link"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", ".."):
        assert_refused(
            posbench(*command, out, verb=True).err, "--out", out, hint="--out fix"
        )


@pytest.mark.parametrize(
    ("method", "to", "hint"),
    [
        (["pine"], "transformers", "in process"),
        (["pine"], "checkpoint", "in process"),
        (
            ["self_extend", "method.group_size=2", "method.window=8"],
            "checkpoint",
            "in process",
        ),
        (["ms_poe"], "checkpoint", "--to transformers"),
        (["rope_base"], "vllm-plugin", "--to checkpoint"),
        (["[position_interpolation,rope_base]"], "transformers", "in process"),
    ],
)
def test_the_next_step_is_a_format_that_holds_the_method(
    method: list[str],
    to: str,
    hint: str,
    posbench: Callable[..., Result],
    tmp_path: Path,
) -> None:
    name, *constants = method
    command = ["export", "model=tiny", f"method={name}", *constants, "--out"]
    result = posbench(*command, str(tmp_path / "fix"), "--to", to, verb=True)
    assert_refused(result.err, "--to", to, hint=hint)
    assert "composed" not in result.err
    if hint == "--to checkpoint":
        again = posbench(*command, str(tmp_path / "fix"), *hint.split(), verb=True)
        assert again.status == 0, again.err


def test_a_run_on_a_server_or_a_sweep_has_no_weights_to_export(
    run: Path,
    posbench: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["base_url"] = "http://localhost:1/v1"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("posbench.cli.export.open_undamaged", open_run_dir)
    tail = ["--to", "checkpoint", "--out", str(tmp_path / "fix")]
    result = posbench("export", str(run), *tail, verb=True)
    assert result.status == 2
    assert_names(result.err, "server", "model=DIR")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "jobs.json").write_text("[]")
    with refused("config.yaml", allowed="sweep", hint="ls runs"):
        RunDir(sweep).config("model")
