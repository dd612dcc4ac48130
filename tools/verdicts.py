"""Simulated readers whose position bias is known, and how often posbench's verdict on them is right.

python tools/verdicts.py [TABLE ...]    writes the tables of docs/metrics.md, or some of them

A simulated reader answers each question at each gold position with a given probability, independently: of all readers
with these probabilities the one whose verdict takes most questions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from itertools import combinations
from pathlib import Path

import numpy as np

from posbench.files.atomic import write_text
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.stats.bootstrap import Array
from posbench.stats.position_bias import CurveIntervals
from posbench.stats.scores import Tabulator
from posbench.stats.sequential import (
    FIRST_FORECAST,
    FIRST_QUESTIONS,
    curve_intervals,
    forecast_questions,
    verdict_times,
)
from posbench.stats.shape import NEGLIGIBLE_CONTRAST, UNCLEAR, name_shape
from posbench.stats.verdict import BIAS, FIXED, NO_BIAS, NOT_FIXED, run_verdict
from posbench.tasks import KVRetrieval
from tools.pages import between_marks

PAGE = Path("docs/metrics.md")
POSITIONS = (3, 5, 9)
NAMED_QUESTIONS = {0.6: 800, 0.8: 550, 0.95: 250}
"""Questions at each position within which a reader without a bias is told to have none, by its accuracy."""
FIXED_QUESTIONS = {0.6: 550, 0.8: 375, 0.95: 150}
"""The same for a number of questions that is chosen beforehand."""
BIASED = (0.92, 0.2, 0.15, 0.25, 0.3)
"""Accuracy of a reader like SmolLM2-135M, of whose bias methods remove a part."""
ITEMS = 20
"""Items of a prompt, which set the score of a guess: 5 %."""
MOST_QUESTIONS = 1000
"""Questions after which a simulated run ends that has not told its verdict."""


def simulated_scores(
    rng: np.random.Generator, shares: Sequence[float], questions: int, runs: int = 0
) -> Array:
    """Scores of a reader: 1 with the given probability at each of K positions, [N, K], or [runs, N, K]."""
    size = [runs, questions, len(shares)] if runs else [questions, len(shares)]
    return (rng.random(size) < np.array(shares)).astype(np.float64)


def metrics_of(
    scores: Mapping[str, Array],
    anytime: Mapping[str, CurveIntervals] | None = None,
    resamples: int = 200,
) -> pd.DataFrame:
    """The metrics.csv of a run, as it is read back.

    Args:
        scores: Scores of the same N questions at K positions under each method, [N, K].
        anytime: See :func:`posbench.stats.position_bias.statistic_rows`.
        resamples: Bootstrap draws.
    """
    rows = [
        {
            "method": method,
            "id": f"{question}-{position}",
            "gold_position": position,
            "cluster": str(question),
            "scores": {"accuracy": float(value)},
        }
        for method, values in scores.items()
        for (question, position), value in np.ndenumerate(values)
    ]
    tabulator = Tabulator(
        task=KVRetrieval(pairs=ITEMS),
        model="m",
        unmodified="none",
        resamples=resamples,
        seed=0,
    )
    table = tabulator.metrics(rows, anytime).to_csv(index=False)
    return pd.read_csv(StringIO(table), keep_default_na=False, na_values=[""])


def verdict_name(
    scores: Mapping[str, Array], anytime: Mapping[str, CurveIntervals] | None = None
) -> str:
    """The verdict on a run with these scores; see :func:`metrics_of`."""
    verdict = run_verdict(metrics_of(scores, anytime))
    return verdict.name if verdict else ""


def count_no_bias(scores: Array) -> int:
    """How many of some runs [S, N, K] stop with the verdict that there is no bias."""
    bias, no_bias = verdict_times(scores, NEGLIGIBLE_CONTRAST)
    return int((no_bias < bias).sum())


def with_lost(
    num_positions: int, lost: Iterable[int], share: float, by: float
) -> list[float]:
    """Accuracy of a reader that answers less at some positions."""
    shares = [share] * num_positions
    for position in lost:
        shares[position] -= by
    return shares


def in_batches(
    rng: np.random.Generator, shares: Sequence[float], questions: int, runs: int
) -> Iterable[Array]:
    """Scores of so many runs, [S, N, K] each, few enough at a time for the memory."""
    for start in range(0, runs, 25):
        yield simulated_scores(rng, shares, questions, min(25, runs - start))


def sequential_table(runs: int) -> list[list[str]]:
    """What runs say that ask until the verdict is known, by positions and accuracy."""
    rows = []
    for num_positions in POSITIONS:
        for share, named in NAMED_QUESTIONS.items():
            rng = np.random.default_rng((num_positions, named))
            flat = [share] * num_positions
            counts = Counter[str]()
            times = list[float]()
            for scores in in_batches(rng, flat, MOST_QUESTIONS, runs):
                bias, no_bias = verdict_times(scores, NEGLIGIBLE_CONTRAST)
                counts["bias"] += int(
                    (bias <= np.minimum(no_bias, MOST_QUESTIONS)).sum()
                )
                counts["no bias"] += int(((no_bias < bias) & (no_bias <= named)).sum())
                times += list(np.where(no_bias < bias, no_bias, np.inf))
            lost = dict[str, int]()
            for place, position in (("end", 0), ("inside", num_positions // 2)):
                shares = with_lost(
                    num_positions, [position], share, 2 * NEGLIGIBLE_CONTRAST
                )
                batches = in_batches(rng, shares, MOST_QUESTIONS, runs)
                lost[place] = sum(map(count_no_bias, batches))
            rows.append(
                [
                    str(num_positions),
                    f"{100 * share:.0f} %",
                    percent(counts["bias"], runs),
                    percent(counts["no bias"], runs),
                    str(named),
                    " to ".join(
                        f"{q:.0f}" for q in np.quantile(times, [0.1, 0.5, 0.8])
                    ),
                    percent(max(lost.values()), runs),
                ]
            )
    return rows


SEQUENTIAL_HEADER = [
    "positions",
    "right",
    "bias",
    "no bias",
    "within questions",
    "10, 50, 80 % of the runs take",
    "no bias where one position is 20 points lower",
]


def fixed_number_table(runs: int) -> list[list[str]]:
    """What runs of a number of questions say that was chosen beforehand, by positions and accuracy."""
    rows = []
    for num_positions in POSITIONS:
        for share, questions in FIXED_QUESTIONS.items():
            rng = np.random.default_rng((num_positions, questions))
            flat = [share] * num_positions
            names = Counter(
                verdict_name({"none": simulated_scores(rng, flat, questions)})
                for _ in range(runs)
            )
            few = Counter(
                verdict_name({"none": simulated_scores(rng, flat, 60)})
                for _ in range(runs)
            )
            inside = with_lost(num_positions, [num_positions // 2], share, 0.2)
            lost = Counter(
                verdict_name({"none": simulated_scores(rng, inside, n)})
                for n in (60, questions)
                for _ in range(runs // 2)
            )
            rows.append(
                [
                    str(num_positions),
                    f"{100 * share:.0f} %",
                    str(questions),
                    percent(names[BIAS], runs),
                    percent(names[NO_BIAS], runs),
                    percent(few[BIAS], runs),
                    percent(lost[NO_BIAS], 2 * (runs // 2)),
                ]
            )
    return rows


FIXED_NUMBER_HEADER = [
    "positions",
    "right",
    "questions",
    "bias",
    "no bias",
    "bias, 60 questions",
    "no bias where one position is 20 points lower",
]


def part_removed(share: float) -> Array:
    """Accuracy of :data:`BIASED` with a share of its bias removed at the same average."""
    curve = np.array(BIASED)
    return curve.mean() + (curve - curve.mean()) * (1 - share)


def method_scores(
    rng: np.random.Generator, removed: float, questions: int, agreement: float = 0.9
) -> dict[str, Array]:
    """Scores of the biased reader and of a method that removes a share of its bias; most answers stay the same."""
    size = (questions, len(BIASED))
    common = rng.random(size)
    result = {}
    for name, curve in (("none", np.array(BIASED)), ("x", part_removed(removed))):
        own = rng.random(size)
        luck = np.where(rng.random(size) < agreement, common, own)
        result[name] = (luck < curve).astype(np.float64)
    return result


def method_table(runs: int) -> list[list[str]]:
    """How often a method is called a fix that removes a given share of a bias."""
    rows = []
    for questions in (20, 60, 200):
        for removed in (0.0, 0.25, 0.5, 0.75, 1.0):
            rng = np.random.default_rng((questions, int(100 * removed)))
            names = Counter(
                verdict_name(method_scores(rng, removed, questions))
                for _ in range(runs)
            )
            rows.append(
                [
                    str(questions),
                    f"{100 * removed:.0f} %",
                    percent(names[FIXED], runs),
                    percent(names[NOT_FIXED], runs),
                ]
            )
    return rows


METHOD_HEADER = ["questions", "bias that is removed", "fixed", "not fixed"]


def lost_places(num_positions: int) -> list[tuple[int, ...]]:
    """Each single position, and each pair of them."""
    single = [(position,) for position in range(num_positions)]
    return single + list(combinations(range(num_positions), 2))


def stopped_shape(scores: Array, every: int = 5) -> tuple[str, CurveIntervals]:
    """The shape at which a run with these scores [N, K] stops that asks in rounds, and its intervals."""
    for count in range(FIRST_QUESTIONS, len(scores) + 1, every):
        curve = curve_intervals(scores[:count])
        name = name_shape(curve)
        if name != UNCLEAR:
            break
    return name, curve


FORECAST_READERS: Mapping[str, Sequence[float]] = {
    "60 % everywhere": (0.6,) * 5,
    "80 % everywhere": (0.8,) * 5,
    "95 % everywhere": (0.95,) * 5,
    "60 %, the first 75 %": (0.75, 0.6, 0.6, 0.6, 0.6),
    "60 %, the first 70 %": (0.7, 0.6, 0.6, 0.6, 0.6),
}


def forecast_table(runs: int) -> list[list[str]]:
    """How often the number of questions that a run needs lies within a factor of two of its forecast.

    Early forecasts are bounds: of these, how often it is at most half more.
    """
    rows = []
    for text, shares in FORECAST_READERS.items():
        cells = [text]
        for asked in (20, 50, 100, 200):
            rng = np.random.default_rng((asked, int(100 * sum(shares))))
            hits = total = 0
            for scores in in_batches(rng, shares, 4000, runs):
                needed = np.minimum(*verdict_times(scores, NEGLIGIBLE_CONTRAST))
                for run, number in zip(scores, needed, strict=True):
                    if number <= asked or np.isinf(number):
                        continue
                    forecast = forecast_questions(run[:asked], NEGLIGIBLE_CONTRAST)
                    total += 1
                    if forecast is not None and asked < FIRST_FORECAST:
                        hits += number <= 1.5 * forecast
                    elif forecast is not None:
                        hits += 0.5 <= forecast / number <= 2
            cells.append(
                f"{100 * hits / total:.0f} % of {total}" if total else "told before"
            )
        rows.append(cells)
    return rows


FORECAST_HEADER = [
    "reader",
    "after 20 questions: at most half more",
    "50: at most half more",
    "100: within a factor of two",
    "200: within a factor of two",
]


def percent(count: int, total: int) -> str:
    """A share in %."""
    return f"{100 * count / total:.1f} %"


TABLES: Mapping[str, tuple[list[str], Callable[[int], list[list[str]]], int]] = {
    "verdicts, asked until known": (SEQUENTIAL_HEADER, sequential_table, 400),
    "verdicts, number chosen beforehand": (
        FIXED_NUMBER_HEADER,
        fixed_number_table,
        200,
    ),
    "verdicts on methods": (METHOD_HEADER, method_table, 100),
    "forecasts": (FORECAST_HEADER, forecast_table, 25),
}
"""Tables of the page: the header, what makes the rows, and simulations a cell."""


def main(names: Sequence[str]) -> int:
    """Write the tables of some names, or all."""
    for name in names or TABLES:
        header, make, runs = TABLES[name]
        table = f"{markdown(header, make(runs))}\n\n{runs} simulations a cell."
        print(f"{name}\n\n{table}\n", flush=True)
        write_text(PAGE, between_marks(PAGE, name, table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
