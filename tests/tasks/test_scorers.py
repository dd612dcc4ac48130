"""Scores against hand-worked numbers, other implementations, and the scores that benchmarks gave real
outputs."""

from __future__ import annotations

import json
import os
import random
from itertools import permutations
from pathlib import Path

import pytest
from rouge import Rouge
from scipy.stats import kendalltau

from posbench.studies.cost import scorers as study
from posbench.tasks import scorers as s
from posbench.tasks.longbench import PROMPTS

DATA = Path(__file__).parents[1] / "data"
REAL = os.environ.get("POSBENCH_DATA", "")


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Cat's, an  a b-c.", "cats bc"),
        ("A theory of another a", "theory of another"),
        ("“Don't”\n the END!", "“dont” end"),
        ("the", ""),
    ],
)
def test_normalisation_step_by_step(text: str, bare: str) -> None:
    assert s.normalize_answer(text) == bare


@pytest.mark.parametrize(
    ("reply", "answers", "yu", "liu"),
    [
        ("It was in 1300.", ["13"], 1, 1),  # a substring, not a word
        ("Paris\nor London", ["London", "paris!"], 1, 1),
        ("London\nParis", ["Paris"], 0, 0),
        ("\n Paris", ["Paris"], 1, 0),  # the script of Liu et al. cuts before it strips
        ("", ["Paris"], 0, 0),
    ],
)
def test_the_two_readings_of_sub_span_match(reply: str, answers: list[str], yu: int, liu: int) -> None:
    assert s.best_subspan_em(reply, answers) == s.best_subspan_em(reply, answers, strip_first=True) == yu
    assert s.best_subspan_em(reply, answers, strip_first=False) == liu


def test_real_answers_score_as_the_released_script_said() -> None:
    rows = [
        json.loads(line)
        for line in (study.SHIPPED / "nq_multidoc_qa/scored_predictions_gpt35_first300.jsonl")
        .read_text()
        .splitlines()
    ]
    official = [row["metric_best_subspan_em"] for row in rows]
    assert official.count(0.0) == 54 and len(official) == 300
    for first in (True, False):
        assert [
            s.best_subspan_em(row["model_answer"], row["answers"], strip_first=first) for row in rows
        ] == official


def test_token_f1_by_hand() -> None:
    assert s.qa_f1("the cat sat", "A cat, ran away") == pytest.approx(0.4)  # 1/2 and 1/3
    assert s.qa_f1("x x y", "x x x") == pytest.approx(2 / 3)  # a bag, not a set
    assert s.qa_f1("", "") == s.qa_f1("the", "the") == s.qa_f1("x", "y") == 0.0


def test_chinese_f1_and_its_punctuation() -> None:
    assert s.qa_f1_zh("北京。", " 北京") == 1.0
    assert s.qa_f1_zh("》北京！", "北京") == 1.0
    assert s.qa_f1_zh("《北京", "北京") == pytest.approx(
        2 / 3
    )  # the benchmark's set lacks this one: a word of its own
    assert s.qa_f1_zh("GPT", "gpt") == 1.0
    assert s.qa_f1_zh("上海", "北京") == s.qa_f1_zh("。", "。") == 0.0


def test_chinese_rouge_counts_words() -> None:
    # 我|爱|北京 against 我|爱|上海: 2 of 3 words on both sides.
    assert s.rouge_l_zh("我爱北京", "我爱上海") == pytest.approx(2 / 3, abs=1e-7)
    assert s.rouge_l("我爱北京", "我爱上海") == 0.0


def test_rouge_l_is_that_of_the_rouge_package() -> None:
    assert s.rouge_l("a b c d", "a c x") == pytest.approx(4 / 7, abs=1e-7)  # 2/4 and 2/3
    assert s.rouge_l("a a a", "a") == pytest.approx(1, abs=1e-7)  # sets of words
    assert s.rouge_triple("a a a", "a")[2] == pytest.approx(0.5)
    assert s.rouge_l("Cat, dog", "cat dog") == pytest.approx(
        0.5, abs=1e-7
    )  # letter case and punctuation stay
    assert s.rouge_triple("Cat, dog", "cat dog")[2] == 1.0
    # Union over sentences of the reply, which one sequence would not find: b and a.
    assert s.rouge_l("b. a", "a b") == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize(("reply", "gold"), [("...", "a"), ("a", "."), ("", "a"), ("a", "")])
def test_rouge_of_dots_alone_is_zero(reply: str, gold: str) -> None:
    assert s.rouge_l(reply, gold) == 0.0


