"""The papers' tables against themselves: averages, stated numbers, repeated cells, impossible shares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from posbench.late import pd
from posbench.run.base import Run
from posbench.stats import reference
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables

YU = "Yu et al. 2025"
LPES = "LPES"
# Tables by the questions behind each cell; 0: not said, or no share of right answers.
FILES = {
    500: "yu2025_table1_nq_kv lpes_table1_mdqa_kv lpes_table6_curve_types lpes_table8_runs "
    "lpes_table11_gradient lpes_table15_lambda lpes_table16_curve_13b",
    0: "yu2025_table2_longbench yu2025_table5_latency lpes_table2_zeroscrolls lpes_table3_leval "
    "lpes_table5_latency lpes_table10_ga_runtime lpes_table17_16k",
}
EXAMS = {
    "QuALITY": 202,
    "TOEFL": 269,
}  # questions in L-Eval's files, one right answer each
HOLDS = "follows"
ROUNDED = "within the rounding of its cells"
NOT = "does not follow"
TINY = 1e-9  # decimals are not exact in floats


@dataclass(frozen=True, kw_only=True)
class PrintedTables(Study):
    """Whether what Yu et al. 2025 and LPES print follows from the cells that they print.

    Cells are as in ``experiments/reference``. A cell that counts right answers of 500 is exact; any other may
    be half a unit of its last digit off, and so may a mean of such cells.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``averages``, ``shares``, ``repeated`` and ``statements``, see the functions below."""
        data = printed_cells()
        return {
            make.__name__: make(data)
            for make in (averages, shares, repeated, statements)
        }

    def findings(self, tables: Tables) -> list[Finding]:
        """One for the averages and the shares of each table, the repeated cells, and each statement."""
        found = []
        claims = {
            "averages": "averages follow from their cells",
            "shares": "cells are shares k / n",
        }
        parts = [
            (claims[name], *part)
            for name in claims
            for part in tables[name].groupby("table", sort=False)
        ]
        for claim, table, rows in parts:
            off = rows[rows["verdict"] == NOT]
            told = [
                f"{r.model} {r.method} {r.cell} {r.printed}: {r.expected:.2f}"
                for r in off.itertuples()
            ]
            at = (len(off), len(rows))
            note = "; ".join(told)
            found.append(
                Finding.that(off.empty, f"{table}: {claim}", "that do not", at, note)
            )
        twice = tables["repeated"].query("same >= 3 and not one_model")
        note = "; ".join(
            f"{r.table}: {r.first} = {r.second}: {r.cells}" for r in twice.itertuples()
        )
        claim = "Rows of two models do not share three cells"
        at = (len(twice), len(tables["repeated"]))
        found.append(
            Finding.that(
                twice.empty, claim, "pairs that do, of those that share two", at, note
            )
        )
        for r in tables["statements"].itertuples():
            claim = f"{r.place}: {r.statement}"
            at = (r.cells, r.n)
            note = f"printed: {r.printed:g}, within {r.within:g}; {r.note}".rstrip("; ")
            found.append(
                Finding.that(r.verdict == HOLDS, claim, "by the cells", at, note)
            )
        return found


def printed_cells() -> pd.DataFrame:
    """All cells: table, model, method, task, cell, printed, value, half (of a last digit), n, average."""
    columns = ("model", "method", "task", "position", "metric", "value")
    parts = []
    for n, file in ((n, file) for n, files in FILES.items() for file in files.split()):
        paper, number = re.findall(r"^(.+)_table(\d+)", file)[0]
        table = f"{YU if paper == 'yu2025' else LPES}, Table {number}"
        read = reference.table(f"{file}.csv", *columns).rename(
            columns={"value": "printed"}
        )
        parts.append(read.assign(table=table, n=n))
    data = pd.concat(parts, ignore_index=True)
    data["value"] = pd.to_numeric(
        data["printed"], errors="coerce"
    )  # a dash or a slash: not applicable
    data = data.dropna(subset="value")
    data["half"] = 0.5 * 10.0 ** -data["printed"].str.partition(".")[2].str.len()
    subset = data["task"].str.partition(":")
    data["task"], data["cell"] = (
        subset[0],
        subset[2].where(subset[2] != "", data["position"]),
    )
    data["average"] = data["cell"].isin(["Average", "Avg.", "AVG"])
    return data.assign(n=data["cell"].map(EXAMS).fillna(data["n"]).astype(int))


def averages(data: pd.DataFrame) -> pd.DataFrame:
    """Printed averages, the means of their cells (expected), and what the cells lack in sum (missing)."""
    rows = []
    for key, row in data.groupby(["table", "model", "method", "task"], sort=False):
        cells = row[~row["average"]]
        for said in row[row["average"]].itertuples():
            mean = cells["value"].mean()
            half = said.half + TINY
            away = abs(said.value - mean)
            loose = 0.0 if (cells["n"] == 500).all() else cells["half"].max()
            verdict = (
                HOLDS if away <= half else ROUNDED if away <= half + loose else NOT
            )
            rows.append(
                (
                    *key,
                    said.printed,
                    mean,
                    len(cells),
                    (said.value - mean) * len(cells),
                    verdict,
                )
            )
    names = [
        "table",
        "model",
        "method",
        "cell",
        "printed",
        "expected",
        "n",
        "missing",
        "verdict",
    ]
    return pd.DataFrame(rows, columns=names)


def shares(data: pd.DataFrame) -> pd.DataFrame:
    """Cells that count right answers, and the nearest share that a whole number of them gives (expected)."""
    kept = data[(data["n"] > 0) & ~data["average"]].copy()
    kept["expected"] = 100 * (kept["value"] * kept["n"] / 100).round() / kept["n"]
    fits = (kept["expected"] - kept["value"]).abs() <= kept["half"] + TINY
    kept["verdict"] = np.where(fits, HOLDS, NOT)
    return kept[
        ["table", "model", "method", "cell", "printed", "expected", "n", "verdict"]
    ]


def repeated(data: pd.DataFrame) -> pd.DataFrame:
    """Pairs of a table's rows with two or more equal cells in the same columns (0 and 100 left out)."""
    rows = []
    kept = data[~data["average"] & ~data["value"].isin([0, 100])]
    for table, cells in kept.groupby("table", sort=False):
        wide = cells.pivot(
            index=["model", "method"], columns=["task", "cell"], values="printed"
        )
        for (one, a), (two, b) in combinations(wide.iterrows(), 2):
            same = (a == b).to_numpy()
            if same.sum() >= 2:
                equal = " ".join(one), " ".join(two), one[0] == two[0]
                rows.append((table, *equal, same.sum(), len(a), ", ".join(a[same])))
    return pd.DataFrame(
        rows, columns=["table", "first", "second", "one_model", "same", "of", "cells"]
    )


