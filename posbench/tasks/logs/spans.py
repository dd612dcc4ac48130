"""Spans of OpenTelemetry with OpenInference's attributes: flat, nested, or as OTLP JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posbench.tasks.logs.base import Entry, Skip, Skips
from posbench.tasks.logs.entries import json_in_text
from posbench.tasks.logs.fields import ANSWER, QUESTION, REPLY, first

DROPPED = "spans lost attributes"
KEEP_ATTRIBUTES = (
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=10000 where the spans are made (128 by default)"
)
VALUES = ("stringValue", "boolValue", "intValue", "doubleValue")
"""Fields of OTLP's values that hold one value."""


def is_span(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is a span, a row of a table of spans, or OTLP JSON."""
    if "resourceSpans" in entry:
        return True
    return any(name == "attributes" or name.startswith("attributes.") for name in entry)


def gather_spans(entries: list[Entry], skips: Skips) -> list[Entry]:
    """One entry for each retriever's span, with the reply of its trace.

    Spans that lost attributes are skipped: renumbering the rest would move the documents. A retriever's span inside
    another one's is its repetition.
    """
    spans = list(_spans(entries))
    replies = _replies([span for _, span in spans])
    retrievers = {
        _id_of(span) for _, span in spans if _documents(span["attributes"]) is not None
    }
    gathered = []
    for number, span in spans:
        attributes = span["attributes"]
        documents = _documents(attributes)
        if documents is None:
            continue
        if _parent(span) in retrievers - {""}:
            skips.add(number, "a retriever's span inside another one's", "")
            continue
        with skips.collecting(number):
            question = _question(attributes)
            fields = {
                "question": question,
                "documents": _in_order(documents),
                "reply": replies.get(_trace(span)),
            }
            dropped = first(
                span, ("droppedAttributesCount", "dropped_attributes_count")
            )
            if question is None or dropped not in (None, 0, "0"):
                raise Skip(DROPPED, KEEP_ATTRIBUTES)
            gathered.append(Entry(number, fields))
    return gathered


def _spans(entries: Sequence[Entry]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and fields of every span, its attributes nested; spans of OTLP JSON are counted through the file."""
    count = 0
    for number, fields in entries:
        if "resourceSpans" not in fields:
            span = _nested(fields)
            yield number, {**span, "attributes": _attributes(span.get("attributes"))}
            continue
        for resource in _objects(fields["resourceSpans"]):
            for scope in _objects(resource.get("scopeSpans")):
                for span in _objects(scope.get("spans")):
                    count += 1
                    attributes = _attributes(span.get("attributes"))
                    yield count, {**span, "attributes": attributes}


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; empty for any other value."""
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as nested objects, from flat, nested or OTLP's form."""
    if isinstance(value, str):
        value = json_in_text(value)
    if isinstance(value, list):
        value = {
            str(item.get("key")): _otlp_value(item.get("value"))
            for item in _objects(value)
        }
    return _nested(value) if isinstance(value, dict) else {}


def _otlp_value(value: Any) -> Any:
    """The value that OTLP JSON wraps by its type."""
    if not isinstance(value, dict):
        return value
    for name in VALUES:
        if name in value:
            return value[name]
    array = value.get("arrayValue")
    if isinstance(array, dict):
        return [_otlp_value(item) for item in _objects(array.get("values"))]
    pairs = value.get("kvlistValue")
    if isinstance(pairs, dict):
        return {
            str(item.get("key")): _otlp_value(item.get("value"))
            for item in _objects(pairs.get("values"))
        }
    return None


def _nested(value: Any) -> Any:
    """A value in which fields such as ``input.value`` are objects in objects."""
    if isinstance(value, list):
        return [_nested(item) for item in value]
    if not isinstance(value, dict):
        return value
    result: dict[str, Any] = {}
    for key, item in value.items():
        *path, last = str(key).split(".")
        node = result
        for name in path:
            inner = node.get(name)
            if not isinstance(inner, dict):
                inner = node[name] = {}
            node = inner
        node[last] = _nested(item)
    return result


def _at(tree: Any, *path: str) -> Any:
    """The value at a path of names; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _documents(attributes: Mapping[str, Any]) -> Any:
    """The documents of a retriever's span; None for other spans."""
    documents = _at(attributes, "retrieval", "documents")
    if documents is None:
        documents = _at(attributes, "gen_ai", "retrieval", "documents")
    return json_in_text(documents) if isinstance(documents, str) else documents


def _in_order(documents: Any) -> Any:
    """Documents that are numbered in the names of attributes as a list; :class:`Skip` if a number is missing."""
    if not isinstance(documents, dict):
        return documents
    numbers = [int(name) for name in documents if name.isdecimal()]
    if sorted(numbers) != list(range(len(documents))):
        raise Skip(DROPPED, KEEP_ATTRIBUTES)
    in_order = [documents[str(number)] for number in range(len(documents))]
    for item in in_order:
        document = item.get("document", item) if isinstance(item, dict) else item
        if isinstance(document, dict) and not {"content", "id"} & document.keys():
            raise Skip(DROPPED, KEEP_ATTRIBUTES)
    return in_order


def _question(attributes: Mapping[str, Any]) -> Any:
    """The question of a retriever's span: its input, or the question in an input of JSON."""
    value = _at(attributes, "input", "value")
    if value is None:
        value = _at(attributes, "gen_ai", "retrieval", "query", "text")
    data = json_in_text(value) if isinstance(value, str) else value
    if isinstance(data, dict):
        return first(data, QUESTION)
    return value


def _replies(spans: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The model's reply in each trace: the output of its root, or of its last call of a language model."""
    replies: dict[Any, str] = {}
    of_models: dict[Any, str] = {}
    for span in spans:
        attributes = span["attributes"]
        if _documents(attributes) is not None:
            continue
        value = _at(attributes, "output", "value")
        if isinstance(value, str) and not _parent(span):
            data = json_in_text(value)
            reply = first(data, (ANSWER, *REPLY)) if isinstance(data, dict) else value
            if isinstance(reply, str):
                replies[_trace(span)] = reply
        message = _at(
            attributes, "llm", "output_messages", "0", "message", "content"
        ) or _first_message(attributes)
        if isinstance(message, str):
            of_models[_trace(span)] = message
    return {**of_models, **replies}


def _first_message(attributes: Mapping[str, Any]) -> Any:
    """Text of the first message in a list of a language model's messages."""
    messages = _at(attributes, "llm", "output_messages")
    if not isinstance(messages, list) or not messages:
        return None
    return _at(messages[0], "message", "content")


def _trace(span: Mapping[str, Any]) -> str:
    """Id of a span's trace."""
    trace = _at(span, "context", "trace_id") or first(span, ("traceId", "trace_id"))
    return trace if isinstance(trace, str) else ""


def _id_of(span: Mapping[str, Any]) -> str:
    """Id of a span."""
    name = _at(span, "context", "span_id") or first(span, ("spanId", "span_id"))
    return name if isinstance(name, str) else ""


def _parent(span: Mapping[str, Any]) -> str:
    """Id of the span around a span; empty for the root."""
    name = first(span, ("parent_id", "parentSpanId", "parent_span_id", "parentId"))
    return name if isinstance(name, str) and name else ""
