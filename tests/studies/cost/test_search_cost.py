"""What a generation of the genetic search costs: the operations of the paper's settings, and their shares."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posbench.search.genetic import GeneticSearch
from posbench.studies.cost import search_cost, timing
from posbench.studies.cost.search_cost import SearchCost
from posbench.tasks import KVRetrieval


def test_shares_are_of_median_times_and_stand_beside_the_papers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A warm-up, then two rounds of 16, 1, 1, 2 and 14, 3, 1, 2 seconds.
    spent = [9, 9, 9, 9, 16, 1, 1, 2, 14, 3, 1, 2]
    clock = iter([time for seconds in spent for time in (0.0, seconds)])
    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: next(clock))
    work = dict.fromkeys(search_cost.OPERATIONS.values(), lambda: None)
    monkeypatch.setattr(SearchCost, "operations", lambda *_: work)
    lm = SimpleNamespace(device=torch.device("cpu"))
    told = list[int]()
    run: Any = SimpleNamespace(
        model=SimpleNamespace(blocks={"genetic": {"source": "x"}}), lm=lm
    )
    run.progress = lambda label, total: (
        nullcontext(told.append) if total == 12 else None
    )
    study = SearchCost(repeats=2)
    tables = study.measure(run)
    found = tables["operations"].set_index("way")
    assert sum(told) == 12
    assert list(found.index) == list(work) and found["seconds"].tolist() == [
        15,
        2,
        1,
        2,
    ]
    assert found["share"].tolist() == pytest.approx([0.75, 0.1, 0.05, 0.1])
    # Typed off Table 10 of LPES.
    assert found["paper_seconds"].tolist() == [1167.4, 5.2, 4.5, 2.3]
    assert found["paper_share"].iloc[0] == pytest.approx(0.98982, abs=1e-5)
    (claim,) = study.findings(tables)
    assert claim.verdict == "contradicted" and claim.value == pytest.approx(0.75)


def test_a_generation_has_the_sizes_of_the_paper(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 mutations, 4 crossovers, 20 candidates that answer 3 times 5 questions, in batches of 8."""
    calls = dict[str, list[Any]](mutate=[], cross=[], answer=[])
    for name in ("mutate", "cross"):
        own = getattr(GeneticSearch, name)

        def counted(self: Any, *args: Any, name: str = name, own: Any = own) -> Any:
            calls[name].append(args)
            return own(self, *args)

        monkeypatch.setattr(GeneticSearch, name, counted)
    monkeypatch.setattr(
        search_cost,
        "make_evaluator",
        lambda *_: lambda *asked: calls["answer"].append(asked),
    )
    given: dict[str, Any] = {
        "prompt": "compact",
        "records": "words",
        "calibration_pairs": 8,
    }
    run: Any = SimpleNamespace(
        lm=tiny, task=KVRetrieval(pairs=8, calibration_examples=5, **given)
    )
    ways = SearchCost().operations(run, GeneticSearch(step_x=0.5, batch_size=8))
    assert list(ways) == list(search_cost.OPERATIONS.values())
    for name in calls:
        calls[name].clear()
    for do in ways.values():
        do()
    assert len(calls["mutate"]) == 16 and 4 <= len(calls["cross"]) <= 4 * 4
    assert [len(numbers) for _, numbers in calls["answer"]] == [8, 7] * 20
    assert all(len(scales) == tiny.layers for scales, _ in calls["answer"])
