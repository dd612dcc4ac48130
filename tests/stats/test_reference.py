"""The papers' numbers arrive in our names, and a name that the table lacks is refused."""

import csv
from dataclasses import replace

import pytest
import yaml

from posbench import paths
from posbench.errors import UserError, choices
from posbench.pipeline.compose import compose
from posbench.schema import build
from posbench.stats.reference import Reference, read_table, reference_tables
from posbench.tasks import KVRetrieval
from tests.conftest import config_of
from tests.messages import assert_names, refused

SIX = ("0%", "20%", "40%", "60%", "80%", "100%")


def _of(experiment: str, variant: str = "") -> Reference:
    data = yaml.safe_load(paths.find_choice("experiment", experiment).read_text())
    found = data["experiment"]["reference"] | ({"variant": variant} if variant else {})
    return build(Reference, found, "experiment.reference")


@pytest.fixture
def reference() -> Reference:
    return _of("yu2025_table1_kv")


def test_rows_of_table_1(reference):
    cells = {
        (r["model"], r["method"], r["gold_position"]): r["value"]
        for r in reference.rows()
    }
    # Typed off Table 1 of the paper, not off the CSV.
    assert cells["llama2_7b", "none", "25%"] == pytest.approx(0.246)
    assert cells["llama2_7b", "scale_channel", "all"] == pytest.approx(0.638)
    assert cells["vicuna_7b_16k", "none", "0%"] == pytest.approx(0.984)
    assert cells["llama2_13b", "scale_channel", "all"] == pytest.approx(0.539)
    assert cells["vicuna_7b_16k", "ms_poe", "25%"] == pytest.approx(0.368)
    assert len(cells) == 8 * 3 * 6 - 6  # Ms-PoE does not apply to MPT
    assert {r["metric"] for r in reference.rows()} == {"accuracy"}


def test_a_table_of_several_tasks():
    rows = _of("yu2025_table3").rows()
    cells = {
        (r["model"], r["method"], r["task"], r["metric"]): r["value"] for r in rows
    }
    assert len(rows) == len(cells) == 3 * 2 * 2 and {
        r["gold_position"] for r in rows
    } == {"all"}
    # Typed off Table 3 of the paper.
    assert cells["qwen1_5_7b", "scale_channel", "mmlu", "accuracy"] == pytest.approx(
        0.6143
    )
    assert cells[
        "mistral7b", "none", "loogle_timeline_reorder", "exact_order"
    ] == pytest.approx(0.1875)
    # Tables 4 and 2 of LPES; data sets of a benchmark stand in the place of a position.
    lpes = {
        (r["model"], r["method"], r["task"]): r["value"]
        for r in _of("lpes_table4").rows()
    }
    assert len(lpes) == 8 and lpes["stablebeluga_7b", "none", "ceval"] == pytest.approx(
        0.3478
    )
    assert lpes["vicuna_7b", "layer_scaling", "mmlu"] == pytest.approx(0.49)
    rows = _of("lpes_table2").rows()
    subsets = {(r["model"], r["method"], r["gold_position"]): r["value"] for r in rows}
    assert subsets["vicuna_7b", "none", "gov_report"] == pytest.approx(0.1844)
    assert subsets["vicuna_7b", "none", "all"] == pytest.approx(0.1691)
    assert {r["task"] for r in rows} == {"zero_scrolls"}


def test_a_table_at_every_tenth_of_the_prompt():
    cells = {
        (r["model"], r["method"], r["gold_position"]): r["value"]
        for r in _of("lpes_table16", "bezier curve").rows()
    }
    assert len(cells) == 2 * 12
    # Typed off Table 16 of LPES.
    assert cells["vicuna_13b", "layer_scaling", "20%"] == pytest.approx(0.694)
    assert cells["vicuna_13b", "none", "all"] == pytest.approx(0.651)