def statements(data: pd.DataFrame) -> pd.DataFrame:
    """Numbers that the texts state, and what the cells give (``within``: half digits of both)."""
    names = ["place", "statement", "printed", "within", "cells", "n", "note"]
    found = pd.DataFrame([*_of_yu(data), *_of_lpes(data)], columns=names)
    close = (found["cells"] - found["printed"]).abs() <= found["within"] + TINY
    return found.assign(verdict=np.where(close, HOLDS, NOT))


def _of_yu(data: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Section 4.2 and Appendix C.4: gains in points, times as ratios."""
    place = f"{YU}, Section 4.2"
    tasks = {"NQ": "NaturalQuestions-20docs", "KV retrieval": "KV-retrieval-140pairs"}
    for (task, name), printed, late in zip(
        tasks.items(), (9.3, 15.2), (11.3, 16.8), strict=True
    ):
        more = _gains(data, f"{YU}, Table 1", name, "Ours", "Original")
        gain = more.mean(axis=1)
        later = more.iloc[:, 1:].mean(axis=1)
        yield (
            place,
            f"largest gain on {task}",
            printed,
            0.05,
            gain.max(),
            len(gain),
            _told(gain),
        )
        words = f"largest gain on {task}, last four positions"
        yield place, words, late, 0.05, later.max(), len(later), _told(later)
    words = "models without a gain on KV retrieval"
    yield place, words, 1, 0, (gain <= TINY).sum(), len(gain), f"losses: {_told(-gain)}"
    more = _gains(data, f"{YU}, Table 2", "LongBench", "Ours", "Original")
    stated = {
        "FewShot": 1.5,
        "Code": 3.4,
        "Synth.": 4.0,
        "SingleDoc": 9.2,
        "MultiDoc": 1.9,
    }
    for cell, printed in stated.items():
        words = f"largest gain on LongBench, {cell}"
        yield (
            place,
            words,
            printed,
            0.15,
            more[cell].max(),
            len(more),
            _told(more[cell]),
        )
    words = "LongBench cells that fall (no capability is impaired)"
    falls = (more < -0.1 - TINY).sum().sum()
    yield place, words, 0, 0, falls, more.size, f"losses: {_told(-more.stack())}"
    ratio = _ratio(data, f"{YU}, Table 5", "Ms-PoE", "FlashAttention-2")
    words = "time of Ms-PoE over the unmodified model's (a doubling)"
    yield f"{YU}, Appendix C.4", words, 2, 0.5, ratio.max(), len(ratio), _told(ratio)


def _of_lpes(data: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Abstract, Sections 1 and 4.2, Table 2, Appendices B and H."""
    one = f"{LPES}, Table 1"
    own = "LPES (Ours)"
    base = "Baseline"
    both = [
        _gains(data, one, task, own, base) for task in ("Key-Value Retrieval", "MDQA")
    ]
    gain = both[0].mean(axis=1)
    yield (
        f"{LPES}, Abstract",
        "largest gain on KV retrieval",
        11.2,
        0.05,
        gain.max(),
        len(gain),
        _told(gain),
    )
    words = "gain of Vicuna on KV retrieval"
    value = gain["Vicuna-7B-v1.5"]
    yield (
        f"{LPES}, Section 4.2",
        words,
        11.2,
        0.05,
        value,
        1,
        "printed averages: 80.9 and 92.1",
    )
    curve = _gains(data, f"{LPES}, Table 16", "MDQA", "Bézier Curve", base)
    for where, parts in ((one, both), (f"{LPES}, Appendix H, Table 16", [curve])):
        flat = pd.concat([part.stack() for part in parts])
        words = "cells without a gain (consistently improves, all positions)"
        yield (
            where,
            words,
            0,
            0,
            (flat <= TINY).sum(),
            len(flat),
            f"losses: {(flat < -TINY).sum()}",
        )
    flat = _gains(data, f"{LPES}, Table 2", "ZeroSCROLLS", own, base).stack()
    words = "cells that fall (improves performance on seven tasks)"
    falls = (flat < -0.01 - TINY).sum()
    yield f"{LPES}, Table 2", words, 0, 0, falls, len(flat), f"losses: {_told(-flat)}"
    for other, printed in (("Ms-PoE", 1.45), ("MoICE", 2.42)):
        ratio = _ratio(data, f"{LPES}, Table 5", other, own).max()
        yield (
            f"{LPES}, Section 4.2",
            f"time of {other} over its own",
            printed,
            0.02,
            ratio,
            1,
            "",
        )
    spent = data.loc[data["table"] == f"{LPES}, Table 10", "value"].sum() / 3600
    words = "hours of 20 epochs (3 to 4)"
    note = f"4 hours are {4 / spent:.1f} epochs of Table 10"
    yield f"{LPES}, Section 1", words, 3.5, 0.5, 20 * spent, 1, note
    factor = 32 * np.log10(11) - 4 * np.log10(32 * 11)
    yield (
        f"{LPES}, Appendix B",
        "powers of ten from 11^32 to 352^4",
        20,
        0.5,
        factor,
        1,
        "",
    )


def _gains(
    data: pd.DataFrame, table: str, task: str, method: str, base: str
) -> pd.DataFrame:
    """A method's cells minus another's: models by columns, in the printed order."""
    kept = data[(data["table"] == table) & (data["task"] == task) & ~data["average"]]
    wide = kept.pivot(index=["method", "model"], columns="cell", values="value")[
        kept["cell"].unique()
    ]
    return (wide.loc[method] - wide.loc[base]).dropna()


def _ratio(data: pd.DataFrame, table: str, method: str, base: str) -> pd.Series:
    """Times of a method over those of another, by task."""
    times = data[data["table"] == table].pivot(
        index="task", columns="method", values="value"
    )
    return times[method] / times[base]


def _told(values: pd.Series) -> str:
    """The three largest, with names."""
    top = values.sort_values(ascending=False, kind="stable").head(3)
    names = (" ".join(key) if isinstance(key, tuple) else str(key) for key in top.index)
    return ", ".join(
        f"{name} {value:.2f}" for name, value in zip(names, top, strict=True)
    )
