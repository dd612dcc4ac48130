"""The numbers of a run as tables; frames in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posbench.late import pd
from posbench.stats.bootstrap import with_interval
from posbench.stats.frames import UNMODIFIED, at_positions, of_metric, own_metric, shown
from posbench.stats.position_bias import STATISTICS

LONG = 24
PAGE = 40  # letters of a cell, and lines, from which on LaTeX breaks lines and pages
Table = tuple[list[str], list[list[str]]]
"""A header, and rows."""

BIAS_WORDS = {
    "position_bias": "position bias (std over positions)",
    "gap": "gap (best - worst)",
    "gap_null": "gap if positions did not matter",
    "primacy": "primacy (first - inner)",
    "recency": "recency (last - inner)",
    "middle_drop": "middle drop (ends - lowest inner)",
}


def cell(row: Any, form: str, scale: float = 100) -> str:
    """A share as `76.6 [72.1, 80.5]` in %; where there is none its note, in short."""
    if row is None or pd.isna(row.value):
        note = getattr(row, "note", "")
        return note.partition(":")[0] if isinstance(note, str) else ""
    value, low, high = (scale * each for each in (row.value, row.ci_low, row.ci_high))
    return with_interval(value, low, high, form)


def number(finding: Any) -> str:
    """The value of a finding with its interval; empty where it has none."""
    at = finding.value, finding.ci_low, finding.ci_high
    return "" if pd.isna(finding.value) else with_interval(*at)


def latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for LaTeX with booktabs, of more than a page also longtable; text is escaped, and columns of
    long texts are paragraphs."""
    frame = pd.DataFrame(rows, columns=list(header))
    wide = [max(map(len, [name, *frame[name]])) > LONG for name in header]
    tall = len(rows) * (4 if any(wide) else 1)  # lines, about
    paragraph = rf"p{{{min(0.3, 0.55 / max(sum(wide), 1)):.2f}\linewidth}}"
    style = (
        frame.style.hide(axis="index")
        .format(escape="latex")
        .format_index(escape="latex", axis="columns")
    )
    text: str = style.to_latex(
        hrules=True,
        column_format="".join(paragraph if long else "l" for long in wide),
        environment="longtable" if tall > PAGE else None,
    )
    # The old font encoding, still LaTeX's default, has other signs in these places.
    for sign, name in {"<": "less", ">": "greater", "|": "bar"}.items():
        text = text.replace(sign, rf"\text{name}{{}}")
    return text


def pct(share: float) -> str:
    """A share in %."""
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * share:+z.1f}"


def findings_table(findings: pd.DataFrame, models: bool = False) -> Table:
    """Verdicts, claims, and the statistics they are held against: one row for each finding, ours last; with
    a column of ``models`` where asked for, and one of notes where there are any."""
    rows = []
    table = findings.fillna({"note": "", "model": ""})
    for row in table.sort_values(
        "kind", key=lambda kind: kind != "paper", kind="stable"
    ).itertuples():
        p = (
            ""
            if pd.isna(row.p_holm)
            else f"{row.p_holm:.2g}"
            if row.p_holm >= 0.001
            else "<0.001"
        )
        front = (
            "Control: " if row.kind == "control" and "ontrol: " not in row.claim else ""
        )
        model = [row.model] * models
        rows.append(
            [
                row.verdict,
                *model,
                front + row.claim,
                number(row),
                row.statistic,
                p,
                str(row.n),
                str(row.note),
            ]
        )
    header = [
        "verdict",
        *["model"] * models,
        "claim",
        "value",
        "statistic",
        "p (Holm)",
        "n",
        "note",
    ]
    kept = len(header) - (not table["note"].any())
    return header[:kept], [row[:kept] for row in rows]


