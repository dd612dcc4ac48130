"""Plain data against a dataclass: each mistake is one line that names the key, and all are told together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from posbench import schema
from posbench.errors import UserError
from posbench.methods import Method, ScaleChannel
from posbench.schema import (
    Bases,
    Count,
    NonNegative,
    Positive,
    Several,
    Share,
    Whole,
    build,
    default_values,
    instantiate,
    override_text,
    required_fields,
    resolve_target,
    verify,
)
from posbench.studies.base import Study
from tests.messages import Tokens, refused


@dataclass(frozen=True)
class Sample:
    """One field of each kind."""

    count: int = 0
    share: float = 0.0
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, int] | None = None
    many: tuple[float, ...] = ()
    flag: bool = False
    facts: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """One field for each declared bound."""

    title: ClassVar[str] = "not a field"
    count: Count = 1
    whole: Whole = 0
    several: Several = 2
    positive: Positive = 0.5
    nonnegative: NonNegative = 0.0
    share: Share = 0.5
    angle: Annotated[float, Ge(-1), Lt(1)] = 0.0
    few: Annotated[int, Ge(1), Le(3)] | None = None
    either: Count | Literal["all"] | None = 1
    weights: tuple[NonNegative, NonNegative] = (0.0, 1.0)
    bases: Bases = (None,)


@pytest.mark.parametrize(
    ("data", "allowed", "hint"),
    [
        ({"count": "x"}, "whole number", "where.count=1"),
        ({"count": 1.5}, "whole number", "where.count=1"),
        ({"count": True}, "whole number", "where.count=1"),
        ({"share": float("nan")}, "finite number", "where.share=0.5"),
        ({"share": "inf"}, "finite number", "where.share=0.5"),
        ({"many": [1.0, float("inf")]}, ("list", "finite number"), "where.many=[0.5]"),
        ({"kind": "c"}, ("a", "b"), "where.kind=a"),
        ({"pair": [1]}, ("2", "whole number", "null"), "where.pair=[1,1]"),
        ({"facts": 3}, ("mapping", "null"), "where.facts"),
        ({"flag": "perhaps"}, ("true", "false"), "where.flag=true"),
        ({"cuont": 3}, ("count", "share", "facts"), "where.count"),
        ({"zebra": 3}, ("count", "share", "facts"), "remove"),
    ],
)
def test_what_a_mistake_names(
    data: dict[str, Any], allowed: Tokens, hint: Tokens
) -> None:
    ((name, value),) = data.items()
    with refused(f"where.{name}", value, allowed=allowed, hint=hint) as caught:
        build(Sample, data, "where")
    assert "\n" not in str(caught.value)


BOUNDS = [
    # field, values at the edge and inside, values beyond, in words
    ("count", [1, 7], [0, -1], "a whole number from 1 to 1000000"),
    ("whole", [0, 7], [-1], "a whole number from 0 to 1000000"),
    ("several", [2], [1, 0], "a whole number from 2 to 1000000"),
    ("positive", [1e-9, 2], [0, -0.5], "a number above 0"),
    ("nonnegative", [0, 2.5], [-1e-9], "a number from 0 up"),
    ("share", [0, 0.3, 1], [-0.1, 1.1], "a number from 0 to 1"),
    ("angle", [-1, 0.999], [1, -1.1], "a number from -1 to below 1"),
    ("few", [1, 3, None], [0, 4], "a whole number from 1 to 3, or null"),
    (
        "either",
        [1, "all", None],
        [0, "some"],
        "a whole number from 1 to 1000000, or all, or null",
    ),
    (
        "weights",
        [[0, 0.5]],
        [[0, -1], [1]],
        "a list of exactly 2: [a number from 0 up, a number from 0 up]",
    ),
    (
        "bases",
        [[1.5], [None, 2.0]],
        [[1.0], [], [None, 0]],
        "a list [...] of at least 1: a number above 1, or null",
    ),
]


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"), BOUNDS, ids=[b[0] for b in BOUNDS]
)
def test_declared_bounds_hold_in_yaml_and_in_python(
    name: str, good: list[Any], bad: list[Any], words: str
) -> None:
    for value in good:
        made = build(Bounded, {name: value}, "where")
        assert getattr(made, name) == (
            tuple(value) if isinstance(value, list) else value
        )
        verify(made, "where")
    for value in bad:
        line = f"where.{name} = {value!r}: allowed: {words}; next: set where.{name}="
        with pytest.raises(UserError) as caught:
            build(Bounded, {name: value}, "where")
        assert str(caught.value).startswith(line)
        with pytest.raises(UserError) as caught:
            verify(Bounded(**{name: value}), "where")
        assert str(caught.value).startswith(line)


def test_all_faults_are_told_together_each_in_one_line() -> None:
    data = {"count": 0, "share": 2, "weights": [0, -1], "positive": 3}
    with pytest.raises(UserError) as caught:
        build(Bounded, data, "search")
    assert [fault.field for fault in caught.value.faults] == [
        "search.count",
        "search.share",
        "search.weights",
    ]
    assert [str(fault).count("\n") for fault in caught.value.faults] == [0, 0, 0]
    with pytest.raises(UserError) as caught:
        verify(Bounded(count=0, share=2.0, positive=-1.0), "search")
    assert [fault.field for fault in caught.value.faults] == [
        "search.count",
        "search.positive",
        "search.share",
    ]
    # Unknown keys and booleans are found before pydantic looks at the rest.
    with pytest.raises(UserError) as caught:
        build(Bounded, {"cuont": 1, "whole": True}, "search")
    assert [fault.field for fault in caught.value.faults] == [
        "search.cuont",
        "search.whole",
    ]


def test_a_missing_field_is_named() -> None:
    with refused("method.factor", None, allowed="float32", hint="method.factor=0.5"):
        build(ScaleChannel, {"channel": 1, "layers": [0, 1]}, "method")


@pytest.mark.parametrize(
    "value",
    [
        "a, b (1).csv",
        "it's here",
        "[a]",
        {"a": [1, "b, c"], "d": None},
        ["0%", 0.5, True, "x{y}"],
        'say "so"',
        "a, b\\",
        "a\\'b, c",
        "C:\\d, e\\\\",
    ],
)
def test_hydra_reads_a_spelled_value_as_it_was(value: object) -> None:
    override = f"key={override_text(value)}"
    (read,) = OverridesParser.create().parse_overrides([override])
    assert not read.is_sweep_override() and _plain(read.value()) == value


def _plain(value: Any) -> Any:
    """A parsed value without Hydra's quotes."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def test_defaults_and_required_fields() -> None:
    assert default_values(Bounded)["weights"] == [
        0.0,
        1.0,
    ] and "title" not in default_values(Bounded)
    assert default_values(ScaleChannel) == {
        "channel": None,
        "factor": None,
        "layers": None,
        "last": 1,
        "tokens": "both",
    }
    assert (
        required_fields(ScaleChannel) == {"channel", "factor", "layers"}
        and required_fields(Bounded) == set()
    )