def test_rouge_of_a_very_long_sentence() -> None:
    reply = " ".join(["x", *(f"w{i}" for i in range(1100))])
    with pytest.raises(RecursionError):
        Rouge().get_scores([reply], ["x"])
    assert s.rouge_l(reply, "x") == pytest.approx(2 / 1102, rel=1e-6)


def test_rouge_triple_by_hand() -> None:
    assert s.rouge_triple("a b c", "a b d") == pytest.approx((2 / 3, 1 / 2, 2 / 3))
    assert s.rouge_triple("running", "runs") == (0.0, 0.0, 0.0)  # no stemming
    assert s.rouge_triple("", "a") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("reply", "gold", "classes", "score"),
    [
        ("Type: City", "City", ["City", "Country"], 1),
        ("City or Country", "City", ["City", "Country"], 1 / 2),
        ("Country", "City", ["City", "Country"], 0),
        ("Other entity", "Other entity", ["entity", "Other entity"], 1),  # part of the gold name: dropped
        (
            "Other entity",
            "Other entity",
            ["Other", "entity", "Other entity"],
            1 / 2,
        ),  # the second such one is skipped
        (
            "Other entity",
            "Other entity",
            ["Other", "Other entity", "entity"],
            1,
        ),  # ... and not where it stands apart
    ],
)
def test_classification(reply: str, gold: str, classes: list[str], score: float) -> None:
    assert s.classification(reply, gold, classes) == pytest.approx(score)


def test_numbers_of_paragraphs_and_counts() -> None:
    assert s.retrieval("Paragraph 3, or paragraph 30", "Paragraph 3") == 1 / 2
    assert s.retrieval("the third", "Paragraph 3") == 0.0
    assert s.retrieval_zh("段落3", "段落3") == 1.0
    assert s.count("17 of 17 and 4", "17") == pytest.approx(2 / 3)
    assert s.count("seventeen", "17") == 0.0
    with pytest.raises(ValueError, match="Paragraph"):
        s.retrieval("3", "3")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("x = 1", 1),
        ("\n\nx = 1\nmore", 1),
        ("```python\n# why\n// so\nx = 1", 1),
        ("# why\n\nx = 1", 0),  # the empty line is the first one without a mark
        ("# x = 1", 0),
        ("y = 1", 0.8),  # 2 * 4 / 10
        ("x = 12", 0.91),  # 2 * 5 / 11 = 0.909
        ("    x = 1", 0.71),  # 2 * 5 / 14: the indent counts
    ],
)
def test_code_similarity(reply: str, score: float) -> None:
    assert s.code_similarity(reply, "x = 1") == score


def test_code_similarity_is_twice_the_common_subsequence() -> None:
    def common(a: str, b: str) -> int:
        row = [0] * (len(b) + 1)
        for x in a:
            above = row[:]
            for j, y in enumerate(b, start=1):
                row[j] = above[j - 1] + 1 if x == y else max(above[j], row[j - 1])
        return row[-1]

    rng = random.Random(0)
    for _ in range(50):
        a, b = ("".join(rng.choices("abc (=", k=rng.randint(1, 12))) for _ in range(2))
        assert abs(s.code_similarity(a, b) - 2 * common(a, b) / (len(a) + len(b))) <= 0.005 + 1e-9
    assert s.code_similarity("", "") == 1.0


def test_transliterated_f1() -> None:
    assert s.ascii_f1("Café “Zoë”", "cafe zoe") == 1.0
    assert s.qa_f1("Café “Zoë”", "cafe zoe") == 0.0


@pytest.mark.parametrize(
    ("text", "found"), [("(B) Paris", "B"), ("Best: C.", "C"), ("A cat: B", "A"), ("ABC d", ""), ("", "")]
)
def test_letters_between_word_boundaries(text: str, found: str) -> None:
    assert s.letter(text) == found


def test_exponential_similarity() -> None:
    assert s.exponential_similarity("About 60% (not 10%)", "50%") == pytest.approx(0.5)
    assert s.exponential_similarity("52.5 %", "50%") == pytest.approx(2**-0.25)
    assert s.exponential_similarity("0%", "0%") == 1.0
    assert s.exponential_similarity("half of them", "50%") == 0.0


def test_concordance_is_kendalls_tau_on_another_scale() -> None:
    gold = (2, 4, 1, 3)
    for said in permutations(gold):
        tau = kendalltau([gold.index(i) for i in said], range(4)).statistic
        assert s.concordance_index(f"Order: {', '.join(map(str, said))}.", "2, 4, 1, 3") == pytest.approx(
            (tau + 1) / 2
        )


