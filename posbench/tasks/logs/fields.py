"""From the fields of an entry to a question: near names, and types that are checked."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posbench.tasks.logs.base import LoggedDocument, LoggedQuestion, Skip, indices_of
from posbench.tasks.logs.entries import json_in_text, list_in_text

QUESTION = ("question", "query", "input", "user_input", "q", "query_str")
QUESTION_ID = ("id", "question_id", "query_id", "qid", "_id")
DOCUMENTS = (
    "contexts",
    "documents",
    "docs",
    "passages",
    "ctxs",
    "retrieved_contexts",
    "retrieved_documents",
    "retrieved_docs",
    "retrieval_context",
    "retrieved",
    "source_documents",
    "context",
    "chunks",
    "hits",
)
REFERENCES = (
    "answers",
    "reference",
    "references",
    "reference_answer",
    "reference_answers",
    "ground_truth",
    "ground_truths",
    "expected_output",
    "expected_answer",
    "expected",
    "gold_answer",
    "gold_answers",
    "target",
)
ANSWER = "answer"
"""The reference in one log, the model's reply in another."""
REPLY = (
    "reply",
    "response",
    "result",
    "output",
    "actual_output",
    "prediction",
    "generated_answer",
    "model_answer",
    "data",
)
GOLD_IDS = (
    "gold_doc_id",
    "gold_doc_ids",
    "gold_id",
    "gold_ids",
    "gold_document_id",
    "gold_document_ids",
    "relevant_ids",
    "relevant_doc_ids",
    "relevant_document_ids",
    "expected_doc_ids",
    "reference_context_ids",
)
GOLD = "gold"
"""Indices or ids of the gold documents."""
GOLD_INDICES = ("gold_index", "gold_indices", "gold_position", "gold_positions")
GOLD_TEXTS = (
    "reference_contexts",
    "gold_contexts",
    "gold_context",
    "gold_texts",
    "gold_text",
    "gold_passages",
)
PARALLEL_IDS = (
    "retrieved_context_ids",
    "retrieved_ids",
    "retrieved_doc_ids",
    "context_ids",
    "document_ids",
    "doc_ids",
)
PARALLEL_SCORES = ("scores", "retrieval_scores", "context_scores")
"""Lists beside the documents, an element for each."""
LISTED = {"ids": '["d1", "d2"]', "scores": "[0.83, 0.5]"}
"""How such lists are written."""

TEXT = (
    "text",
    "content",
    "page_content",
    "contents",
    "body",
    "passage",
    "chunk",
    "document",
)
DOCUMENT_ID = (
    "id",
    "id_",
    "_id",
    "doc_id",
    "docid",
    "document_id",
    "chunk_id",
    "node_id",
    "passage_id",
    "pid",
)
TITLE = ("title", "document_title")
SCORE = ("score", "relevance_score", "similarity", "similarity_score", "_score")
DISTANCE = ("distance", "_distance")
SOURCE = ("source", "file_path", "file_name", "filename", "url")
PAGE = (
    "page",
    "page_number",
    "page_label",
    "position",
    "chunk_index",
    "start_index",
    "start_char_idx",
    "split_id",
)
IS_GOLD = ("isgold", "is_gold", "has_answer", "hasanswer", "is_relevant")
INNER = ("kwargs", "node", "document", "init_parameters")
"""Fields in which libraries wrap a document."""
METADATA = ("metadata", "meta")

NO_QUESTION = "no question"
NO_DOCUMENTS = "no documents"
ONE_TEXT = "documents in one text, not in a list"
IDS_WITHOUT_TEXT = "documents have ids, but no text"
NO_TEXT = "a document without text"
LOG_TEXTS = "log the texts beside the ids"
POINT = "a number with a decimal point, such as 0.83"
SEPARATOR = " | "
"""Between the aliases of an answer in a cell of CSV."""


def first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The first value under some names that is not null; None if there is none."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def comparable(text: str) -> str:
    """A text in NFC with white space collapsed, as questions and passages are compared."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def as_list(value: Any) -> list[Any] | None:
    """A list, or the list that a text spells; None for any other value."""
    if isinstance(value, str):
        return list_in_text(value)
    return list(value) if isinstance(value, list | tuple) else None


def as_text(value: Any, name: str) -> str | None:
    """A text, or a number as text; None for null; :class:`Skip` for another type."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return str(int(value)) if value == int(value) else str(value)
    raise Skip(f"{name}: neither text nor a number")


def as_number(value: Any, name: str) -> float | None:
    """A number, also one in text; None for null and NaN; :class:`Skip` for another value."""
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise Skip(f"{name}: not a number", POINT)
    return number if math.isfinite(number) else None


