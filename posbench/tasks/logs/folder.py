"""A folder in the form of BEIR with a run of TREC: corpus, queries, relevance judgements and ranked documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from posbench.tasks.logs.base import Entry, Skips
from posbench.tasks.logs.entries import read_entries
from posbench.tasks.logs.fields import (
    IDS_WITHOUT_TEXT,
    LOG_TEXTS,
    NO_DOCUMENTS,
    as_text,
    first,
)
from posbench.tasks.reading import LineError, need_text, refuse

CONTENT = (
    "corpus.jsonl, queries.jsonl, a run (*.trec) and, if there are any, qrels/*.tsv"
)
RUNS = ("*.trec", "*.run", "run.txt", "runs/*.trec", "runs/*.run")
RUN_LINE = "query-id Q0 document-id rank score name, such as q1 Q0 d7 1 12.5 bm25"
QREL_LINE = "query-id document-id relevance, with tabs"
UNIQUE_ID = "an id that occurs once"


def read_folder(folder: Path, skips: Skips) -> list[Entry]:
    """An entry for each query that was run, numbered as in the file of queries.

    Args:
        folder: The folder.
        skips: Receives queries without documents, and those with documents that the corpus lacks.

    Raises:
        UserError: A file is missing or cannot be read, there are several runs, an id stands for two texts, or a line of
            a run or of judgements is none: without it a query would miss a document, or its gold one.
    """
    texts = _by_id(_file(folder, "corpus.jsonl", "corpus.jsonl.gz"))
    queries_file = _file(folder, "queries.jsonl", "queries.jsonl.gz")
    run = _run(_file(folder, *RUNS))
    judged = _judged(folder)
    entries = []
    queries: dict[str, Mapping[str, Any]] = {}
    for number, fields in read_entries(queries_file, "path", skips).entries:
        query = _name(fields) or ""
        if query and queries.setdefault(query, fields) != fields:
            _refuse_line(queries_file, number, [query], UNIQUE_ID)
        ranked = run.get(query)
        if not ranked:
            skips.add(number, NO_DOCUMENTS, f"ranked documents of {query} in the run")
            continue
        documents = [
            {**texts.get(name, {}), "id": name, "score": score}
            for score, _, name in ranked
        ]
        if not all(name in texts for _, _, name in ranked):
            skips.add(number, IDS_WITHOUT_TEXT, LOG_TEXTS)
            continue
        fields = {
            "id": query,
            "question": first(fields, ("text", "question", "query")),
            "documents": documents,
            "gold_ids": judged.get(query),
        }
        entries.append(Entry(number, fields))
    return entries


def _file(folder: Path, *patterns: str) -> Path:
    """The one file of a folder that has one of some names."""
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        allowed = f"a folder with {CONTENT}; of {patterns[0]} it has {found}"
        refuse("path", str(folder), allowed, "keep one, or give the log as a file")
    return files[0]


def _name(fields: Any) -> str | None:
    """Id of a document or query."""
    value = first(fields, ("_id", "id", "docid", "doc_id", "query_id"))
    return as_text(value, "id") if isinstance(value, str | int) else None


def _by_id(file: Path) -> dict[str, dict[str, Any]]:
    """The documents of a corpus. A query that was given one without id or text is skipped when it is read."""
    documents: dict[str, dict[str, Any]] = {}
    for number, fields in read_entries(file, "path", Skips()).entries:
        name = _name(fields)
        if name is None or not isinstance(fields.get("text"), str):
            continue
        if documents.setdefault(name, dict(fields)) != fields:
            _refuse_line(file, number, [name], UNIQUE_ID)
    return documents


def _columns(file: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Number and columns of every line that is not blank."""
    try:
        data = file.read_bytes()
        need_text(file, "path", data)
        text = data.decode("utf-8-sig")
    except OSError as error:
        refuse("path", str(file), "a readable file", str(error.strerror))
    except UnicodeError:
        refuse("path", str(file), "UTF-8 text", "save it as UTF-8")
    for number, line in enumerate(text.splitlines(), start=1):
        columns = line.split("\t") if "\t" in line else line.split()
        if line.strip():
            yield number, [column.strip() for column in columns]


def _run(file: Path) -> dict[str, list[tuple[float, int, str]]]:
    """Score, rank and id of the documents of each query, by falling score, then by rank."""
    run: dict[str, list[tuple[float, int, str]]] = {}
    for number, columns in _columns(file):
        try:
            query, _, name, rank, score, *_ = columns
            value = float(score)
            if not math.isfinite(value):
                raise ValueError("no finite score")
            run.setdefault(query, []).append((value, int(rank), name))
        except ValueError:
            _refuse_line(file, number, columns, RUN_LINE)
    for ranked in run.values():
        ranked.sort(key=lambda found: (-found[0], found[1]))
    return run


def _refuse_line(
    file: Path, number: int, columns: Sequence[str], allowed: str
) -> NoReturn:
    """Refuse a line of a run or of judgements."""
    location = f"task.path: {file.name}, line {number}"
    raise LineError(location, repr(" ".join(columns)), allowed, "fix or remove it")


def _judged(folder: Path) -> dict[str, list[str]]:
    """Ids of the relevant documents of each query."""
    files = sorted(
        [
            *folder.glob("qrels/*.tsv"),
            *folder.glob("qrels*.tsv"),
            *folder.glob("*.qrels"),
        ]
    )
    judged: dict[str, list[str]] = {}
    for file in files:
        for number, columns in _columns(file):
            try:
                if len(columns) >= 4:
                    # TREC's own form has a column of zeros.
                    query, _, name, relevance, *_ = columns
                else:
                    query, name, relevance = columns
                if float(relevance) > 0:
                    judged.setdefault(query, []).append(name)
            except ValueError:
                # The first line may name the columns.
                if number > 1:
                    _refuse_line(file, number, columns, QREL_LINE)
    return judged
