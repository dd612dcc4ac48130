"""The numbers of docs/mechanism.md.

python tools/mechanism.py DIR    keeps those of the runs in an outputs folder, and writes the page's tables
python tools/mechanism.py        writes the page's tables from those that are kept in experiments/yu2025/results

DIR holds the experiments yu2025_fig3, yu2025_mechanism_mask, yu2025_mechanism_channel and yu2025_mechanism_tokens, the
last one on each of the four models, and study=crop_mask on tiny_nope with layers 0 to 2 cropped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.errors import UserError, complain
from posbench.files.atomic import write_csv, write_text
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.report.folder import read_csv
from posbench.run.folder import (
    CONFIG,
    RunDir,
    open_run_dir,
    open_undamaged,
    runs_in,
)
from posbench.stats import reference
from posbench.stats.frames import UNMODIFIED
from tools.pages import between_marks

NUMBERS = paths.EXPERIMENTS / "yu2025" / "results" / "yu2025_mechanism.csv"
PAGE = paths.EXPERIMENTS.parent / "docs" / "mechanism.md"
MODELS = ("tiny", "tiny_b", "tiny_nope", "tiny_alibi")
WITH_ROPE = ("tiny", "tiny_b")
MASK = "yu2025_mechanism_mask"
CHANNEL = "yu2025_mechanism_channel"
TOKENS = "yu2025_mechanism_tokens"
ALL_MODELS = "yu2025_fig3"
DEEP_CROP = "crop_mask"
EFFECT_TABLES = {
    ALL_MODELS: "crop_mask_effects",
    MASK: "crop_mask_effects",
    CHANNEL: "effects",
    DEEP_CROP: "crop_mask_effects",
}
"""The table of effects of each study, by the folder of its runs."""
VERDICTS = ("holds", "contradicted", "inconclusive", "not testable")
CLAIMS = {
    "crop_level": "the crop mask brings attention to the gold item near its level at the beginning (Section 2.2)",
    "crop_score": "the crop mask raises accuracy",
    "crop_over_moves": "as we read Figure 3, moved position ids raise attention less than the crop mask",
    "gold_rise": "one channel of one item, moved towards the beginning, raises attention to it (Appendix D.5)",
}
LEVELS = {
    "crop_level": "crop mask: share of the level at the first gold position",
    "end_level": "PE to end: share of the level at the last gold position",
    "mask_beyond_ids_attention": "crop mask added to PE to end",
    "crop_other_attention": "crop of another item (control)",
    "pe_to_end_other_attention": "position ids of another item to the end (control)",
}
DEVIATIONS = {
    "deviation_crop": ("crop", UNMODIFIED),
    "deviation_crop_over_end": ("crop", "pe_to_end"),
    "deviation_both_over_end": ("crop_pe_to_end", "pe_to_end"),
}
"""Standard deviations between questions, each of a difference of two variants."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the numbers, where runs are given, and the page; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.folder:
            write_csv(NUMBERS, collect_numbers(arguments.folder))
        for name, table in tables(read_numbers()).items():
            write_text(PAGE, between_marks(PAGE, name, table))
    except UserError as error:
        complain(error)
        return error.status
    return 0


def read_numbers() -> pd.DataFrame:
    """The committed numbers: experiment, model, name, value with its interval, n, verdict."""
    return pd.read_csv(NUMBERS, keep_default_na=False, na_values=[""])


def collect_numbers(folder: Path) -> pd.DataFrame:
    """The numbers of the newest runs in an outputs folder, as :func:`read_numbers` has them.

    Raises:
        UserError: A run is missing or damaged.
    """
    newest: dict[tuple[str, str, str], RunDir] = {}
    for path in runs_in(folder):
        if not (path / CONFIG).is_file():
            continue  # a sweep
        run = open_run_dir(path)
        config = run.config()
        model = (config.get("model") or {}).get("name", "")
        tokens = str((config.get("method") or {}).get("tokens", ""))
        newest[path.parents[1].name, model, tokens] = run
    rows: list[dict[str, Any]] = []
    for experiment, table in EFFECT_TABLES.items():
        for (name, model, _), run in newest.items():
            if name == experiment:
                rows += _effect_rows(run, experiment, model, table)
    for (name, model, tokens), run in newest.items():
        if name == TOKENS:
            rows.append(_gain_row(run, model, tokens))
    numbers = pd.DataFrame(rows)
    for experiment, models in (
        (ALL_MODELS, MODELS),
        (MASK, WITH_ROPE),
        (CHANNEL, MODELS),
        (TOKENS, MODELS),
        (DEEP_CROP, ("tiny_nope",)),
    ):
        for model in models:
            if numbers.empty or not len(_rows(numbers, experiment, model)):
                allowed = f"a folder with {experiment} on {model}"
                raise UserError("DIR", str(folder), allowed, "see this tool's --help")
    return numbers.sort_values(["experiment", "model"], kind="stable")