def as_answers(value: Any, *, is_cell: bool) -> tuple[str, ...] | None:
    """Answers of a text, a number, a list of these, or SQuAD's ``{"text": [...]}``; None where there are none.

    Args:
        value: The value.
        is_cell: Whether it is a cell of CSV, with :data:`SEPARATOR` between aliases or a list as Python prints it.
    """
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        value = value["text"]
    if isinstance(value, str):
        listed = list_in_text(value)
        # Outside a table a list of numbers may be an answer itself; one of texts is an answer's spelling.
        if is_cell or (listed and all(isinstance(item, str) for item in listed)):
            value = listed or value.split(SEPARATOR)
    values = value if isinstance(value, list | tuple) else [value]
    texts = [(as_text(item, "answers") or "").strip() for item in values]
    return tuple(dict.fromkeys(filter(None, texts))) or None


def read_documents(value: Any) -> tuple[LoggedDocument, ...]:
    """The documents of a list of texts or objects.

    Raises:
        Skip: It is no such list, or a document lacks its text.
    """
    items = as_list(value)
    if items is None:
        is_text = isinstance(value, str) and value.strip()
        raise Skip(ONE_TEXT if is_text else NO_DOCUMENTS)
    if not items:
        raise Skip(NO_DOCUMENTS)
    return tuple(map(read_document, items))


def read_document(item: Any) -> LoggedDocument:
    """A document in any of the forms that libraries write; :class:`Skip` if it has no text, or wrong types."""
    if isinstance(item, int | float) and not isinstance(item, bool):
        raise Skip(IDS_WITHOUT_TEXT, LOG_TEXTS)
    if isinstance(item, str):
        if not item.strip():
            raise Skip(NO_TEXT)
        return LoggedDocument(None, None, item)
    layers = _layers(item)
    text = _from(layers, TEXT)
    resource = _from(layers, ("text_resource",))
    if text is None and isinstance(resource, dict):
        text = resource.get("text")
    name = as_text(_from(layers, DOCUMENT_ID), "id of a document") or None
    if text is None and name is not None:
        raise Skip(IDS_WITHOUT_TEXT, LOG_TEXTS)
    if not isinstance(text, str) or not text.strip():
        raise Skip(NO_TEXT)
    score = _from(layers, SCORE)
    if score is None:
        score = _from(layers, DISTANCE)
    return LoggedDocument(
        name,
        as_text(_from(layers, TITLE), "title of a document"),
        text,
        as_number(score, "score of a document"),
        _page(_from(layers, PAGE)),
        _source(_from(layers, SOURCE)),
    )


def _layers(item: Any) -> list[Mapping[str, Any]]:
    """The objects in which the fields of a document may stand, the nearest first."""
    if not isinstance(item, dict):
        raise Skip("a document that is neither text nor an object")
    wrapped = next((item[k] for k in INNER if isinstance(item.get(k), dict)), None)
    layers: list[Mapping[str, Any]] = [item]
    if wrapped is not None:
        # LangChain's own id beside kwargs is the path of a class.
        layers = [wrapped, {"score": item.get("score")}]
    for name in METADATA:
        metadata = layers[0].get(name)
        if isinstance(metadata, str):
            metadata = json_in_text(metadata)
        if isinstance(metadata, dict):
            layers.append(metadata)
    return layers


