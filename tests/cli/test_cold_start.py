"""What is answered without a model is answered without the libraries that take seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

OWN = Path(__file__).parents[1] / "data" / "own" / "items.jsonl"
HEAVY = {
    "torch",
    "transformers",
    "pandas",
    "matplotlib",
    "datasets",
    "scipy.stats",
    "lm_eval",
}
CALLS = (
    (["--help"], 0),
    (["ls"], 0),
    (["ls", "tasks"], 0),
    (["ls", "runs"], 0),
    (["validate", "study=causal_mask"], 0),
    (
        [
            "validate",
            "model=mistral7b",
            "model.path=nobody/nothing",
            "method=moice",
            "search=router",
        ],
        2,
    ),
    (["validate", "study=chain", "study.examples=0"], 2),
    (["check-data", str(OWN)], 0),
    (["task=nope"], 2),
    (["method.nope=1"], 2),
    (["runtime.resamples=1"], 2),
)
PROGRAM = """
import json, sys
from posbench.cli.main import main
found = {}
for call in json.load(sys.stdin):
    found[" ".join(call)] = [main(call), sorted(set(sys.modules))]
print("\\n" + json.dumps(found))
"""


def test_listings_checks_and_refusals_load_no_heavy_library(tmp_path: Path) -> None:
    calls = json.dumps([call for call, _ in CALLS])
    # Elsewhere: tables of runs that no list has shown yet are read with pandas.
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=calls,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    for call, status in CALLS:
        told, modules = found[" ".join(call)]
        assert told == status, call
        assert not HEAVY & set(modules), call
    _, modules = found["ls runs"]
    assert not {"hydra", "omegaconf"} & set(modules), "listings compose no config"
