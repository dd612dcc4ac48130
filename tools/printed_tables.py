"""The papers' tables against themselves: averages, stated numbers, repeated cells, impossible shares.

python tools/printed_tables.py [FOLDER]    # writes four tables and findings.csv, by default to build/printed_tables

Asked is whether what Yu et al. 2025 and LPES print follows from the cells that they print, as they are in
their ``reference/`` folders. A cell that counts right answers of 500 is exact; any other may be half a unit of its
last digit off, and so may a mean of such cells.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from posbench.files.atomic import write_csv
from posbench.late import pd
from posbench.report.folder import study_tables
from posbench.report.text import count_verdicts
from posbench.stats import reference
from posbench.stats.findings import Finding, findings_table

FOLDER = Path("build/printed_tables")
YU = "Yu et al. 2025"
LPES = "LPES"
# Tables by the questions behind each cell; 0: not stated, or no share of right answers.
TABLES_BY_QUESTIONS = {
    500: "yu2025_table1_nq_kv lpes_table1_mdqa_kv lpes_table6_curve_types lpes_table8_runs "
    "lpes_table11_gradient lpes_table15_lambda lpes_table16_curve_13b",
    0: "yu2025_table2_longbench yu2025_table5_latency lpes_table2_zeroscrolls lpes_table3_leval "
    "lpes_table5_latency lpes_table10_ga_runtime lpes_table17_16k",
}
# Questions in L-Eval's files, one right answer each.
EXAMS = {"QuALITY": 202, "TOEFL": 269}
FOLLOWS = "follows"
WITHIN_ROUNDING = "within the rounding of its cells"
DOES_NOT_FOLLOW = "does not follow"
FLOAT_ERROR = 1e-9  # decimals are not exact in floats


class Statement(NamedTuple):
    """A number that a text states, and what the cells of its tables give.

    Attributes:
        place: Paper and section.
        statement: What the number is.
        printed: The number.
        within: Difference that rounding of both allows (half of a last digit).
        cells: What the cells give.
        n: Cells or rows that it is made of.
        note: Further numbers.
    """

    place: str
    statement: str
    printed: float
    within: float
    cells: float
    n: int
    note: str


def main(folder: Path) -> None:
    """Write the tables and the verdicts to a folder, and print how many claims hold."""
    cells = printed_cells()
    tables = {
        "averages": averages(cells),
        "shares": shares(cells),
        "repeated": repeated(cells),
        "statements": statements(cells),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_csv(folder / f"{name}.csv", table)
    # From what was written: a verdict never rests on digits that no file holds.
    judged = judge(study_tables(folder, list(tables)))
    findings = findings_table(judged, model="")
    write_csv(folder / "findings.csv", findings)
    print(f"{count_verdicts(findings)} {folder}")


def judge(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    """One finding for the averages and the shares of each table, the repeated cells, and each statement."""
    findings = [
        *_cell_findings(tables["averages"], "averages follow from their cells"),
        *_cell_findings(tables["shares"], "cells are shares k / n"),
    ]

    copies = tables["repeated"].query("same >= 3 and not one_model")
    note = "; ".join(
        f"{row.table}: {row.first} = {row.second}: {row.cells}"
        for row in copies.itertuples()
    )
    claim = "Rows of two models do not share three cells"
    statistic = "pairs that do, of those that share two"
    number = (len(copies), len(tables["repeated"]))
    findings.append(Finding.that(copies.empty, claim, statistic, number, note))

    for row in tables["statements"].itertuples():
        claim = f"{row.place}: {row.statement}"
        note = f"printed: {row.printed:g}, within {row.within:g}; {row.note}"
        follows = row.verdict == FOLLOWS
        number = (row.cells, row.n)
        note = note.rstrip("; ")
        findings.append(Finding.that(follows, claim, "by the cells", number, note))
    return findings


def _cell_findings(rows: pd.DataFrame, claim: str) -> Iterator[Finding]:
    """A finding for each table of the papers: whether a claim holds for all of its rows."""
    for table, table_rows in rows.groupby("table", sort=False):
        wrong = table_rows[table_rows["verdict"] == DOES_NOT_FOLLOW]
        note = "; ".join(
            f"{row.model} {row.method} {row.cell} {row.printed}: {row.expected:.2f}"
            for row in wrong.itertuples()
        )
        number = (len(wrong), len(table_rows))
        yield Finding.that(
            wrong.empty, f"{table}: {claim}", "that do not", number, note
        )


def printed_cells() -> pd.DataFrame:
    """Read the cells of all tables.

    Returns:
        Rows of table, model, method, task, cell, printed, value, half (of the last digit), n (questions behind
        the cell, or 0), average (whether the cell is one).
    """
    columns = ("model", "method", "task", "position", "metric", "value")
    parts = []
    for n, files in TABLES_BY_QUESTIONS.items():
        for file in files.split():
            paper, number = re.findall(r"^(.+)_table(\d+)", file)[0]
            paper_name = YU if paper == "yu2025" else LPES
            part = reference.read_table(f"{file}.csv", *columns)
            part = part.rename(columns={"value": "printed"})
            parts.append(part.assign(table=f"{paper_name}, Table {number}", n=n))
    data = pd.concat(parts, ignore_index=True)
    # A dash or a slash, not applicable, becomes NaN.
    data["value"] = pd.to_numeric(data["printed"], errors="coerce")
    data = data.dropna(subset="value")
    num_decimals = data["printed"].str.partition(".")[2].str.len()
    data["half"] = 0.5 * 10.0**-num_decimals
    task_and_subset = data["task"].str.partition(":")
    subset = task_and_subset[2]
    data["task"] = task_and_subset[0]
    data["cell"] = subset.where(subset != "", data["position"])
    data["average"] = data["cell"].isin(["Average", "Avg.", "AVG"])
    return data.assign(n=data["cell"].map(EXAMS).fillna(data["n"]).astype(int))


def averages(data: pd.DataFrame) -> pd.DataFrame:
    """Compare printed averages with the means of their cells.

    Args:
        data: Cells, see :func:`printed_cells`.

    Returns:
        Rows of table, model, method, cell (the task), printed, expected (the mean), n (cells), missing (what the
        cells lack in sum), verdict.
    """
    rows = []
    keys = ["table", "model", "method", "task"]
    for (table, model, method, task), row in data.groupby(keys, sort=False):
        cells = row[~row["average"]]
        mean = cells["value"].mean()
        is_exact = (cells["n"] == 500).all()
        cell_rounding = 0.0 if is_exact else cells["half"].max()
        for average in row[row["average"]].itertuples():
            tolerance = average.half + FLOAT_ERROR
            distance = abs(average.value - mean)
            if distance <= tolerance:
                verdict = FOLLOWS
            elif distance <= tolerance + cell_rounding:
                verdict = WITHIN_ROUNDING
            else:
                verdict = DOES_NOT_FOLLOW
            rows.append(
                {
                    "table": table,
                    "model": model,
                    "method": method,
                    "cell": task,
                    "printed": average.printed,
                    "expected": mean,
                    "n": len(cells),
                    "missing": (average.value - mean) * len(cells),
                    "verdict": verdict,
                }
            )
    return pd.DataFrame(rows)


def shares(data: pd.DataFrame) -> pd.DataFrame:
    """Compare cells that count right answers with the nearest share that a whole number of them gives.

    Args:
        data: Cells, see :func:`printed_cells`.

    Returns:
        Rows of table, model, method, cell, printed, expected (that share), n (questions), verdict.
    """
    rows = data[(data["n"] > 0) & ~data["average"]].copy()
    right_answers = (rows["value"] * rows["n"] / 100).round()
    rows["expected"] = 100 * right_answers / rows["n"]
    distance = (rows["expected"] - rows["value"]).abs()
    follows = distance <= rows["half"] + FLOAT_ERROR
    rows["verdict"] = np.where(follows, FOLLOWS, DOES_NOT_FOLLOW)
    return rows[
        ["table", "model", "method", "cell", "printed", "expected", "n", "verdict"]
    ]


def repeated(data: pd.DataFrame) -> pd.DataFrame:
    """Find pairs of a table's rows with two or more equal cells in the same columns (0 and 100 left out).

    Args:
        data: Cells, see :func:`printed_cells`.

    Returns:
        Rows of table, first, second (model and method of the two), one_model, same (equal cells), of (cells),
        cells (the equal ones).
    """
    rows = []
    informative = data[~data["average"] & ~data["value"].isin([0, 100])]
    for table, cells in informative.groupby("table", sort=False):
        wide = cells.pivot(
            index=["model", "method"], columns=["task", "cell"], values="printed"
        )
        for (first, first_cells), (second, second_cells) in combinations(
            wide.iterrows(), 2
        ):
            is_same = (first_cells == second_cells).to_numpy()
            if is_same.sum() >= 2:
                rows.append(
                    (
                        table,
                        " ".join(first),
                        " ".join(second),
                        first[0] == second[0],
                        is_same.sum(),
                        len(first_cells),
                        ", ".join(first_cells[is_same]),
                    )
                )
    columns = ["table", "first", "second", "one_model", "same", "of", "cells"]
    return pd.DataFrame(rows, columns=columns)


def statements(data: pd.DataFrame) -> pd.DataFrame:
    """Compare the numbers that the texts state with what the cells give.

    Args:
        data: Cells, see :func:`printed_cells`.

    Returns:
        The fields of :class:`Statement`, and the verdict.
    """
    table = pd.DataFrame(
        [*_yu_statements(data), *_lpes_statements(data)], columns=Statement._fields
    )
    distance = (table["cells"] - table["printed"]).abs()
    follows = distance <= table["within"] + FLOAT_ERROR
    return table.assign(verdict=np.where(follows, FOLLOWS, DOES_NOT_FOLLOW))


def _yu_statements(data: pd.DataFrame) -> Iterator[Statement]:
    """Section 4.2 and Appendix C.4: gains in points, times as ratios."""
    section = f"{YU}, Section 4.2"
    # Task, its name in the table, gain over all positions and over the last four.
    stated_gains = (
        ("NQ", "NaturalQuestions-20docs", 9.3, 11.3),
        ("KV retrieval", "KV-retrieval-140pairs", 15.2, 16.8),
    )
    for task, name, printed, printed_late in stated_gains:
        gains = _gains(data, f"{YU}, Table 1", name, "Ours", "Original")
        gain = gains.mean(axis=1)
        text = f"largest gain on {task}"
        yield _largest(section, text, printed, 0.05, gain)
        late_gain = gains.iloc[:, 1:].mean(axis=1)
        text = f"largest gain on {task}, last four positions"
        yield _largest(section, text, printed_late, 0.05, late_gain)
    # "At most positions, except for LLaMA-2-13B": one model.
    text = "models without a gain at most positions of KV retrieval"
    without_gain = ((gains > FLOAT_ERROR).mean(axis=1) <= 0.5).sum()
    note = f"losses of the average: {_top_three(-gain)}"
    yield Statement(section, text, 1, 0, without_gain, len(gain), note)

    gains = _gains(data, f"{YU}, Table 2", "LongBench", "Ours", "Original")
    stated = {
        "FewShot": 1.5,
        "Code": 3.4,
        "Synth.": 4.0,
        "SingleDoc": 9.2,
        "MultiDoc": 1.9,
    }
    for cell, printed in stated.items():
        text = f"largest gain on LongBench, {cell}"
        yield _largest(section, text, printed, 0.15, gains[cell])
    text = "LongBench cells that fall (no capability is impaired)"
    falls = (gains < -0.1 - FLOAT_ERROR).sum().sum()
    note = f"losses: {_top_three(-gains.stack())}"
    yield Statement(section, text, 0, 0, falls, gains.size, note)

    ratio = _ratio(data, f"{YU}, Table 5", "Ms-PoE", "FlashAttention-2")
    text = "time of Ms-PoE over the unmodified model's (a doubling)"
    yield _largest(f"{YU}, Appendix C.4", text, 2, 0.5, ratio)


def _lpes_statements(data: pd.DataFrame) -> Iterator[Statement]:
    """Abstract, Sections 1 and 4.2, Table 2, Appendices B and H."""
    table = f"{LPES}, Table 1"
    lpes = "LPES (Ours)"
    base = "Baseline"
    kv_gains = _gains(data, table, "Key-Value Retrieval", lpes, base)
    mdqa_gains = _gains(data, table, "MDQA", lpes, base)
    gain = kv_gains.mean(axis=1)
    text = "largest gain on KV retrieval"
    yield _largest(f"{LPES}, Abstract", text, 11.2, 0.05, gain)
    section = f"{LPES}, Section 4.2"
    text = "gain of Vicuna on KV retrieval"
    note = "printed averages: 80.9 and 92.1"
    yield Statement(section, text, 11.2, 0.05, gain["Vicuna-7B-v1.5"], 1, note)

    curve_gains = _gains(data, f"{LPES}, Table 16", "MDQA", "Bézier Curve", base)
    text = "cells without a gain (consistently improves, all positions)"
    cells = pd.concat([kv_gains.stack(), mdqa_gains.stack()])
    yield _without_gain(table, text, cells)
    yield _without_gain(f"{LPES}, Appendix H, Table 16", text, curve_gains.stack())

    cells = _gains(data, f"{LPES}, Table 2", "ZeroSCROLLS", lpes, base).stack()
    text = "cells that fall (improves performance on seven tasks)"
    falls = (cells < -0.01 - FLOAT_ERROR).sum()
    note = f"losses: {_top_three(-cells)}"
    yield Statement(f"{LPES}, Table 2", text, 0, 0, falls, len(cells), note)

    for method, printed in (("Ms-PoE", 1.45), ("MoICE", 2.42)):
        ratio = _ratio(data, f"{LPES}, Table 5", method, lpes).max()
        text = f"time of {method} over its own"
        yield Statement(section, text, printed, 0.02, ratio, 1, "")

    hours = data.loc[data["table"] == f"{LPES}, Table 10", "value"].sum() / 3600
    text = "hours of 20 epochs (3 to 4)"
    note = f"4 hours are {4 / hours:.1f} epochs of Table 10"
    yield Statement(f"{LPES}, Section 1", text, 3.5, 0.5, 20 * hours, 1, note)

    exponent = 32 * np.log10(11) - 4 * np.log10(32 * 11)
    text = "powers of ten from 11^32 to 352^4"
    yield Statement(f"{LPES}, Appendix B", text, 20, 0.5, exponent, 1, "")


def _largest(
    section: str, text: str, printed: float, within: float, values: pd.Series
) -> Statement:
    """A statement about the largest of some values."""
    note = _top_three(values)
    return Statement(section, text, printed, within, values.max(), len(values), note)


def _without_gain(section: str, text: str, gains: pd.Series) -> Statement:
    """The statement that every cell of a table gains."""
    count = (gains <= FLOAT_ERROR).sum()
    note = f"losses: {(gains < -FLOAT_ERROR).sum()}"
    return Statement(section, text, 0, 0, count, len(gains), note)


def _gains(
    data: pd.DataFrame, table: str, task: str, method: str, base: str
) -> pd.DataFrame:
    """A method's cells minus another's: models by columns, in the printed order."""
    cells = data[(data["table"] == table) & (data["task"] == task) & ~data["average"]]
    wide = cells.pivot(index=["method", "model"], columns="cell", values="value")
    wide = wide[cells["cell"].unique()]
    return (wide.loc[method] - wide.loc[base]).dropna()


def _ratio(data: pd.DataFrame, table: str, method: str, base: str) -> pd.Series:
    """Times of a method over those of another, by task."""
    times = data[data["table"] == table].pivot(
        index="task", columns="method", values="value"
    )
    return times[method] / times[base]


def _top_three(values: pd.Series) -> str:
    """The three largest values with their names."""
    top = values.sort_values(ascending=False, kind="stable").head(3)
    texts = []
    for key, value in top.items():
        name = " ".join(key) if isinstance(key, tuple) else str(key)
        texts.append(f"{name} {value:.2f}")
    return ", ".join(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path)
    main(parser.parse_args().folder or FOLDER)