@pytest.mark.parametrize("reply", ["1, 2", "1, 1, 2", "1, 2, 4", "1, 2, 3, 4", "none", ""])
def test_what_is_no_permutation_scores_zero(reply: str) -> None:
    assert s.concordance_index(reply, "1, 2, 3") == 0.0


@pytest.mark.skipif(not REAL, reason="POSBENCH_DATA names no folder")
def test_every_stored_output_scores_as_officially() -> None:
    table = study.parity(Path(REAL))
    scored = {
        name: sum(row.outputs for row in table if row.benchmark == name) for name, _, _ in study.BENCHMARKS
    }
    assert scored == {
        "longbench": 124,
        "nq_multidoc": 300,
        "leval_closed": 964,
        "loogle_timeline_reorder": 4 * 126,
    }
    for row in table:
        assert row.equal == row.outputs and row.our_mean == pytest.approx(row.official_mean, abs=1e-12), row


def test_every_output_that_ships_scores_as_officially() -> None:
    table = study.parity(study.SHIPPED)
    assert [(row.benchmark, row.outputs, row.equal) for row in table] == [
        ("nq_multidoc", 300, 300),
        *[("loogle_timeline_reorder", 126, 126)] * 4,
    ]


def _folder(root: Path, score: float) -> Path:
    """Outputs of two tasks, two answers, an exam and an order; one official score as given."""
    for name in PROMPTS:
        file = root / "longbench/scored_predictions" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {"_id": "a", "pred": "x\ny", "answers": ["x"], "all_classes": ["x"], "official_score": score}
        file.write_text(json.dumps(row) + "\n" if name in ("trec", "triviaqa") else "")
    (root / "nq_multidoc_qa").mkdir()
    lines = [{"answers": ["x"], "model_answer": said, "metric_best_subspan_em": 0.0} for said in ("\nx", "y")]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "nq_multidoc_qa/scored_predictions_gpt35_first300.jsonl").write_text(text)
    (root / "leval/scored_predictions").mkdir(parents=True)
    row = {"prediction": "A", "gt": "AB", "official_score": 0.25}
    for exam in ("coursera", "quality", "tpo"):
        for name in (f"turbo-16k-0613_{exam}", f"xgen-7b-8k-inst_{exam}_firsthalf"):
            file = root / "leval/scored_predictions" / f"{name}.jsonl"
            file.write_text(json.dumps(row) + "\n" if name.startswith("turbo-16k-0613_c") else "")
    (root / "loogle").mkdir()
    parts = {"location_square": 2 / 3, "location_mean": 2 / 3, "swap": 1.0, "swap_distance": 1.0}
    official = {f"{part}_deviation": value for part, value in parts.items()}
    row = {
        "gold": "I,II,III",
        "llm_output": "II, I, III",
        "standard_format": True,
        "official_function_value": official,
    }
    (root / "loogle/timeline_reorder_gold_and_gpt4.jsonl").write_text(json.dumps(row) + "\n")
    return root


@pytest.mark.parametrize(("score", "status"), [(1.0, 0), (0.5, 1)])
def test_the_study_counts_equal_scores_and_fails_on_any_other(
    score: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path, score)
    with pytest.raises(SystemExit) as left:
        study.main(["--data", str(folder), "--out", str(tmp_path / "scorers.md")])
    out = capsys.readouterr().out
    assert left.value.code == status and (tmp_path / "scorers.md").read_text() == out
    assert f"{9 - 2 * status} of 9 scores" in out
    difference = "0" if status == 0 else "0.5"
    assert f"| longbench | trec | 1 | {1 - status} | {difference} | {score:.6f} | 1.000000 |" in out
    assert "| nq_multidoc | 20 documents | 2 | 2 | 0 | 0.000000 | 0.000000 |" in out


def test_a_study_without_its_files_says_which(tmp_path: Path) -> None:
    (tmp_path / "longbench").mkdir()
    with pytest.raises(SystemExit, match=r"narrativeqa\.jsonl"):
        study.main(["--data", str(tmp_path)])


def test_the_folder_of_outputs_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_DATA", str(_folder(tmp_path, 1.0)))
    with pytest.raises(SystemExit) as left:
        study.main([])
    assert left.value.code == 0
    monkeypatch.setenv("POSBENCH_DATA", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit) as left:
        study.main([])
    assert left.value.code == 2
