"""Ablations and layer selection on an embedded model, against losses, replies and attentions computed
plainly; and controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import posbench as package
from posbench.cli.main import main
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import LM
from posbench.report.folder import study_tables
from posbench.search import statistics
from posbench.search.channel import ChannelSearch
from posbench.stats.findings import Finding, estimate
from posbench.tasks import KVRetrieval
from tests.conftest import Result, config_of, run_folders
from tests.rounding import assert_same, embedded_noise, log_probabilities
from yu2025 import layer_selection
from yu2025.ablations import CLAIMS, CONTROL, FULL, SAME_CHOICE, Ablations
from yu2025.common import contrast_columns, unless_missing
from yu2025.layer_selection import edges

TASK = {"limit": 5, "calibration_examples": 16, "positions": "[0,8,16,24,31]"}
FEW = [f"task.{key}={value}" for key, value in TASK.items()] + [
    "search.strings=30",
    "runtime.resamples=200",
    "runtime.device=cpu",
]


@pytest.fixture(scope="module")
def lm() -> LM:
    return package.load("tiny")


@pytest.fixture(scope="module")
def task() -> KVRetrieval:
    return KVRetrieval(
        name="kv",
        prompt="compact",
        records="words",
        pairs=32,
        positions=(0, 8, 16, 24, 31),
        limit=5,
        max_new_tokens=1,
        calibration_pairs=32,
        calibration_examples=16,
    )


def _folder(tmp_path_factory: pytest.TempPathFactory, study: str) -> Path:
    outputs = tmp_path_factory.mktemp(study)
    assert (
        main([f"study={study}", "model=tiny", *FEW, f"runtime.outputs={outputs}"]) == 0
    )
    (folder,) = run_folders(outputs)
    return folder


@pytest.fixture(scope="module")
def ablated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    return study_tables(
        _folder(tmp_path_factory, "ablations"),
        ["ablations", "positions", "candidates", "findings"],
    )


@pytest.fixture(scope="module")
def ranged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    return study_tables(
        _folder(tmp_path_factory, "layer_selection"),
        ["ranges", "edges", "layers", "evaluation", "findings"],
    )


def _loss(lm: LM, task: KVRetrieval, method: ScaleChannel | Unmodified) -> float:
    examples = task.examples("calibration")
    with method.applied(lm):
        return float(
            lm.answer_loss(
                [e.prompt for e in examples], [e.answers[0] for e in examples]
            ).mean()
        )


def _right(lm: LM, task: KVRetrieval, method: ScaleChannel | Unmodified) -> np.ndarray:
    examples = task.evaluation()
    with method.applied(lm):
        replies = lm.generate([e.prompt for e in examples], max_new_tokens=1)
    return np.array(
        [
            float(e.answers[0] in reply)
            for e, reply in zip(examples, replies, strict=True)
        ]
    )


def test_without_monotonicity_smoothness_counts_every_layer_of_every_channel() -> None:
    curves = np.random.default_rng(0).normal(size=(3, 40, 6)).cumsum(1)
    free = statistics.paper_filter(curves, window=5, skip=2, monotone_only=False)
    rough = np.zeros(6)
    for layer in curves:
        for channel in range(6):
            mean = [layer[i : i + 5, channel].mean() for i in range(36)][2:]
            rough[channel] += sum(
                (mean[i + 1] - 2 * mean[i] + mean[i - 1]) ** 2
                for i in range(1, len(mean) - 1)
            )
    np.testing.assert_allclose(free.smoothness, rough)
    assert free.ranking == list(np.argsort(rough))
    with_filter = statistics.paper_filter(curves, window=5, skip=2)
    assert set(with_filter.ranking) < set(free.ranking), (
        "the filter removes some channel here"
    )
    np.testing.assert_array_equal(free.monotone_layers, with_filter.monotone_layers)


def test_every_ablation_chooses_what_the_losses_say(
    ablated: dict[str, pd.DataFrame],
) -> None:
    seen = ablated["candidates"]
    rows = ablated["ablations"].set_index("ablation")
    for name in (FULL, "without monotonicity", "without smoothness"):
        pool = seen[seen[name.replace(" ", "_")]]
        won = pool.loc[pool["loss"].idxmin()]
        assert (rows.loc[name, "channels"], rows.loc[name, "factor"]) == (
            str(won["channel"]),
            won["factor"],
        )
    full = rows.loc[FULL]
    monotone = (
        seen[seen["without_smoothness"]]
        .drop_duplicates("channel")
        .sort_values("smoothness")
    )
    assert (
        list(seen[seen["full_method"]].drop_duplicates("channel")["channel"])
        == list(monotone["channel"])[:10]
    )
    assert rows.loc["without validation", "channels"] == str(
        monotone["channel"].iloc[0]
    )
    same = (
        seen[seen["full_method"] & (seen["factor"] == full["factor"])]
        .sort_values("loss")["channel"]
        .astype(str)
    )
    assert (
        rows.loc["top-2 channels", "channels"]
        == f"{full['channels']}+{next(c for c in same if c != full['channels'])}"
    )
    assert list(rows.loc[["last 16 tokens", "all tokens", FULL], "last"]) == [
        "16",
        "all",
        "1",
    ]
    assert rows.loc[CONTROL, "channels"] != full["channels"]
    free = seen.drop_duplicates("channel").groupby("without_monotonicity")[
        "smoothness_all_layers"
    ]
    assert free.size()[True] == 10 and free.max()[True] < free.min()[False]


def test_losses_and_scores_of_the_ablations_are_those_of_plain_calls(
    ablated: dict[str, pd.DataFrame], lm: LM, task: KVRetrieval
) -> None:
    seen = ablated["candidates"]
    rows = ablated["ablations"].set_index("ablation")
    noise = embedded_noise("tiny", log_probabilities)
    assert_same(
        seen["loss_unmodified"].iloc[0], _loss(lm, task, Unmodified()), noise, "losses"
    )
    for _, row in seen.iloc[[0, -1]].iterrows():
        layers = int(row["layer_first"]), int(row["layer_last"])
        method = ScaleChannel(
            channel=int(row["channel"]), factor=row["factor"], layers=layers
        )
        assert_same(row["loss"], _loss(lm, task, method), noise, "losses")
    right = {"none": _right(lm, task, Unmodified())}
    for name in (FULL, "without validation", "top-2 channels", "all tokens"):
        row = rows.loc[name]
        channels, (first, last) = (
            tuple(map(int, row["channels"].split("+"))),
            map(int, row["layers"].split("-")),
        )
        rows_of_prompt = row["last"] if row["last"] == "all" else int(row["last"])
        method = ScaleChannel(
            channel=channels,
            factor=float(row["factor"]),
            layers=(first, last),
            last=rows_of_prompt,
        )
        right[name] = _right(lm, task, method)
    for name, found in right.items():
        assert rows.loc[name, "value"] == pytest.approx(found.mean())
        assert rows.loc[name, "difference"] == pytest.approx(
            (found - right[FULL]).mean()
        )
        assert rows.loc[name, "gain"] == pytest.approx((found - right["none"]).mean())
    # A plain bootstrap of the paired difference: other draws, hardly other quantiles.
    change = right["without validation"] - right[FULL]
    drawn = np.random.default_rng(5).choice(change, (4000, len(change))).mean(1)
    wanted = tuple(np.quantile(drawn, [0.025, 0.975]))
    row = rows.loc["without validation"]
    assert (row["difference_ci_low"], row["difference_ci_high"]) == pytest.approx(
        wanted, abs=0.09
    )
    inner = (
        ablated["positions"]
        .query(f"ablation == '{FULL}' and gold_position == 16")["value"]
        .item()
    )
    assert inner == pytest.approx(
        right[FULL][[e.gold_position == 16 for e in task.evaluation()]].mean()
    )


def test_the_verdicts_follow_the_intervals(ablated: dict[str, pd.DataFrame]) -> None:
    rows = ablated["ablations"].set_index("ablation")
    found = ablated["findings"]
    assert len(found) == 8 and found["claim"].iloc[0].startswith("The method raises")
    full = rows.loc[FULL, "gain_ci_low"] > 0 and found["p_holm"].iloc[0] <= 0.05
    assert (found["verdict"].iloc[0] == "holds") == full
    assert list(found["kind"] == "control") == [
        "control:" in words for words in found["statistic"]
    ]
    for row in found.iloc[1:].itertuples():
        name = row.statistic.removesuffix(" minus full method, points")
        assert row.value == pytest.approx(100 * rows.loc[name, "difference"])
        assert (row.verdict == "holds") == (row.ci_high < 0 and row.p_holm <= 0.05)


def test_on_a_random_model_the_method_gains_nothing(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    rest = [
        o for o in small if not o.startswith(("stages", "search=", "search.factors"))
    ]
    result = posbench("study=ablations", *rest, "search.factors=[0.5,0.0]")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    tables = study_tables(folder, ["ablations", "findings"])
    assert (
        tables["findings"]["verdict"].iloc[0],
        tables["ablations"]["gain"].abs().max() < 0.2,
    ) == (
        "not testable",  # six prompts that all stay wrong
        True,
    )


@pytest.mark.parametrize(
    ("full", "changed", "ablation", "verdict"),
    [
        # A method that changes 6 of 300 scores: nothing can fall without a part of it.
        ((-0.01, -0.026, 0.006), 0.02, (-0.01, 0.02), "not testable"),
        # The same method, but the ablation chooses something that moves answers.
        ((-0.01, -0.026, 0.006), 0.02, (0.063, 0.15), "contradicted"),
        # A method that gains, and an ablation that gains as much: the average of most models may fall all the same.
        ((0.2, 0.15, 0.25), 0.3, (0.2, 0.3), "inconclusive"),
        # One that is surely better without the part.
        ((0.2, 0.15, 0.25), 0.3, (0.3, 0.4), "contradicted"),
        # A method that changes few scores, all for the better, is not inert.
        ((0.04, 0.02, 0.06), 0.04, (0.04, 0.04), "inconclusive"),
    ],
)
def test_ablations_of_what_moves_no_answers_are_not_testable(
    full: tuple[float, float, float],
    changed: float,
    ablation: tuple[float, float],
    verdict: str,
) -> None:
    gain, ablation_changed = ablation
    half = 0.007 if gain == full[0] else 0.038

    def row(
        name: str, gains: tuple[float, float, float], share: float
    ) -> dict[str, object]:
        change = gains[0] - full[0]
        return {
            "ablation": name,
            **{"channels": name, "factor": 0.0, "layers": "1-2", "last": "1", "n": 300},
            **{"gain": gains[0], "gain_ci_low": gains[1], "gain_ci_high": gains[2]},
            **{"difference": change, "changed": share},
            "difference_ci_low": change - half,
            "difference_ci_high": change + half,
        }

    spread = full[2] - full[0]
    table = pd.DataFrame(
        [
            row(FULL, full, changed),
            row(
                "last 16 tokens", (gain, gain - spread, gain + spread), ablation_changed
            ),
        ]
    )
    findings = Ablations(search=ChannelSearch()).findings({"ablations": table})
    assert findings[1].verdict == verdict
    assert ("inert" in findings[1].note) == (verdict == "not testable")


@pytest.mark.parametrize("name", ["without monotonicity", "without validation"])
@pytest.mark.parametrize(
    ("setting", "interval", "verdict"),
    [
        ("ch 1", (-0.002, 0.002), "not testable"),
        ("ch 2", (-0.05, -0.02), "holds"),
        ("ch 2", (-0.03, 0.005), "inconclusive"),
        ("ch 2", (0.01, 0.05), "contradicted"),
    ],
)
def test_the_choice_of_the_full_method_says_nothing_of_a_part(
    name: str, setting: str, interval: tuple[float, float], verdict: str
) -> None:
    def row(name: str, channels: str, low: float, high: float) -> dict[str, object]:
        return {
            "ablation": name,
            **{"channels": channels, "factor": 0.0, "layers": "1-2", "last": "1"},
            **{"gain": 0.2, "gain_ci_low": 0.15, "gain_ci_high": 0.25, "n": 300},
            **{"difference": (low + high) / 2, "changed": 0.3},
            **{"difference_ci_low": low, "difference_ci_high": high},
        }

    table = pd.DataFrame([row(FULL, "ch 1", 0, 0), row(name, setting, *interval)])
    finding = Ablations(search=ChannelSearch()).findings({"ablations": table})[1]
    assert finding.verdict == verdict
    assert (finding.note == SAME_CHOICE) == (verdict == "not testable")


def test_random_channels_take_the_place_of_smooth_ones() -> None:
    found = statistics.ChannelStatistics(
        np.zeros((4, 30)), np.arange(30), np.arange(30.0), list(range(25))
    )
    search = ChannelSearch(top_k=4)
    pools = {
        s: Ablations(search=search, smoothness="random", seed=s).pools(
            search, found, found
        )["without smoothness"]
        for s in range(6)
    }
    assert (
        all(len(pool) == 4 and set(pool) <= set(range(25)) for pool in pools.values())
        and len({*map(tuple, pools.values())}) > 1
    )
    assert Ablations(search=search).pools(search, found, found)[
        "without smoothness"
    ] == list(range(25))


def test_a_single_channel_has_no_second(tiny: LM) -> None:
    only = ScaleChannel(channel=3, factor=0.5, layers=(1, 2))
    pools = {FULL: [3], "without monotonicity": [3], "without smoothness": [3]}
    found = Ablations(search=ChannelSearch(), control=False).settings(
        tiny, pools, {only: 1.0, replace(only, factor=0.0): 2.0}
    )
    assert (
        "top-2 channels" not in found
        and CONTROL not in found
        and found[FULL].factor == 0.5
    )


def test_the_papers_numbers_stand_in_its_own_setting_only() -> None:
    llama = "model=llama2_7b"
    nq = "task=nq_multidoc"
    rows = config_of("experiment=yu2025_table6", llama, nq).reference()[0]
    printed = {r["method"]: r["value"] for r in rows if r["model"] == "llama2_7b"}
    # Typed off Table 6 of the paper.
    assert printed["all tokens"] == pytest.approx(0.44)
    assert printed["without validation"] == pytest.approx(0.301)
    assert set(printed) == {"none", FULL, *CLAIMS} and "tiny" not in {
        r["model"] for r in rows
    }
    assert (
        config_of("experiment=yu2025_table6", llama, "task=kv_retrieval").reference()[0]
        == []
    )
    rows, note = config_of(
        "experiment=yu2025_table6", llama, nq, "task.documents=10"
    ).reference()
    assert rows == [] and "documents=10 (paper 20)" in note


def test_losses_over_ranges_are_those_of_plain_calls(
    ranged: dict[str, pd.DataFrame], lm: LM, task: KVRetrieval
) -> None:
    ranges = ranged["ranges"]
    own = ranges[ranges["kind"] == layer_selection.CHOSEN]
    assert {*zip(own["first"], own["last"], strict=True)} == {
        (a, b) for a in range(4) for b in range(a, 4)
    }
    base = _loss(lm, task, Unmodified())
    for _, row in ranges.iloc[[2, -1]].iterrows():
        method = ScaleChannel(
            channel=int(row["channel"]),
            factor=-1.0,
            layers=(int(row["first"]), int(row["last"])),
        )
        loss = _loss(lm, task, method)
        noise = embedded_noise("tiny", log_probabilities)
        assert_same([row["loss"], row["change"]], [loss, loss - base], noise, "losses")
    best = own.loc[own["loss"].idxmin()]
    rows = ranged["evaluation"].set_index("setting")
    assert rows.loc["best range", "layers"] == f"{best['first']}-{best['last']}"
    right = _right(lm, task, ScaleChannel(channel=15, factor=-1.0, layers=(0, 3)))
    assert rows.loc["all layers", "value"] == pytest.approx(right.mean())
    without = own[(own["first"] > 2) | (own["last"] < 2)]["change"].mean()
    within = own[(own["first"] <= 2) & (own["last"] >= 2)]["change"].mean()
    benefit = ranged["layers"].set_index("layer")["benefit"]
    assert benefit["2"] == pytest.approx(without - within)


def test_the_retrieval_score_is_that_of_eager_attention(
    ranged: dict[str, pd.DataFrame], lm: LM, task: KVRetrieval
) -> None:
    hits = np.zeros(lm.layers)
    examples = task.evaluation()
    before = lm.model.config._attn_implementation
    lm.model.set_attn_implementation("eager")
    for e in examples:
        code = lm.encode(e.prompt)
        with torch.no_grad():
            weights = lm.model(
                torch.tensor([code.ids]), output_attentions=True
            ).attentions
        spans = [
            [i for i, (a, b) in enumerate(code.offsets) if a < last and b > first]
            for first, last in e.items
        ]
        for layer, maps in enumerate(weights):
            row = maps[0].mean(0)[-1]
            means = [float(row[span].mean()) for span in spans]
            hits[layer] += int(np.argmax(means)) == e.gold_position
    lm.model.set_attn_implementation(before)
    found = ranged["layers"].set_index("layer").loc[["0", "1", "2", "3"], "retrieval"]
    np.testing.assert_allclose(found, hits / len(examples) - 1 / 32, atol=1e-6)
    rows = ranged["layers"].set_index("layer")
    assert rows.loc[
        "inside minus outside the published range", "retrieval"
    ] == pytest.approx(found[1:].mean() - found.iloc[0])


def test_edges_compare_ranges_one_step_apart() -> None:
    rng = np.random.default_rng(0)
    changes = {
        (a, b): rng.normal(size=5) for a in range(0, 6, 2) for b in range(a + 1, 6, 2)
    }
    rows = edges(changes, 6, list("abcde")).set_index("edge")["change"]
    value = {layers: v.mean() for layers, v in changes.items()}
    assert rows["first"] == pytest.approx(
        np.mean([value[0, b] - value[2, b] for b in (3, 5)])
    )
    assert rows["last"] == pytest.approx(
        np.mean([value[a, 5] - value[a, 3] for a in (0, 2)])
    )
    assert edges({(0, 5): np.ones(5)}, 6, list("abcde")).empty


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["study=ablations", "method=scale_channel"],
            "method = 'scale_channel': allowed: none, or a method that treats",
        ),
        (["study=ablations", "search=official"], "search = 'official, monotone'"),
        (["study=ablations", "search.length=9999"], "search.length = 9999"),
        (["study=layer_selection", "method=none"], "scale_channel with one channel"),
        (
            ["study=layer_selection", "method.channel=[15,16]"],
            "scale_channel with one channel",
        ),
        (["study=layer_selection", "study.step=0"], "study.step = 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: list[str], message: str
) -> None:
    result = posbench(*args)
    assert (
        result.status == 2 and result.err.count("\n") == 1 and message in result.err
    ), result.err
    assert not run_folders(outputs)


def test_another_search_makes_another_run(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"one": pd.DataFrame({"value": [1.0]})}
    for name, nothing in (("measure", one), ("figures", {}), ("findings", ())):
        monkeypatch.setattr(
            Ablations, name, lambda self, given, nothing=nothing: nothing
        )
    for strings in (4, 5):
        assert posbench("study=ablations", f"search.strings={strings}").status == 0
    assert len(run_folders(outputs)) == 2


def test_settings_whose_answers_are_missing_are_compared_with_nothing() -> None:
    """The second setting is right wherever it answers; of every fourth prompt its reply is no answer."""
    answers = {"none": (1.0, 0.0) * 20, "x": (1.0, 1.0, np.nan, 1.0) * 10}
    rows = [
        {"method": method, "id": str(i), "cluster": str(i), "score": score}
        for method, scores in answers.items()
        for i, score in enumerate(scores)
    ]
    row = contrast_columns(pd.DataFrame(rows), "x", "none")
    assert (row["missing"], row["n"], row["value"]) == (0.25, 30, 1.0)
    assert row["gain"] == pytest.approx(2 / 3), "of the prompts that both answered"
    finding = Finding.above("it helps", "x minus none", estimate(row, "gain"), 0.01)
    assert finding.verdict == "holds"
    assert unless_missing(finding, row).verdict == "not testable"
    assert unless_missing(finding, {**row, "missing": 0.02}) == finding
    nothing = pd.DataFrame(rows).assign(score=np.nan)
    assert np.isnan(contrast_columns(nothing, "x", "none")["gain"])