def _effect_rows(
    run: RunDir, experiment: str, model: str, table: str
) -> list[dict[str, Any]]:
    """Effects of a study with the verdicts that rest on them, and deviations between questions."""
    open_undamaged(run.path)
    effects = read_csv(run.path / f"{table}.csv")
    findings = read_csv(run.path / "findings.csv")
    assert effects is not None and findings is not None
    verdicts = findings.set_index("claim")["verdict"]
    claims = reference.read_table("yu2025_claims.csv", "effects", "claim")
    verdict_of = {
        row.effects.split()[0]: verdicts.get(row.claim, "")
        for row in claims.itertuples()
    }
    rows = []
    for effect in effects.to_dict("records"):
        name = effect.pop("effect")
        verdict = verdict_of.pop(name, "")
        rows.append({"name": name, **effect, "verdict": verdict})
    # What a run cannot test has a verdict, but no effect.
    rows += [{"name": n, "verdict": v} for n, v in verdict_of.items() if v]
    if experiment == MASK:
        rows += _deviation_rows(run)
    return [{"experiment": experiment, "model": model, **row} for row in rows]


def _deviation_rows(run: RunDir) -> list[dict[str, Any]]:
    """Standard deviations between inner prompts, as shares of the unmodified attention to the gold item."""
    layers = read_csv(run.path / "crop_mask.csv")
    assert layers is not None
    first, last = layers[["retrieval_first", "retrieval_last"]].iloc[0].astype(int)
    rows = pd.DataFrame(run.rows_without_error("rows.jsonl"))
    rows["attention"] = [
        sum(by_layer[first : last + 1]) / (last + 1 - first)
        for by_layer in rows["attention"]
    ]
    by_variant = rows.pivot(index="id", columns="variant", values="attention")
    position = by_variant.index.str.split("-").str[0].astype(int)
    is_inner = (position > position.min()) & (position < position.max())
    inner = by_variant[is_inner]
    level = inner[UNMODIFIED].mean()
    return [
        {"name": name, "value": (inner[a] - inner[b]).std() / level, "n": len(inner)}
        for name, (a, b) in DEVIATIONS.items()
    ]


def _gain_row(run: RunDir, model: str, tokens: str) -> dict[str, Any]:
    """Change of accuracy over all positions of a run of yu2025_mechanism_tokens."""
    open_undamaged(run.path)
    metrics = read_csv(run.path / "metrics.csv")
    assert metrics is not None
    is_gain = metrics["metric"] == "accuracy_difference"
    row = metrics[is_gain & (metrics["gold_position"] == "all")].iloc[0]
    columns = ["value", "ci_low", "ci_high", "n"]
    return {"experiment": TOKENS, "model": model, "name": tokens, **row[columns]}


def tables(numbers: pd.DataFrame) -> dict[str, str]:
    """The tables and sentences of the page by the marks between which they stand."""
    return {
        "verdicts": _verdict_table(numbers),
        "levels": _level_table(numbers),
        "deep crop": _deep_crop(numbers),
        "keys": _key_table(numbers),
        "deviations": _deviations(numbers),
    }


def _rows(numbers: pd.DataFrame, experiment: str, model: str) -> pd.DataFrame:
    """The numbers of one run, by name."""
    is_run = (numbers["experiment"] == experiment) & (numbers["model"] == model)
    return numbers[is_run].set_index("name")


