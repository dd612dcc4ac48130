"""The study of structure: what it sums over, its tables beside theory, and its verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy

from posbench.stats.bootstrap import Estimate, combined, wilson
from posbench.studies import structure as study
from posbench.tasks import Example
from posbench.tasks.kv_retrieval import KVRetrieval
from posbench.theory import masks, residual
from tests.conftest import Result, run_folders
from tests.messages import ANY, assert_refused

SMALL = [
    "study=structure",
    "task.pairs=12",
    "task.positions=[0,5,11]",
    "task.limit=6",
    "study.prompts=6",
]


# Neutral text


def test_neutral_text_is_as_short_as_asked_for() -> None:
    def count(text: str) -> int:
        return len(text.split())

    for tokens in (1, 2, 17, 500):
        text = study.neutral_text(tokens, count)
        assert count(text) == tokens and text.endswith("\n\n")
    assert study.neutral_text(500, count).startswith(study.NEUTRAL_TEXT)
    for tokens in (5, 48, 333):  # a token for each character
        text = study.neutral_text(tokens, len)
        longest = max(map(len, study.NEUTRAL_TEXT.split()))
        assert tokens <= len(text) <= tokens + longest + 1


def test_text_in_front_moves_all_spans() -> None:
    task = KVRetrieval(pairs=8, prompt="compact", records="words", limit=1)
    for example in task.evaluation():
        moved = study.put_in_front("Once upon a time. ", example)
        assert moved.prompt == "Once upon a time. " + example.prompt
        for before, after in zip(example.items, moved.items, strict=True):
            assert moved.prompt[slice(*after)] == example.prompt[slice(*before)]
        assert example.question and moved.question
        question = example.prompt[slice(*example.question)]
        assert moved.prompt[slice(*moved.question)] == question
        assert moved.original == example and moved.id == example.id
    document = Example(id="0", prompt="abcdef", answers=("a",), document=(2, 4))
    moved = study.put_in_front("xy", document)
    assert moved.document and moved.prompt[slice(*moved.document)] == "cd"


# What is summed over


def test_a_token_belongs_to_the_item_in_which_it_begins() -> None:
    prompt = 'So: {"a": "bc", "d": "e"} ?'
    items = [(5, 14), (16, 24), (0, 0)]
    pieces = [
        "So",
        ":",
        ' {"',
        "a",
        '":',
        ' "',
        "bc",
        '",',
        ' "',
        "d",
        '": "',
        "e",
        '"}',
    ]
    offsets, start = [(0, 0)], 0  # a token of a template
    for piece in pieces:
        offsets.append((start, start + len(piece)))
        start += len(piece)
    offsets.append((start, start + 1))  # a space alone
    owners = study.token_owners(prompt, offsets, items)
    assert owners.tolist() == [-1, -1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]


@pytest.mark.parametrize("length", [40, 300])
def test_layout_of_a_prompt(length: int) -> None:
    """Sums over tokens, each of which is in one part; distances by token, or by part in a longer prompt."""
    owners = np.full(length, -1)
    owners[1:7], owners[7:10], owners[20:28] = 0, 1, 3
    layout = study._Layout(owners, 4, (1,))
    targets = layout.targets()
    parts = targets[:, 6:]
    assert parts.shape[1] == min(length - 2, study.MAX_PARTS)
    whole = targets[:, 0] + targets[:, 1] + parts.sum(1)
    assert (whole == 1).all() and targets[0, 0] == targets[-1, 1] == 1

    a, b = np.random.default_rng(length).dirichlet(np.full(length, 0.3), size=2)
    entry = layout.entry(a @ targets)
    sums = [a[1:7].sum(), a[7:10].sum(), np.nan, a[20:28].sum()]
    wanted = np.array(sums) / np.mean([sums[0], sums[3]])
    assert entry["items"] == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert entry["first"] == pytest.approx(a[0], rel=1e-5)
    assert entry["last"] == pytest.approx(a[-1], rel=1e-5)

    found = layout.distances(a @ targets, b @ targets)
    for name, chosen in (("", slice(None)), ("_inner", slice(1, -1))):
        x, y = a[chosen] / a[chosen].sum(), b[chosen] / b[chosen].sum()
        # The area between the two distribution functions.
        distance = np.abs(np.cumsum(x - y)).sum() / (length - 1)
        parts_are_tokens = length - 2 <= study.MAX_PARTS
        slack = 1e-5 if parts_are_tokens else 2 / length
        assert found[f"wasserstein{name}"] == pytest.approx(distance, abs=slack)
        if parts_are_tokens:
            rank = scipy.stats.spearmanr(x, y).statistic
            assert found[f"spearman{name}"] == pytest.approx(rank, abs=1e-5)


def test_layout_where_nothing_is_left_for_the_items() -> None:
    owners = np.array([-1, -1, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1])
    layout = study._Layout(owners, 2, (0,))
    sink = np.eye(12)[0] @ layout.targets()
    assert np.isnan(layout.entry(sink)["items"]).all()
    distances = layout.distances(sink, np.full(12, 1 / 12) @ layout.targets())
    assert distances["wasserstein"] == pytest.approx(0.5, abs=1e-5)
    assert np.isnan(distances["wasserstein_inner"])


# Tables


def test_tables_of_a_run(posbench: Callable[..., Result], outputs: Path) -> None:
    """On tiny, whose mask is causal and whose position embedding is no structure: theory with the measured shares."""
    result = posbench(*SMALL)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    tables = {file.stem: pd.read_csv(file) for file in folder.glob("structure_*.csv")}
    assert set(tables) == {
        f"structure_{name}"
        for name in ("shares", "items", "rollouts", "scores", "effects")
    }
    n = 12 * 4 + 3
    shares = tables["structure_shares"]
    plain = shares[shares["front"] == "none"].sort_values("layer")["lambda"]
    layers = [masks.uniform(masks.causal(n))] * len(plain)
    row = residual.rollout(layers, plain)[-1][-1]
    # An item is two words and the marks between and behind, whose first character closes it.
    items = row[1 : 4 * 12 + 1].reshape(12, 4).sum(1)
    table = tables["structure_items"]
    is_plain = (table["front"] == "none") & ~table["gold"]
    of_structure = table[
        is_plain & (table["kind"] == "structure") & (table["share"] == "measured")
    ].set_index("item")["relative"]
    for item in (0, 3, 8):
        # Prompts that ask for this item are left out, as the item they ask for is left out of their mean.
        means = [np.delete(items, gold).mean() for gold in (0, 5, 11) if gold != item]
        wanted = np.mean(items[item] / means)
        assert of_structure[item] == pytest.approx(wanted, rel=2e-3)
    asked = table[(table["front"] == "none") & table["gold"]]
    assert set(asked["item"]) == {0, 5, 11} and set(asked["n"]) == {2}

    rollouts = tables["structure_rollouts"].set_index(
        ["front", "kind", "share", "measure"]
    )["value"]
    assert rollouts["none", "structure", "measured", "first"] == pytest.approx(
        row[0], rel=2e-3
    )
    assert rollouts["none", "structure", "measured", "last"] == pytest.approx(
        residual.last_token_influence(n, plain), rel=2e-3
    )
    assert (
        rollouts["none", "structure", "1.0", "first"]
        > rollouts["none", "structure", "0.5", "first"]
    )

    effects = tables["structure_effects"].set_index("effect")
    assert effects.loc["sum_of_lambdas", "value"] == pytest.approx(plain.sum())
    assert effects.loc["log_tokens", "value"] == pytest.approx(np.log(n))
    assert effects.loc["text_tokens", "value"] >= round(n / 3)
    named = ["favoured", "disfavoured", "lowered"]
    assert effects.loc[named, "value"].tolist() == [0, 11, 0]
    scores = tables["structure_scores"].set_index(["front", "gold_position"])
    a, b, c = (scores.loc[("none", p), "score"] for p in (0, 5, 11))
    assert effects.loc["lead", "value"] == pytest.approx(a - (b + c) / 2)
    assert effects.loc["direction", "value"] == pytest.approx(a - c)
    x, y, z = (scores.loc[("text", p), "score"] for p in (0, 5, 11))
    lost = (a - (b + c) / 2) * 2 / 3 - (x - (y + z) / 2)
    assert effects.loc["lead_lost_over_bound", "value"] == pytest.approx(lost)
    parts = [Estimate(s, *wilson(6 * s, 6), 6) for s in (a, c)]
    newcombe = combined(parts, [1, -1], 18)
    assert effects.loc["direction", "ci_low"] == pytest.approx(newcombe.ci_low)
    page = (folder / "report.html").read_text()
    assert "Herasimchyk et al. 2026" in page and "structure.svg" not in result.err


@pytest.mark.parametrize(
    ("settings", "field", "value", "hint"),
    [
        (["task.positions=[50%]"], "task.positions", 1, "task.positions="),
        (["method=scale_channel"], "method", "scale_channel", "method"),
        (["study.text_share=0"], "study.text_share", 0, "study.text_share"),
        (["study.text_share=4"], "prompt length", ANY, "study.text_share="),
        (["study.prompts=1"], "study.prompts", 1, "study.prompts=2"),
    ],
)
def test_what_the_study_refuses(
    posbench: Callable[..., Result],
    settings: list[str],
    field: str,
    value: object,
    hint: str,
) -> None:
    result = posbench("study=structure", "model=tiny", *settings)
    assert result.status == 2
    assert_refused(result.err, field, value, hint=hint)


# Verdicts


def verdicts(
    direction: float,
    lead: float,
    after: float,
    moved: float = 1.0,
    best: float = 1.0,
    disfavoured: int = 11,
) -> tuple[str, str, str]:
    """Verdicts on direction and cause, and the note on the cause, of a study with intervals of +-0.1.

    Args:
        direction: Score of the favoured gold position minus that of the disfavoured one.
        lead: Lead of the gold position whose prediction the text lowers most.
        after: The same behind the text.
        moved: What the prediction loses beyond a third.
        best: Best score behind the text.
        disfavoured: Gold position with the least influence under structure alone; 0 has the most.
    """
    values = {
        "favoured": 0,
        "disfavoured": disfavoured,
        "direction": direction,
        "lead": lead,
        "lead_behind_text": after,
        "lead_lost_over_bound": 2 / 3 * lead - after,
        "predicted": 4.0,
        "predicted_behind_text": 2.0,
        "predicted_lost_over_bound": moved,
        "lowered": 0,
        "text_tokens": 40,
        "nearer_to_gradient": 0.3,
    }
    rows = [
        {"effect": name, "value": v, "ci_low": v - 0.1, "ci_high": v + 0.1, "n": 60}
        for name, v in values.items()
    ]
    scores = pd.DataFrame(
        {"front": ["none", "none", "text"], "score": [1.0, 0.5, best]}
    )
    tables = {"structure_effects": pd.DataFrame(rows), "structure_scores": scores}
    first, nearer, cause = study.Structure().findings(tables)
    assert (nearer.verdict, nearer.kind) == ("holds", "paper")
    assert (first.kind, cause.kind) == ("paper", "source")
    return first.verdict, cause.verdict, cause.note


def test_a_bias_is_structural_only_if_prediction_and_score_both_move() -> None:
    assert verdicts(0.6, 0.6, 0.1)[:2] == ("holds", "holds")
    # SmolLM2: the score stays where it was.
    direction, cause, note = verdicts(0.7, 0.7, 0.8)
    assert (direction, cause) == ("holds", "contradicted")
    assert note.startswith("item 0 is predicted 4 times the mean")
    assert study.conclude(direction, cause)[0] == "direction only"
    direction, cause, note = verdicts(-0.3, 0.6, 0.1)
    assert (direction, cause) == ("contradicted", "contradicted")
    assert study.conclude(direction, cause)[0] == "not the direction"
    assert verdicts(0.05, 0.6, 0.1)[:2] == ("inconclusive", "inconclusive")


def test_without_a_prediction_there_is_no_verdict_on_it() -> None:
    """PINE reads all items alike: no gold position can be compared with itself."""
    direction, cause, _ = verdicts(0.0, 0.6, 0.5, disfavoured=0)
    assert (direction, cause) == ("not testable", "not testable")
    assert study.conclude(direction, cause)[0] == "no prediction"


def test_a_control_that_moves_nothing_decides_nothing() -> None:
    for settings, obstacle in (
        ({"moved": 0.05}, "does not lower the prediction"),
        ({"best": 0.4}, "no longer does the task"),
        ({"lead": 0.05}, "no sure lead"),
    ):
        values = {"direction": 0.6, "lead": 0.6, "after": 0.5, **settings}
        direction, cause, note = verdicts(**values)
        assert (direction, cause) == ("holds", "not testable") and obstacle in note
