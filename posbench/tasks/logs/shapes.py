"""The table of shapes: how each library writes a question, its documents, references and reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from posbench.tasks.logs import fields as names
from posbench.tasks.logs.base import Entry, Skip, Skips
from posbench.tasks.logs.fields import first
from posbench.tasks.logs.spans import gather_spans, is_span

Fields = Mapping[str, Any]
PASSED_ON = (
    names.GOLD,
    *names.GOLD_IDS,
    *names.GOLD_INDICES,
    *names.GOLD_TEXTS,
    *names.PARALLEL_IDS,
    *names.PARALLEL_SCORES,
    "other_gold",
)
"""Fields that every shape may have beside its own."""
POSITIVE_ASSERTIONS = (
    "equals",
    "contains",
    "icontains",
    "contains-any",
    "icontains-any",
    "factuality",
    "similar",
)
"""promptfoo's assertions whose value is a reference answer."""


class Shape(NamedTuple):
    """How one library writes its log.

    Attributes:
        name: Its name in messages.
        right: A line that would be right.
        recognises: Whether an entry may be of this shape; the first shape of the table that says so is taken.
        extract: The fields of an entry under the names of :func:`posbench.tasks.logs.fields.read_question`, given
            the names of all fields of the log; a ``remark`` among them is counted. It raises :class:`Skip`.
        gather: Puts entries together that belong to one question.
        unit: What the gathered entries are; empty: what the file consists of.
    """

    name: str
    right: str
    recognises: Callable[[Fields], bool]
    extract: Callable[[Fields, frozenset[str]], Fields]
    gather: Callable[[list[Entry], Skips], list[Entry]] = lambda entries, skips: entries
    unit: str = ""


def reference_names(seen: frozenset[str]) -> tuple[str, ...]:
    """The names of references in a log: ``answer`` is one only where no other is."""
    if seen & set(names.REFERENCES):
        return names.REFERENCES
    return (*names.REFERENCES, names.ANSWER)


def extract_plain(entry: Fields, seen: frozenset[str]) -> Fields:
    """The fields of an entry under near names; ``answer`` is a reply beside any other reference."""
    references = reference_names(seen)
    documents = first(entry, names.DOCUMENTS)
    if any(_is_langchain(item) for item in names.as_list(documents) or []):
        references = names.REFERENCES
    replies: tuple[str, ...] = names.REPLY
    if names.ANSWER not in references:
        replies = (names.ANSWER, *names.REPLY)
    return {
        **{name: entry[name] for name in PASSED_ON if name in entry},
        "id": first(entry, names.QUESTION_ID),
        "question": first(entry, names.QUESTION),
        "documents": documents,
        "answers": first(entry, references),
        "reply": first(entry, replies),
    }


def _is_plain(entry: Fields) -> bool:
    documents = (*names.DOCUMENTS, *names.PARALLEL_IDS)
    return any(name in entry for name in names.QUESTION) and any(
        name in entry for name in documents
    )


def _is_langchain(item: Any) -> bool:
    """Whether a document is LangChain's."""
    return isinstance(item, dict) and ("page_content" in item or "lc" in item)


def _is_chain(entry: Fields) -> bool:
    context = entry.get("context")
    if not isinstance(context, list):
        return False
    return {"input", "answer"} <= entry.keys() or any(map(_is_langchain, context))


def _with_reply(entry: Fields, documents: Any, reply: str) -> Fields:
    """The fields of an entry whose documents and reply stand under the library's own names."""
    rest = {k: v for k, v in entry.items() if k not in (names.ANSWER, reply)}
    plain = extract_plain(rest, frozenset(names.REFERENCES))
    return {**plain, "documents": documents, "reply": entry.get(reply)}


def _extract_chain(entry: Fields, seen: frozenset[str]) -> Fields:
    return _with_reply(entry, entry.get("context"), names.ANSWER)


def _extract_retrieval_qa(entry: Fields, seen: frozenset[str]) -> Fields:
    reply = "result" if "result" in entry else names.ANSWER
    return _with_reply(entry, entry.get("source_documents"), reply)


def _is_run(entry: Fields) -> bool:
    return "inputs" in entry and "outputs" in entry


def _runs(run: Fields) -> Iterator[Fields]:
    """A LangChain run, and the runs below it."""
    waiting: list[Any] = [run]
    while waiting:
        current = waiting.pop(0)
        if not isinstance(current, dict):
            continue
        yield current
        children = current.get("child_runs")
        waiting += children if isinstance(children, list) else []


