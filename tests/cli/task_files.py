"""Small files of every benchmark, and the settings that make a task of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from posbench.tasks.kv_retrieval import WORDS
from tests.tasks import (
    test_exams,
    test_leval_closed,
    test_longbench,
    test_loogle,
    test_zero_scrolls,
)

DATA = Path(__file__).parents[1] / "data"


def write_key_values(file: Path, seed: int) -> None:
    """Write twelve key-value questions with 12 pairs each, other ones for each seed."""
    rng = random.Random(seed)
    lines = []
    for _ in range(12):
        words = rng.sample(WORDS, 24)
        records = list(zip(words[:12], words[12:], strict=True))
        row = {
            "ordered_kv_records": records,
            "key": records[5][0],
            "value": records[5][1],
        }
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))


def _mmlu(_: Path) -> list[str]:
    return [
        f"task.path={DATA / 'mmlu'}",
        "task.subsets=[abstract_algebra,moral_disputes]",
        "task.limit=2",
    ]


def _ceval(folder: Path) -> list[str]:
    test_exams.write_ceval(folder)
    return [f"task.path={folder}", "task.subsets=[law]", "task.limit=1"]


def _leval(folder: Path) -> list[str]:
    test_leval_closed.write(folder)
    return [f"task.path={folder}", "task.limit=1"]


def _longbench(folder: Path) -> list[str]:
    for task in ("qasper", "samsum", "lcc", "trec", "passage_count"):
        test_longbench.write(
            folder, task, *(test_longbench.row(task, _id=str(i)) for i in range(3))
        )
    (folder / "multi_news.jsonl").write_bytes(
        (DATA / "longbench/multi_news.jsonl").read_bytes()
    )
    names = "qasper,samsum,lcc,trec,passage_count,multi_news"
    return [
        f"task.path={folder}",
        f"task.subsets=[{names}]",
        "task.limit=1",
        "task.max_prompt_tokens=400",
    ]


def _loogle(folder: Path) -> list[str]:
    file = test_loogle.write(
        folder / "longdep_qa.jsonl",
        [test_loogle.FIRST, test_loogle.OTHER],
        [test_loogle.SECOND],
    )
    return [f"task.path={file}", "task.limit=2"]


def _zero_scrolls(folder: Path) -> list[str]:
    for subset in ("gov_report", "qasper", "space_digest"):
        test_zero_scrolls.write(
            folder,
            subset,
            *(
                test_zero_scrolls.row(subset, id=f"q{i}", pid=f"q{i}_0")
                for i in range(2)
            ),
        )
    return [
        f"task.path={folder}",
        "task.subsets=[gov_report,qasper,space_digest]",
        "task.limit=1",
    ]


def _nq(_: Path) -> list[str]:
    file = DATA / "nq_multidoc/nq-open-20_total_documents_gold_at_0.first3.jsonl"
    return [
        f"task.path={file}",
        "task.documents=3",
        "task.positions=[0,1,2]",
        "task.limit=1",
        "task.calibration_examples=1",
    ]


def _kv(_: Path) -> list[str]:
    file = DATA / "kv_retrieval/kv-retrieval-75_keys.first3.jsonl"
    return [f"task.path={file}", "task.pairs=10", "task.limit=1"]


def _own(_: Path) -> list[str]:
    return [
        f"task.path={DATA / 'own' / 'documents.jsonl'}",
        "task.positions=[0,4]",
        "task.limit=2",
    ]


def _log(_: Path) -> list[str]:
    return [f"task.path={DATA / 'logs' / 'gold_doc_id.jsonl.gz'}", "task.limit=3"]


TASKS: dict[str, tuple[Callable[[Path], list[str]], int]] = {
    "ceval": (_ceval, 1),
    "kv_retrieval": (_kv, 5),
    "leval_closed": (_leval, 5),
    "longbench": (_longbench, 6),
    "loogle_timeline_reorder": (_loogle, 2),
    "mmlu": (_mmlu, 4),
    "nq_multidoc": (_nq, 3),
    "own_data": (_own, 4),
    "retrieval_log": (_log, 3),
    "zero_scrolls": (_zero_scrolls, 3),
}
"""Per task the files it gets, and how many examples its limit leaves."""