def _verdict_table(numbers: pd.DataFrame) -> str:
    """The claims of :data:`CLAIMS`, the models under their verdicts."""
    rows = []
    for effect, claim in CLAIMS.items():
        experiment = CHANNEL if effect == "gold_rise" else ALL_MODELS
        cells: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        for model in MODELS:
            row = _rows(numbers, experiment, model).loc[effect]
            text = f"`{model}`"
            if row["verdict"] != "not testable":
                text = f"{text} {number(effect, row)}"
            cells[row["verdict"]].append(text)
        rows.append([claim, *(", ".join(cells[verdict]) for verdict in VERDICTS)])
    return markdown(["claim", *VERDICTS], rows)


def _level_table(numbers: pd.DataFrame) -> str:
    """The effects of :data:`LEVELS` on the models with RoPE."""
    rows = [
        [
            text,
            *(number(effect, _rows(numbers, MASK, m).loc[effect]) for m in WITH_ROPE),
        ]
        for effect, text in LEVELS.items()
    ]
    header = ["share of the unmodified level, or change of attention"]
    return markdown([*header, *(f"`{model}`" for model in WITH_ROPE)], rows)


def _deep_crop(numbers: pd.DataFrame) -> str:
    """What `tiny_nope` does with layers 0 to 2 cropped."""
    run = _rows(numbers, DEEP_CROP, "tiny_nope")
    unmodified = 100 * run.loc["unmodified_inner", "value"]
    unmodified /= run.loc["unmodified_first", "value"]
    rise = run.loc["crop_attention"]
    verdict = f"that the crop raises it is {rise['verdict']}"
    return (
        "Cropped in layers 0 to 2, `tiny_nope` gives the gold item "
        f"{number('crop_level', run.loc['crop_level'])} of the first position's attention, "
        f"unmodified {unmodified:.0f} %: attention changes by {number('crop_attention', rise)} ({verdict}), and "
        f"accuracy by {number('crop_score', run.loc['crop_score'])} points:"
    )


def _key_table(numbers: pd.DataFrame) -> str:
    """Gains of the method's halves, and whether one item's channel steers attention."""
    words = {"holds": "yes", "contradicted": "no", "inconclusive": "cannot tell"}
    rows = []
    for model in MODELS:
        gains = _rows(numbers, TOKENS, model)
        channel = _rows(numbers, CHANNEL, model)
        rise = channel.loc["gold_rise"]
        rows.append(
            [
                f"`{model}`",
                *(
                    number("gain_score", gains.loc[tokens])
                    for tokens in ("both", "last", "earlier")
                ),
                f"{words[rise['verdict']]}: {number('gold_rise', rise)}",
                number("gold_opposite", channel.loc["gold_opposite"]),
            ]
        )
    header = [
        "model",
        "both (the method)",
        "last token only",
        "keys of earlier tokens only",
        "does one item's channel raise attention?",
        "the opposite sign",
    ]
    return markdown(header, rows)


def _deviations(numbers: pd.DataFrame) -> str:
    """Standard deviations between questions, as a table."""
    rows = []
    texts = (
        "change under the crop mask",
        "crop mask minus PE to end",
        "what the crop mask adds to PE to end",
    )
    for name, text in zip(DEVIATIONS, texts, strict=True):
        cells = [f"{_rows(numbers, MASK, m).loc[name, 'value']:.2f}" for m in WITH_ROPE]
        rows.append([text, *cells])
    header = ["standard deviation between questions, share of the inner attention"]
    return markdown([*header, *(f"`{model}`" for model in WITH_ROPE)], rows)


def number(name: str, row: pd.Series) -> str:
    """A number with its interval: levels in percent, scores in points, attention as it is."""
    values = [float(row[column]) for column in ("value", "ci_low", "ci_high")]
    if name.endswith("_level"):
        value, low, high = (f"{100 * v:.0f}" for v in values)
        return f"{value} % [{low}, {high}]"
    if name.endswith("_score"):
        value, low, high = (f"{100 * v:.1f}" for v in values)
        return f"{100 * values[0]:+.1f} [{low}, {high}]"
    digits = 4 if abs(values[0]) >= 1e-4 else 5
    return f"{values[0]:+.{digits}f} [{values[1]:.{digits}f}, {values[2]:.{digits}f}]"


if __name__ == "__main__":
    sys.exit(main())