def _extract_run(entry: Fields, seen: frozenset[str]) -> Fields:
    inputs = entry.get("inputs")
    if not isinstance(inputs, dict):
        raise Skip(names.NO_QUESTION)
    documents = None
    for run in _runs(entry):
        outputs = run.get("outputs")
        if documents is None and isinstance(outputs, dict):
            documents = first(outputs, ("source_documents", "context", "documents"))
    outputs = entry.get("outputs")
    outputs = outputs if isinstance(outputs, dict) else {}
    return {
        "id": entry.get("id"),
        "question": first(inputs, names.QUESTION),
        "documents": documents,
        "reply": first(outputs, (names.ANSWER, *names.REPLY)),
    }


def _gather_runs(entries: list[Entry], skips: Skips) -> list[Entry]:
    """One entry for each trace: its root run, with the others below it."""
    traces: dict[Any, list[Entry]] = {}
    for entry in entries:
        trace = entry.fields.get("trace_id")
        key = trace if isinstance(trace, str) else entry.number
        traces.setdefault(key, []).append(entry)
    gathered = []
    for trace_entries in traces.values():
        root = next(
            (e for e in trace_entries if not e.fields.get("parent_run_id")),
            trace_entries[0],
        )
        others = [e.fields for e in trace_entries if e is not root]
        fields = dict(root.fields)
        if others:
            children = fields.get("child_runs")
            fields["child_runs"] = [
                *(children if isinstance(children, list) else []),
                *others,
            ]
        gathered.append(Entry(root.number, fields))
    return gathered


def _extract_source_nodes(entry: Fields, seen: frozenset[str]) -> Fields:
    return _with_reply(entry, entry.get("source_nodes"), "response")


def _generated_answer(entry: Fields) -> Fields | None:
    """The first of Haystack's answers in an entry, in any of its wrappings."""
    candidates: list[Any] = [entry]
    for value in [entry, *entry.values()]:
        answers = value.get("answers") if isinstance(value, dict) else None
        candidates += answers[:1] if isinstance(answers, list) else []
    for candidate in candidates:
        if not isinstance(candidate, dict):
            continue
        inner = candidate.get("init_parameters", candidate)
        if isinstance(inner, dict) and {"data", "query", "documents"} <= inner.keys():
            return inner
    return None


def _extract_generated_answer(entry: Fields, seen: frozenset[str]) -> Fields:
    answer = _generated_answer(entry)
    if answer is None:
        raise Skip("no answer with data, query and documents")
    documents = answer["documents"]
    indices = []
    for item in documents if isinstance(documents, list) else []:
        meta = item.get("meta") if isinstance(item, dict) else None
        indices.append(meta.get("source_index") if isinstance(meta, dict) else None)
    fields = _with_reply({**entry, **answer}, documents, "data")
    retrieved = _shortest_with(entry, answer)
    if retrieved:
        # The answer builder may keep only the documents that a reply cites.
        return {**fields, "documents": retrieved}
    if any(indices) and indices != list(range(1, len(indices) + 1)):
        remark = "the answer builder kept only cited documents: log those of the retriever (include_outputs_from)"
        return {**fields, "remark": remark}
    return fields


def _shortest_with(entry: Fields, answer: Fields) -> list[Any] | None:
    """The shortest list of a component's documents (a retriever's, a ranker's) that holds those of an answer."""
    cited = set(_contents(answer["documents"]))
    lists = [
        value["documents"]
        for value in entry.values()
        if isinstance(value, dict)
        and value is not answer
        and cited <= set(_contents(value.get("documents")))
        and isinstance(value.get("documents"), list)
    ]
    return min(lists, key=len, default=None)


def _contents(documents: Any) -> list[str]:
    """Texts of Haystack's documents."""
    items = documents if isinstance(documents, list) else []
    contents = [item.get("content") for item in items if isinstance(item, dict)]
    return [text for text in contents if isinstance(text, str)]


def _is_promptfoo(entry: Fields) -> bool:
    return "vars" in entry and ("testCase" in entry or "response" in entry)


def _gather_promptfoo(entries: list[Entry], skips: Skips) -> list[Entry]:
    """One entry for each test, which several prompts and providers answered."""
    seen: set[int] = set()
    kept = []
    for entry in entries:
        test = entry.fields.get("testIdx")
        if isinstance(test, int) and not isinstance(test, bool):
            if test in seen:
                reason = "the same test under another prompt or provider"
                skips.add(entry.number, reason, "")
                continue
            seen.add(test)
        kept.append(entry)
    return kept


