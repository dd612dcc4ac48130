"""Prompts, gold protocol, files and score of key-value retrieval, against the official data."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from posbench.tasks import Example, KVRetrieval
from posbench.tasks.items import gold_indices, spread_examples
from posbench.tasks.kv_retrieval import WORDS, compact_prompt, official_prompt
from tests.messages import refused

DATA = Path(__file__).parents[1] / "data/kv_retrieval"
LINE16 = DATA / "kv-retrieval-75_keys.line16.jsonl"
KV60 = DATA / "KV60_valid_set.line16.jsonl"
RECORDS = [("k1", "v1"), ("k2", "v2")]


def _rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _keys(examples: Iterable[Example]) -> set[str]:
    return {re.findall(r'ey:? "([^"]+)"', e.prompt)[-1] for e in examples}


@pytest.mark.parametrize("count", [1, 5, 24, 64, 96, 100, 1000])
@pytest.mark.parametrize("by_question", [True, False])
def test_a_spread_subset_has_every_gold_position_alike(
    count: int, by_question: bool
) -> None:
    """Tasks give all positions of a question one after the other, or all questions of a position."""
    examples = KVRetrieval(pairs=9, positions=(0, 2, 4, 6, 8), limit=20).evaluation()
    if by_question:
        examples = sorted(examples, key=lambda e: (e.question_id.split("-")[-1], e.id))
    chosen = spread_examples(examples, count)
    assert len(chosen) == len({e.id for e in chosen}) == min(count, 100)
    counts = Counter(e.gold_position for e in chosen)
    assert count < 5 or max(counts.values()) - min(counts.values()) <= 1


def test_official_prompt_character_by_character() -> None:
    text, _ = official_prompt(RECORDS, "k2")
    assert text == (
        "Extract the value corresponding to the specified key in the JSON object below.\n"
        "\n"
        "JSON data:\n"
        '{"k1": "v1",\n'
        ' "k2": "v2"}\n'
        "\n"
        'Key: "k2"\n'
        "Corresponding value:"
    )


def test_compact_prompt_character_by_character() -> None:
    text, _ = compact_prompt(RECORDS, "k2")
    assert text == 'Json data: {"k1": "v1", "k2": "v2"} The value of key "k2" is "'


def test_the_prompts_are_those_that_positional_hidden_made_of_the_official_file() -> (
    None
):
    """Gold moved to index 24, 12 and 36, then cut to 50 pairs: every character as in the released prompts."""
    task = KVRetrieval(path=str(LINE16), pairs=50, positions=(24, 12, 36), limit=1)
    ours = task.examples("evaluation")
    theirs = _rows(KV60)
    assert [e.prompt for e in ours] == [row["input"] for row in theirs]
    assert [e.answers for e in ours] == [(row["output"],) for row in theirs]


@pytest.mark.parametrize("keys", [75, 140])
def test_an_official_line_in_its_own_order(keys: int) -> None:
    file = DATA / f"kv-retrieval-{keys}_keys.first3.jsonl"
    for number, row in enumerate(_rows(file)):
        records = [(k, v) for k, v in row["ordered_kv_records"]]  # type: ignore[attr-defined]
        gold = [k for k, _ in records].index(row["key"])
        task = KVRetrieval(path=str(file), pairs=keys, positions=(gold,), limit=3)
        example = task.examples("evaluation")[number]
        body = json.dumps(dict(records)).replace(", ", ",\n ")
        assert example.prompt == (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f'JSON data:\n{body}\n\nKey: "{row["key"]}"\nCorresponding value:'
        )
        assert example.answers == (row["value"],)


def test_the_gold_protocol_at_140_pairs() -> None:
    assert KVRetrieval().gold_positions == [0, 34, 69, 104, 139]
    assert KVRetrieval(pairs=32, positions=("12.5%", "50%", 31)).gold_positions == [
        3,
        15,
        31,
    ]


def test_a_percentage_is_the_index_of_whole_numbers() -> None:
    for pairs in range(1, 201):
        for percent in range(101):
            (found,) = gold_indices("positions", [f"{percent}%"], "pairs", pairs)
            assert found == percent * (pairs - 1) // 100
    # In floats 0.7 * 90 is 62.99, so that this was 62.
    assert gold_indices("positions", ["70%"], "pairs", 91) == [63]


@pytest.mark.parametrize("label", ["101%", "-1%", "x%", "%", "nan%", "inf%", "1/0%"])
def test_a_label_that_is_no_share_is_refused(label: str) -> None:
    with refused(
        "task.positions",
        label,
        allowed=("9", "task.pairs=10", "0%", "100%"),
        hint="list",
    ):
        gold_indices("positions", [label], "pairs", 10)


def test_the_gold_pair_moves_and_the_others_keep_their_order() -> None:
    file = DATA / "kv-retrieval-140_keys.first3.jsonl"
    rows = _rows(file)
    examples = KVRetrieval(path=str(file), limit=3).examples("evaluation")
    assert [e.gold_position for e in examples[:5]] == [0, 34, 69, 104, 139] and len(
        examples
    ) == 15
    assert len({e.id for e in examples}) == 15 and {e.cluster for e in examples} == {
        "0",
        "1",
        "2",
    }
    for example in examples:
        row = rows[int(example.cluster)]
        shown = [
            tuple(pair) for pair in re.findall(r'"([^"]+)": "([^"]+)"', example.prompt)
        ]
        gold = (row["key"], row["value"])
        assert shown.index(gold) == example.gold_position and len(shown) == 140
        official = [tuple(pair) for pair in row["ordered_kv_records"]]  # type: ignore[attr-defined]
        assert [p for p in shown if p != gold] == [p for p in official if p != gold]


@pytest.mark.parametrize(
    ("prompt", "records"), [("official", "uuid"), ("compact", "words")]
)
def test_spans_cut_out_the_pairs(prompt: str, records: str) -> None:
    task = KVRetrieval(prompt=prompt, records=records, pairs=9, limit=2)  # type: ignore[arg-type]
    for example in task.examples("evaluation"):
        items = [example.prompt[a:b] for a, b in example.items]
        assert len(items) == 9 and all(
            re.fullmatch(r'"[^"]+": "[^"]+"', item) for item in items
        )
        assert example.gold_position is not None
        assert items[example.gold_position].endswith(f': "{example.answers[0]}"')
        assert re.findall(r'"([^"]+)"', items[example.gold_position])[0] in _keys(
            [example]
        )


def test_generated_sets_are_those_of_their_seed() -> None:
    first = KVRetrieval(pairs=5, limit=3).examples("evaluation")
    assert KVRetrieval(pairs=5, limit=3).examples("evaluation") == first
    assert {
        e.prompt for e in KVRetrieval(pairs=5, limit=3, seed=1).examples("evaluation")
    }.isdisjoint(e.prompt for e in first)
    # More examples leave the first ones as they are.
    assert [
        e
        for e in KVRetrieval(pairs=5, limit=4).examples("evaluation")
        if not e.id.endswith("-3")
    ] == first
    uuids = re.findall(r'"([^"]+)"', first[0].prompt)
    assert all(
        re.fullmatch(
            r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", u
        )
        for u in uuids
    )


@pytest.mark.parametrize("records", ["uuid", "words"])
def test_calibration_never_asks_what_the_evaluation_asks(records: str) -> None:
    task = KVRetrieval(
        prompt="compact",
        records=records,
        pairs=12,
        limit=50,
        calibration_examples=200,
        calibration_pairs=12,
    )  # type: ignore[arg-type]
    evaluation = task.examples("evaluation")
    calibration = task.examples("calibration")
    assert {e.prompt for e in evaluation}.isdisjoint(e.prompt for e in calibration)
    if records == "uuid":
        assert _keys(evaluation).isdisjoint(_keys(calibration))
    assert {e.gold_position for e in calibration} == set(range(1, 11))
    assert len(calibration) == 200


def test_finished_calibration_prompts() -> None:
    task = KVRetrieval(
        path=str(DATA / "kv-retrieval-140_keys.first3.jsonl"),
        limit=3,
        calibration_path=str(KV60),
    )
    assert [(e.prompt, e.answers[0]) for e in task.examples("calibration")] == [
        (r["input"], r["output"]) for r in _rows(KV60)
    ]


@pytest.mark.parametrize("prompt", ["official", "compact"])
def test_finished_prompts_that_the_evaluation_asks_are_refused(
    prompt: str, tmp_path: Path
) -> None:
    task = KVRetrieval(path=str(LINE16), pairs=50, limit=1, prompt=prompt)  # type: ignore[arg-type]
    shown = task.examples("evaluation")[0]
    other = KVRetrieval(pairs=50, limit=1, prompt=prompt).examples("evaluation")[0]  # type: ignore[arg-type]
    file = tmp_path / "calibration.jsonl"
    file.write_text(
        "".join(
            json.dumps({"input": e.prompt, "output": e.answers[0]}) + "\n"
            for e in (other, shown)
        )
    )
    mixed = KVRetrieval(
        path=str(LINE16), pairs=50, limit=1, prompt=prompt, calibration_path=str(file)
    )  # type: ignore[arg-type]
    with refused(
        f"task.calibration_path: {mixed.calibration_path}, line 2",
        "",
        allowed=("questions", "evaluation"),
        hint="line",
    ):
        mixed.examples("calibration")


def test_plain_and_gzip_files_are_the_same(tmp_path: Path) -> None:
    packed = tmp_path / "official.jsonl.gz"
    packed.write_bytes(gzip.compress(LINE16.read_bytes()))
    plain, zipped = (
        KVRetrieval(path=str(p), pairs=75, limit=1) for p in (LINE16, packed)
    )
    assert plain.examples("evaluation") == zipped.examples("evaluation")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("AB12", 1.0),
        ("the value is ab12.", 1.0),
        ('"aB12"', 1.0),
        ("ab1 2", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_ignores_letter_case(reply: str, score: float) -> None:
    example = Example(id="x", prompt="", answers=("Ab12",))
    assert KVRetrieval().score(example, reply) == {"accuracy": score}


def test_no_word_contains_another() -> None:
    assert len(set(WORDS)) == 64
    text = " ".join(WORDS)
    assert all(text.count(word) == 1 for word in WORDS)


@pytest.mark.parametrize(
    ("pairs", "size"), [(50, 75), (75, 75), (76, 140), (140, 140), (150, 300)]
)
def test_the_official_files_are_fetched_by_size(
    pairs: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = KVRetrieval(path="official", pairs=pairs, positions=(0,), limit=1)
    (source,) = task.files()
    assert source.kind == "url" and source.id.endswith(
        f"/kv_retrieval_data/kv-retrieval-{size}_keys.jsonl.gz"
    )
    file = tmp_path / "kv.jsonl.gz"
    line = (DATA / "kv-retrieval-75_keys.first3.jsonl").read_text().splitlines()[0]
    monkeypatch.setattr("posbench.tasks.base.local", lambda _: file)
    with gzip.open(file, "wt") as stream:
        stream.write(f"{line}\n" * 499)
    with refused("task.path", allowed="500 rows", hint="posbench fetch"):
        task.examples("evaluation")
    with refused(
        "task.pairs",
        301,
        allowed=("300", "path=official"),
        hint=("task.pairs=300", "task.path=null"),
    ):
        KVRetrieval(path="official", pairs=301, positions=(0,))


def test_calibration_positions_are_taken_in_turn_and_none_keeps_the_inner_ones():
    task = KVRetrieval(
        records="words",
        pairs=8,
        positions=(0,),
        calibration_pairs=8,
        calibration_examples=7,
    )
    assert [e.gold_position for e in task.examples("calibration")] == [
        1,
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    given = replace(task, calibration_positions=("0%", 4, "100%"))
    assert [e.gold_position for e in given.examples("calibration")] == [
        0,
        4,
        7,
        0,
        4,
        7,
        0,
    ]
    # A question keeps its pairs wherever its answer goes.
    first, last = (
        replace(task, calibration_positions=(p,)).examples("calibration")[0]
        for p in (0, 7)
    )
    assert (
        first.prompt.split("}")[0] == last.prompt.split("}")[0]
        and first.answers != last.answers
    )
