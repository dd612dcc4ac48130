"""tools/same_results.py: recordings of the same results are equal, whatever else differs; a changed one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.same_results import Comparison, compare

RUN = "job/outputs/kv_retrieval/v001/tiny__none__"
ROW = {"method": "none", "id": "0-0", "output": "mep", "scores": {"accuracy": 1.0}}
CONFIG = """task:
  _target_: posbench.studies.wu2025.masks.Masks
  factor: {factor}
runtime:
  outputs: {outputs}
"""
Recording = Callable[..., Path]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """Writes a recording of one job with two runs that differ in a factor; values of the second can be set."""

    def write(
        name: str,
        *,
        rows: int = 3,
        output: str = "mep",
        accuracy: float = 1.0,
        attention: str = "0.5",
        verdict: str = "holds",
        said: str = "accuracy 83.3",
        config: str = CONFIG,
        hashes: tuple[str, str] = ("aaaaaaaa", "bbbbbbbb"),
        seconds: float = 1.0,
    ) -> Path:
        root = tmp_path / name
        for run_hash, factor in zip(hashes, ("0.5", "-1.0"), strict=True):
            folder = root / f"{RUN}{run_hash}"
            folder.mkdir(parents=True)
            settings = config.format(factor=factor, outputs=root)
            (folder / "config.yaml").write_text(settings)
            row = ROW | {"run": run_hash, "prompt": factor}
            (folder / "predictions.jsonl").write_text(json.dumps(row) + "\n")
            (folder / "report.html").write_text(name)
        row |= {"output": output, "scores": {"accuracy": accuracy}}
        line = json.dumps(row) + "\n"
        (folder / "predictions.jsonl").write_text(line * rows)
        table = f"layer,attention,seconds\n0,{attention},{seconds}\n1,-2.0,{seconds}\n"
        (folder / "attention.csv").write_text(table)
        (folder / "findings.csv").write_text(f"claim,verdict\nit rises,{verdict}\n")
        text = f"{said}\n3/3, {seconds} s elapsed\nrun: {folder}\nin {root / 'job'}\n"
        (root / "job" / "output.txt").write_text(text)
        facts = {"status": [0], "roots": {str(root / "job"): "JOB"}}
        (root / "job" / "job.json").write_text(json.dumps(facts))
        return root

    return write


def test_what_differs_between_any_two_recordings_is_no_difference(
    recording: Recording,
) -> None:
    """Times, places, hashes, modules and further settings; runs whose hashes are in the other order are matched."""
    moved = CONFIG.replace("posbench.studies.wu2025", "wu2025")
    before = recording("before")
    after = recording(
        "after",
        config=moved + "  engine: local\n",
        hashes=("dddddddd", "cccccccc"),
        seconds=2.5,
    )
    assert compare(before, after) == Comparison()


@pytest.mark.parametrize(
    ("changed", "file", "named"),
    [
        ({"accuracy": 0.5}, "predictions.jsonl", "accuracy: '1.0', then '0.5'"),
        ({"accuracy": 1.000001}, "predictions.jsonl", "1.000001"),
        ({"output": "nap"}, "predictions.jsonl", "output: 'mep', then 'nap'"),
        ({"rows": 2}, "predictions.jsonl", "3 rows, then 2"),
        ({"attention": "0.501"}, "attention.csv", "attention: '0.5', then '0.501'"),
        ({"attention": "0"}, "attention.csv", "'0.5', then '0'"),
        ({"verdict": "contradicted"}, "findings.csv", "'holds', then 'contradicted'"),
        ({"said": "accuracy 83.5"}, "output.txt", "83.3"),
        ({"said": "precision 83.3"}, "output.txt", "precision"),
        ({"config": CONFIG.replace("factor:", "part:")}, "config.yaml", "factor: -1.0"),
    ],
)
def test_a_changed_result_is_named(
    recording: Recording, changed: dict[str, object], file: str, named: str
) -> None:
    found = compare(recording("before"), recording("after", **changed))
    assert found.differences and not found.moved
    for line in found.differences:
        assert line.startswith("job: ") and "\n" not in line
        assert file in line
    assert named in found.differences[0]


def test_a_file_or_job_of_one_recording_alone_is_named(recording: Recording) -> None:
    before = recording("before")
    after = recording("after")
    next(after.glob(f"{RUN}b*/findings.csv")).unlink()
    (after / "other").mkdir()
    found = compare(before, after)
    assert [line.split(": ")[0] for line in found.differences] == ["job", "other"]
    assert found.differences[0].endswith("findings.csv: only before")
    assert str(before) in found.differences[1]


def test_a_number_that_rounding_moved_is_told_apart(recording: Recording) -> None:
    """The bound is a share of the column's largest number, which is 2 here."""
    after = recording("after", attention="0.50003", said="accuracy 83.4")
    found = compare(recording("before"), after)
    assert not found.differences
    text, table = sorted(found.moved)
    assert "attention.csv: attention: 1 moved, by up to 1.5e-05" in table
    assert "output.txt" in text