@pytest.mark.parametrize(
    ("experiment", "model", "fields"),
    [
        ("lpes_table1_kv", "vicuna_7b", {"pairs": 50}),
        ("lpes_table1_kv", "qwen2_5_7b", {"pairs": 150}),
        ("lpes_table1_mdqa", "qwen2_5_7b", {"documents": 20}),
        ("lpes_table11", "vicuna_7b", {"documents": 10}),
    ],
)
def test_each_model_of_lpes_runs_in_its_own_setting(experiment, model, fields):
    """Section 4.1 of LPES: 10 documents or 50 pairs with a window of 4k, 20 or 150 for Qwen2.5-7B."""
    args = [
        f"experiment={experiment}",
        f"model={model}",
        "stages=[evaluate,report]",
        "method=none",
    ]
    args += ["task=nq_multidoc"] * (experiment == "lpes_table11")
    config = config_of(*args)
    rows, note = config.reference()
    assert {key: getattr(config.task, key) for key in fields} == fields
    shares = range(0, 101, 20 if "pairs" in fields else 25)
    places = [share * (config.task.items - 1) // 100 for share in shares]
    assert config.task.gold_positions == places and note == ""
    told = {row["gold_position"] for row in rows}
    assert told == {*map(str, places)} | ({"all"} if "table1_" in experiment else set())


def test_a_typed_setting_wins_and_has_no_number_of_the_paper():
    config = config_of(
        "experiment=lpes_table1_kv", "model=qwen2_5_7b", "method=none", "task.pairs=50"
    )
    told = "This run has pairs=50 (paper 150): the paper's numbers do not apply to it."
    assert config.task.items == 50 and config.reference() == ([], told)


@pytest.mark.parametrize(
    "wrong", ["settings=5", "settings.tiny=[1]", "settings.tiny.nonsense=1"]
)
def test_a_setting_that_is_none_is_refused_by_name(wrong):
    with pytest.raises(UserError, match=r"experiment\.reference|task\.nonsense"):
        config_of(
            "experiment=lpes_table1_kv",
            "model=tiny",
            "method=none",
            f"experiment.reference.{wrong}",
        )


def test_a_cell_stands_beside_its_own_model_setting_and_positions():
    reference = _of("lpes_table1_kv")
    task = KVRetrieval(pairs=150, positions=SIX)
    cells = {
        (r["model"], r["method"], r["gold_position"]): r["value"]
        for r in reference.beside(task, "qwen2_5_7b")[0]
    }
    # Typed off Table 1 of LPES. 60 % of 150 pairs is index floor(0.6 * 149) = 89.
    assert cells["qwen2_5_7b", "layer_scaling", "89"] == pytest.approx(0.94)
    assert cells["qwen2_5_7b", "none", "all"] == pytest.approx(0.95)
    assert {model for model, _, _ in cells} == {"qwen2_5_7b"} and len(
        cells
    ) == 5 * 7  # no Ms-PoE
    rows, _ = reference.beside(KVRetrieval(pairs=50, positions=SIX), "vicuna_7b")
    assert {row["model"] for row in rows} == {"vicuna_7b", "stablebeluga_7b"}
    # Five positions are not the six that the paper's average is over.
    rows, note = reference.beside(KVRetrieval(pairs=50), "vicuna_7b")
    assert "all" not in {row["gold_position"] for row in rows} and "averages" in note
    assert {"0", "49", "20%"} < {row["gold_position"] for row in rows}
    compact = KVRetrieval(pairs=32, prompt="compact", records="words")
    rows, told = reference.beside(compact, "tiny")
    assert rows == []
    assert_names(told, "prompt=compact", "official", "pairs=32", "50 or 150")
    told = "This run has task=kv_retrieval (paper nq_multidoc): the paper's numbers do not apply to it."
    assert _of("lpes_table11").beside(compact, "tiny") == ([], told)


WITH_TABLE = [
    name
    for name in choices(*paths.group_folders("experiment"))
    if "  reference:\n" in paths.find_choice("experiment", name).read_text()
]


@pytest.mark.parametrize("name", WITH_TABLE)
def test_every_cell_of_an_experiment_is_that_of_its_table(name):
    """Each row of the CSV that names a mapped task, method and metric, and holds a number, comes out once."""
    covers = yaml.safe_load(paths.find_choice("experiment", name).read_text())[
        "experiment"
    ]["covers"]
    assert _of(name).source.split(", ")[-1] in covers
    for variant in _of(name).variants or [""]:
        _cells_are_those_of_the_table(_of(name, variant))


def _cells_are_those_of_the_table(found):
    given = dict[str, list[float]]()
    methods = {**found.methods, **found.variants.get(found.variant, {})}
    with reference_tables()[found.file].open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            task = {found.paper_task: found.task, **found.further_tasks}.get(
                row["task"]
            )
            mapped = (
                task and row["method"] in methods and row["metric"] in found.metrics
            )
            if mapped and row["value"] not in ("—", "-", "/"):
                percent = found.percent or row["metric"].endswith("(%)")
                place = found.positions.get(row["position"], row["position"]) or "all"
                place = task.split("/")[1] if "/" in task else place
                names = (
                    found.models.get(row["model"], row["model"]),
                    methods[row["method"]],
                )
                key = "|".join(
                    [*names, task.split("/")[0], place, found.metrics[row["metric"]]]
                )
                given.setdefault(key, []).append(
                    float(row["value"]) / (100 if percent else 1)
                )
    told = dict[str, list[float]]()
    for row in found.rows():
        columns = ("model", "method", "task", "gold_position", "metric")
        told.setdefault("|".join(row[column] for column in columns), []).append(
            row["value"]
        )
    assert told == given and all(len(values) == 1 for values in told.values())


def test_the_ratios_of_time_follow_from_the_papers_tables():
    yu, lpes = (
        read_table(f"{paper}_table5_latency.csv") for paper in ("yu2025", "lpes")
    )
    spent = {(row.method, row.task): float(row.value) for row in yu.itertuples()}
    base = {task: v for (m, task), v in spent.items() if m == "FlashAttention-2"}
    found = set()
    for method, ours in (("Ms-PoE", "ms_poe"), ("Ours", "scale_channel")):
        ratios = sorted(spent[method, task] / base[task] for task in base)
        # Longer prompts take the longer time: documents of 3,300 tokens, then pairs of 10,000.
        for tokens, ratio in zip(("3300", "10000"), ratios, strict=True):
            found.add((ours, tokens, f"{ratio:.2f}"))
    once = {row.method: float(row.value) for row in lpes.itertuples()}
    names = {
        "": "attention_buckets",
        "Ms-PoE": "ms_poe",
        "MoICE": "moice",
        "LPES (Ours)": "layer_scaling",
    }
    found |= {
        (ours, "1600", f"{once[method] / once['Baseline']:.2f}")
        for method, ours in names.items()
    }
    assert {
        (row.method, row.tokens, row.ratio)
        for row in read_table("latency.csv").itertuples()
    } == found


@pytest.mark.parametrize(
    ("experiment", "found"),
    [  # Typed off Tables 11 (end of the prompt) and 15 (average) of LPES.
        ("lpes_table11", [[0.558], []]),
        ("lpes_table15", [[0.626], [0.63], [0.632]]),
    ],
)
def test_each_run_of_a_sweep_stands_beside_its_own_row(experiment, found):
    """What the sweep varies chooses the row; a setting that the paper lacks has none."""
    place = "100%" if experiment == "lpes_table11" else "all"
    told = list[list[float]]()

    for job in compose([f"experiment={experiment}"]).composed:
        rows = build(
            Reference, job.raw["experiment"]["reference"], "experiment.reference"
        ).rows()
        own = [
            r
            for r in rows
            if (r["method"], r["gold_position"]) == ("layer_scaling", place)
        ]
        told.append([round(r["value"], 4) for r in own if r["model"] == "vicuna_7b"])

    assert told == found


@pytest.mark.parametrize("value", ["many", "1.2.3"])
def test_a_cell_that_is_no_number_is_told(value, reference, tmp_path):
    file = tmp_path / "table.csv"
    text = reference_tables()[reference.file].read_text()
    file.write_text(text.replace("77.6", value))
    with refused(
        "experiment.reference.file", value, allowed=("numbers", "value"), hint=str(file)
    ):
        replace(reference, file=str(file)).rows()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("models", {"Mistral-7B": "mistral7b"}, "Mistral-7B"),
        ("methods", {"Original": "none", "Yours": "x"}, "Yours"),
        ("positions", {"Average": "all"}, "Average"),
        ("paper_task", "KV-retrieval-75pairs", "KV-retrieval-75pairs"),
        ("further_tasks", {"KV-retrieval-75pairs": "kv"}, "KV-retrieval-75pairs"),
        ("file", "absent.csv", "absent.csv"),
    ],
)
def test_a_name_that_the_table_lacks_is_refused(reference, field, value, named):
    with refused(f"experiment.reference.{field}", named):
        replace(reference, **{field: value}).rows()


def test_a_table_is_read_as_printed_and_must_have_its_columns():
    printed = read_table("yu2025_table4_parameters.csv", "model", "value")
    assert "1,081" in set(printed["value"]) and printed.map(type).eq(str).all().all()
    with refused("experiment.reference.file", "absent.csv", allowed="CSV", hint="name"):
        read_table("absent.csv", "model")
    with refused(
        "experiment.reference.file",
        "yu2025_table4_parameters.csv",
        allowed=("model", "nonsense", "yu2025_table4_parameters.csv"),
    ):
        read_table("yu2025_table4_parameters.csv", "model", "nonsense")