@pytest.mark.parametrize(
    ("data", "allowed", "hint"),
    [
        (None, (), "posbench ls methods"),
        ({}, "class", "conf/method/*.yaml"),
        ({"_target_": "nowhere"}, "class", "conf/method/*.yaml"),
        ({"_target_": "posbench.methods.Nothing"}, "class", "Nothing"),
        (
            {"_target_": "posbench.tasks.KVRetrieval"},
            "posbench.methods.base.Method",
            "CONTRIBUTING.md",
        ),
    ],
)
def test_a_target_that_is_none(data: Any, allowed: Tokens, hint: Tokens) -> None:
    field = "method" if data is None else "method._target_"
    value = data and data.get("_target_")
    with refused(field, None if data == {} else value, allowed=allowed, hint=hint):
        resolve_target(data, Method, "method")


@dataclass(frozen=True, kw_only=True)
class UnfinishedStudy(Study):
    """A study that measures nothing."""


def test_a_class_that_lacks_what_its_base_needs() -> None:
    allowed = "measure"
    target = f"{__name__}.UnfinishedStudy"
    with refused("part._target_", target, allowed=allowed, hint="CONTRIBUTING.md"):
        resolve_target({"_target_": target}, object, "part")


@dataclass(frozen=True)
class Holder:
    """Nodes inside a node."""

    inner: Any = None
    table: dict[str, Any] = field(default_factory=dict)


def test_nodes_inside_a_node_become_objects() -> None:
    own = {"_target_": f"{__name__}.Bounded", "count": 3}
    data = {
        "_target_": f"{__name__}.Holder",
        "name": "mine",
        "inner": own,
        "table": {"a": own, "b": 4},
    }
    made = instantiate(data, object, "study")
    assert made == Holder(inner=Bounded(count=3), table={"a": Bounded(count=3), "b": 4})
    with refused(
        "study.table.a.count", 0, allowed=("1", "1000000"), hint="study.table.a.count=1"
    ):
        instantiate({**data, "table": {"a": own | {"count": 0}}}, object, "study")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (dict[str, int], "a mapping"),
        (Sample, "a mapping"),
        (
            Annotated[tuple[float, ...], MinLen(2)],
            "a list [...] of at least 2: a finite number",
        ),
        (Annotated[float, Le(4)], "a number up to 4"),
        (Annotated[float, Lt(4)], "a number below 4"),
        (Annotated[float, Gt(0), Le(1)], "a number above 0 and up to 1"),
        (Annotated[float, Gt(0), Lt(1)], "a number above 0 and below 1"),
    ],
)
def test_annotations_in_words(kind: Any, words: str) -> None:
    assert schema.describe_type(kind) == words


def test_a_module_of_ones_own_that_is_not_on_the_path_is_named() -> None:
    target = {"_target_": "my_method_of_elsewhere.Mine"}
    hint = ("my_method_of_elsewhere.py", "--config-dir")
    with refused("method._target_", target["_target_"], hint=hint):
        resolve_target(target, Method, "method")