def _from(layers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """The first value under some names in some objects."""
    return next(
        (value for layer in layers if (value := first(layer, names)) is not None), None
    )


def _page(value: Any) -> float | None:
    """A page or position, where it is a number."""
    try:
        return as_number(value, "")
    except Skip:
        return None


def _source(value: Any) -> str | None:
    """A file or address, where it is text."""
    return value if isinstance(value, str) and value else None


def has_distances(value: Any) -> bool:
    """Whether the documents name their scores distances."""
    items = as_list(value) or []
    layers = [_layers(item) for item in items if isinstance(item, dict)]
    return bool(layers) and all(
        _from(layer, SCORE) is None and _from(layer, DISTANCE) is not None
        for layer in layers
    )


def read_question(
    number: int, fields: Mapping[str, Any], *, is_cell: bool
) -> LoggedQuestion:
    """A question of fields under the names ``question``, ``documents``, ``answers``, ``reply``, ``id``, and of gold.

    Args:
        number: Number of the line.
        fields: The fields; the names of gold are :data:`GOLD`, and those of :data:`GOLD_IDS`, :data:`GOLD_INDICES`
            and :data:`GOLD_TEXTS`.
        is_cell: Whether the values are cells of CSV.

    Raises:
        Skip: The question or the documents are missing, or a field has a wrong type.
    """
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise Skip(NO_QUESTION)
    value = fields.get("documents")
    ids = as_list(first(fields, PARALLEL_IDS))
    if not value and ids:
        raise Skip(IDS_WITHOUT_TEXT, LOG_TEXTS)
    documents = read_documents(value)
    if ids is not None:
        texts = [as_text(item, "id of a document") for item in _beside(ids, documents)]
        documents = tuple(
            document._replace(id=document.id or text)
            for document, text in zip(documents, texts, strict=True)
        )
    scores = as_list(first(fields, PARALLEL_SCORES))
    if scores is not None:
        numbers = [as_number(item, "score") for item in _beside(scores, documents)]
        documents = tuple(
            document._replace(
                score=number if document.score is None else document.score
            )
            for document, number in zip(documents, numbers, strict=True)
        )
    gold = _named_gold(fields, documents)
    if gold is None:
        gold = _marked_gold(value)
    reply = fields.get("reply")
    return LoggedQuestion(
        line=number,
        question=question,
        answers=as_answers(fields.get("answers"), is_cell=is_cell),
        documents=documents,
        gold=gold,
        reply=reply if isinstance(reply, str) else None,
        id=as_text(fields.get("id"), "id"),
        gold_is_named=gold is not None,
    )


def _beside(values: list[Any], documents: Sequence[LoggedDocument]) -> list[Any]:
    """A list beside the documents; :class:`Skip` if it has another length."""
    if len(values) != len(documents):
        raise Skip("a list of ids or scores of another length than the documents")
    return values


def _named_gold(
    fields: Mapping[str, Any], documents: Sequence[LoggedDocument]
) -> tuple[int, ...] | None:
    """Indices of the documents that an entry names as gold, by index, id or text; None if it names none."""
    indices = first(fields, GOLD_INDICES)
    if indices is not None:
        values = _listed(indices)
        return tuple(sorted({_index(value, documents) for value in values}))
    names = first(fields, GOLD_IDS)
    if names is not None and any(document.id for document in documents):
        return _with_ids(_listed(names), documents)
    gold = fields.get(GOLD)
    if gold is not None:
        values = [*_listed(gold), *_listed(fields.get("other_gold") or [])]
        if _are_indices(values, documents):
            return tuple(sorted({_index(value, documents) for value in values}))
        if any(document.id for document in documents):
            return _with_ids(values, documents)
    texts = first(fields, GOLD_TEXTS)
    if texts is None:
        return None
    passages = [read_document(item) for item in _listed(texts)]
    wanted = {comparable(passage.text) for passage in passages}
    return indices_of(comparable(document.text) in wanted for document in documents)


def _listed(value: Any) -> list[Any]:
    """A list, or a single value as one."""
    items = as_list(value)
    return [value] if items is None else items


def _index(value: Any, documents: Sequence[LoggedDocument]) -> int:
    """An index in the documents; :class:`Skip` if it is none."""
    number = as_number(value, "index of a gold document")
    if number is None or number != int(number) or not 0 <= number < len(documents):
        raise Skip("the index of a gold document is outside its list")
    return int(number)


def _are_indices(values: Sequence[Any], documents: Sequence[LoggedDocument]) -> bool:
    """Whether gold is named by indices: by whole numbers, where no id is a number."""
    ids = [document.id for document in documents]
    if any(name and name.isdecimal() for name in ids):
        return False
    are_numbers = all(isinstance(value, int | float) for value in values)
    # A cell of CSV is text.
    are_digits = all(isinstance(value, str) and value.isdecimal() for value in values)
    in_list = are_digits and all(int(value) < len(documents) for value in values)
    return are_numbers or in_list or (are_digits and not any(ids))


def _with_ids(
    values: Sequence[Any], documents: Sequence[LoggedDocument]
) -> tuple[int, ...]:
    """Indices of the documents that have some ids."""
    names = {as_text(value, "gold") for value in values} - {None}
    return indices_of(document.id in names for document in documents)


def has_unusable_gold(fields: Mapping[str, Any], question: LoggedQuestion) -> bool:
    """Whether an entry names gold documents by ids that its documents do not have."""
    names = first(fields, (*GOLD_IDS, GOLD))
    return names is not None and not question.gold_is_named


def unused_parts(fields: Mapping[str, Any], question: LoggedQuestion) -> Iterator[str]:
    """What of an entry's documents is not used: lists that are none, and scores that not every document has."""
    for kind, names, is_missing in (
        ("ids", PARALLEL_IDS, any(d.id is None for d in question.documents)),
        ("scores", PARALLEL_SCORES, question.scores is None),
    ):
        value = first(fields, names)
        if is_missing and value is not None and as_list(value) is None:
            yield f"{kind} of documents are not used, as they are no list such as {LISTED[kind]}"
    if question.scores is None and any(d.score is not None for d in question.documents):
        yield (
            "scores are not used, and the order of the log stands for the ranking, where a document has none, or one "
            "that is no finite number"
        )


def _marked_gold(value: Any) -> tuple[int, ...] | None:
    """Indices of the documents that are marked as gold; None if none is."""
    items = as_list(value) or []
    for name in IS_GOLD:
        marked = indices_of(
            isinstance(item, dict) and item.get(name) in (True, 1, "true", "True")
            for item in items
        )
        if marked:
            return marked
    return None