class _Columns:
    """A column for each method, and one for the difference of each modified one from the unmodified model."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
        differs = set(rows.loc[rows["metric"].str.endswith("_difference"), "method"])
        self.changed = [m for m in self.methods if m in differs]
        plain = (
            ["difference"]
            if len(self.changed) == 1
            else [f"{m}: difference" for m in self.changed]
        )
        self.header = [*map(shown, self.methods), *plain]

    def line(self, rows: pd.DataFrame, name: str, scale: float = 100) -> list[str]:
        """The cells of one metric, from rows in which it occurs once for each method."""
        form = "z.1f" if scale == 100 else "z.3f"
        cells: dict[Any, Any] = {(r.method, r.metric): r for r in rows.itertuples()}
        values = [cell(cells.get((m, name)), form, scale) for m in self.methods]
        return values + [
            cell(cells.get((m, f"{name}_difference")), f"+{form}", scale)
            for m in self.changed
        ]


def position_table(metrics: pd.DataFrame) -> Table:
    """From metrics.csv rows of a run, a row per gold position, `all` last: depth and score of each method in
    %, difference of each modified one in points, with their intervals, n."""
    named = {"": "score", "difference": "score_difference"}
    rows = pd.concat(
        [of_metric(metrics, key).assign(metric=name) for key, name in named.items()]
    )
    columns = _Columns(rows)
    table = []
    placed = at_positions(rows).sort_values("depth")
    depths = zip(placed["gold_position"].astype(str), placed["depth"], strict=True)
    names = {place: f"{round(100 * depth, 1):g} %" for place, depth in depths} | {
        "all": "all"
    }
    for place, name in names.items():
        here = rows[rows["gold_position"].astype(str) == place]
        n = "/".join(dict.fromkeys(map(str, here["n"])))
        table.append([name, *columns.line(here, "score"), n])
    return ["gold position", *columns.header, "n"], table


def position_words(metrics: pd.DataFrame) -> str:
    """What the gold positions are, from metrics.csv rows of a run; empty where there are none."""
    # A depth that the task does not tell tells of no items.
    place = pd.to_numeric(metrics["gold_position"], errors="coerce")
    items = (1 + place / pd.to_numeric(metrics["depth"])).max()
    return (
        ""
        if pd.isna(items)
        else f"gold position: of {items:.0f} items, 0 % the first, 100 % the last"
    )


def bias_table(metrics: pd.DataFrame) -> Table:
    """From metrics.csv rows of a run, a row per statistic of the curves over gold positions: each method and
    the difference of each modified one, in points with their intervals."""
    rows = metrics[metrics["metric"].str.removesuffix("_difference").isin(STATISTICS)]
    columns = _Columns(rows)
    there = set(rows["metric"])
    table = [
        [words, *columns.line(rows, name)]
        for name, words in BIAS_WORDS.items()
        if name in there
    ]
    return ["statistic", *columns.header], table


def limits(metrics: pd.DataFrame) -> dict[str, str]:
    """Why no position bias can be measured, by method, from metrics.csv rows of a run."""
    rows = (
        metrics[metrics["metric"] == "position_bias"]
        if "note" in metrics
        else metrics.iloc[:0]
    )
    return {
        row.method: row.note
        for row in rows[rows["value"].isna()].itertuples()
        if cell(row, "")
    }


def other_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """The scores over all examples beside the task's own, as :func:`subset_table` takes them."""
    metric = metrics["metric"].str.removesuffix("_difference")
    rest = (metric != own_metric(metrics)) & ~metric.isin(STATISTICS)
    rows = metrics[rest & (metrics["gold_position"].astype(str) == "all")]
    return rows.assign(subset="all", kind="average")


def subset_table(
    subsets: pd.DataFrame, kind: str = "", own: str | None = None
) -> Table:
    """Subsets and averages (or ``kind`` alone), from subsets.csv rows of a run: a row for each and metric.

    Columns: subset, metric (if there are several), value of each method with its interval, difference of each
    modified one, n. The task's own metric is in % and points, the others are in their own unit; ``own`` names
    it: None takes it from the rows, and empty says that it is not among them.
    """
    rows = subsets[subsets["kind"] == kind] if kind else subsets
    own = own_metric(subsets).iloc[0] if own is None else own
    columns = _Columns(rows)
    table = []
    plain = rows[~rows["metric"].str.endswith("_difference")]
    for where, name in dict.fromkeys(
        zip(plain["subset"], plain["metric"], strict=True)
    ):
        here = rows[rows["subset"] == where]
        n = str(here.loc[here["metric"] == name, "n"].iloc[0])
        table.append(
            [where, name, *columns.line(here, name, 100 if name == own else 1), n]
        )
    header = ["subset", "metric", *columns.header, "n"]
    if own and len({line[1] for line in table}) == 1:
        header = [header[0], *header[2:]]
        table = [[line[0], *line[2:]] for line in table]
    return header, table