def _extract_promptfoo(entry: Fields, seen: frozenset[str]) -> Fields:
    variables = entry.get("vars")
    if not isinstance(variables, dict):
        raise Skip(names.NO_QUESTION)
    response = entry.get("response")
    reply = response.get("output") if isinstance(response, dict) else None
    plain = extract_plain(variables, frozenset(names.REFERENCES))
    case = entry.get("testCase")
    references = _asserted(case if isinstance(case, dict) else {}, variables)
    if references is None:
        references = plain["answers"]
    return {**plain, "id": entry.get("id"), "answers": references, "reply": reply}


def _asserted(case: Fields, variables: Fields) -> Any:
    """The references of a test case: what its one positive assertion expects; None if there is none, or several."""
    assertions = case.get("assert")
    values = [
        assertion["value"]
        for assertion in (assertions if isinstance(assertions, list) else [])
        if isinstance(assertion, dict)
        and assertion.get("type") in POSITIVE_ASSERTIONS
        and assertion.get("value")
    ]
    expected = variables.get("__expected")
    if not values and isinstance(expected, str) and expected.strip():
        kind, colon, value = expected.partition(":")
        if not re.fullmatch(r"[a-z-]+", kind) or not colon:
            return expected
        if kind not in POSITIVE_ASSERTIONS:
            return None
        value = value.strip()
        return (
            [text.strip() for text in value.split(",")] if kind[-3:] == "any" else value
        )
    # A reply has to pass all of several assertions: none of them is a reference alone.
    return values[0] if len(values) == 1 else None


def _has(*keys: str) -> Callable[[Fields], bool]:
    """Whether an entry has some of the fields."""
    return lambda entry: any(key in entry for key in keys)


SHAPES: Sequence[Shape] = (
    Shape(
        "OpenInference spans",
        '{"attributes": {"input.value": "...", "retrieval.documents.0.document.content": "..."}}',
        is_span,
        extract_plain,
        gather_spans,
        "span",
    ),
    Shape(
        "promptfoo results",
        '{"vars": {"question": "...", "documents": ["..."]}, "testCase": {"assert": [...]}, "response": {...}}',
        _is_promptfoo,
        _extract_promptfoo,
        _gather_promptfoo,
    ),
    Shape(
        "LangChain run",
        '{"inputs": {"query": "..."}, "outputs": {"result": "...", "source_documents": [{"page_content": "..."}]}}',
        _is_run,
        _extract_run,
        _gather_runs,
    ),
    Shape(
        "LangChain retrieval chain",
        '{"input": "...", "context": [{"kwargs": {"page_content": "...", "metadata": {}}}], "answer": "..."}',
        _is_chain,
        _extract_chain,
    ),
    Shape(
        "LangChain RetrievalQA",
        '{"query": "...", "source_documents": [{"page_content": "...", "metadata": {}}], "result": "..."}',
        _has("source_documents"),
        _extract_retrieval_qa,
    ),
    Shape(
        "LlamaIndex source nodes",
        '{"query_str": "...", "source_nodes": [{"node": {"id_": "...", "text": "..."}, "score": 1.5}], "response": ""}',
        _has("source_nodes"),
        _extract_source_nodes,
    ),
    Shape(
        "Haystack answers",
        '{"builder": {"answers": [{"data": "...", "query": "...", "documents": [{"id": "...", "content": "..."}]}]}}',
        lambda entry: _generated_answer(entry) is not None,
        _extract_generated_answer,
    ),
    Shape(
        "ragas data set",
        '{"user_input": "...", "retrieved_contexts": ["..."], "reference": "...", "response": "..."}',
        _has("retrieved_contexts"),
        extract_plain,
    ),
    Shape(
        "DPR",
        '{"question": "...", "answers": ["..."], "ctxs": [{"id": "...", "title": "...", "text": "..."}]}',
        _has("ctxs"),
        extract_plain,
    ),
    Shape(
        "questions with documents",
        '{"question": "...", "documents": [{"id": "...", "text": "..."}], "answers": ["..."]}',
        _is_plain,
        extract_plain,
    ),
)
"""The shapes of files; the first that recognises most entries of a file is its shape."""
