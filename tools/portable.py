"""The suite on machines and libraries other than these, as nox sessions: ``make test-portable``.

Instruction sets are emulated: torch, MKL and oneDNN use no more of the processor than they are told to.
Other versions of Python are those that this machine has; a missing one is left out and named. Every session
leaves in build/portable what it was (``.json``), its results (``.xml``) and every comparison up to rounding
with its bound (``.jsonl``); the session ``table`` makes the tables of CONTRIBUTING.md of them.

    make test-portable ARGS='--list'                  # the sessions
    make test-portable ARGS='-s avx2-1 python3.13'    # some of them
    make test-portable ARGS='-s oldest -- -x'         # with arguments for pytest, and without the figures
    make test-portable ARGS='-s table'                # the tables again
"""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "portable"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

INSTRUCTION_SETS = {
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
}
THREADS = (1, 2, 4)
ENVIRONMENTS = {
    "python3.12": ("3.12", "constraints.txt"),
    "python3.13": ("3.13", "constraints.txt"),
    "python3.14": ("3.14", "constraints.txt"),
    # The tested torch has no build for it.
    "python3.15": ("3.15", None),
    "newest": ("3.11", None),
    "oldest": ("3.11", "constraints-oldest.txt"),
}
"""Version of Python, and the file that chooses the versions of all packages; None: the newest."""
FACTS = """
import json, platform
from posbench.files.hardware import describe_hardware
from posbench.versions import installed_versions
facts = {"hardware": describe_hardware(), "packages": installed_versions()}
print(json.dumps({**facts, "python": platform.python_version()}))
"""

nox.options.envdir = str(ROOT / ".nox")
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"


def test(session: nox.Session, name: str, python: str, env: dict[str, str]) -> None:
    """Run the suite, and where it is asked for all figures, and leave what came of them."""
    session.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    record = OUT / f"{name}.jsonl"
    record.unlink(missing_ok=True)
    env = {"OMP_NUM_THREADS": "1", **env, "POSBENCH_ROUNDING": str(record)}
    said = session.run(python, "-c", FACTS, env=env, silent=True, external=True)
    facts = json.loads(str(said).strip().splitlines()[-1])
    began = time.monotonic()
    results = f"--junitxml={OUT / name}.xml"
    try:
        session.run(
            python,
            "-m",
            "pytest",
            "-n",
            "2",
            results,
            *session.posargs,
            env=env,
            external=True,
        )
        if name in ENVIRONMENTS and not session.posargs:
            facts["figures"] = make_figures(session, name, python, env)
    finally:
        facts["minutes"] = round((time.monotonic() - began) / 60, 1)
        (OUT / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")


def make_figures(
    session: nox.Session, name: str, python: str, env: dict[str, str]
) -> str:
    """Make every table and figure that needs no weights; returns how many experiments were done.

    One that fails fails the session.
    """
    outputs = OUT / f"{name}-figures"
    run = [
        "from posbench.cli.main import run; run()",
        "figures",
        f"runtime.outputs={outputs}",
    ]
    session.run(python, "-c", *run, env=env, silent=True, external=True)
    logs = list((outputs / "figures").glob("*.log"))
    return f"{len(logs)} experiments done"


def instruction_session(instructions: str, threads: int) -> None:
    """Define a session of the tested versions."""

    @nox.session(name=f"{instructions}-{threads}", python=False)
    def emulated(session: nox.Session) -> None:
        """The tested versions with another instruction set and number of threads."""
        # MKL takes no more threads than there are cores, unless it is told to.
        count = {"OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE"}
        env = {**INSTRUCTION_SETS[instructions], **count}
        test(session, f"{instructions}-{threads}", sys.executable, env)


def environment_session(name: str, version: str, constraints: str | None) -> None:
    """Define a session with an environment of its own."""

    @nox.session(name=name, python=version)
    def environment(session: nox.Session) -> None:
        """Another Python, or other versions of the packages."""
        session.chdir(ROOT)
        chosen = ["--constraint", constraints] if constraints else ["--upgrade"]
        session.install("pip", *chosen, "--editable", ".[dev]")
        test(session, name, "python", {})


for instruction_set in INSTRUCTION_SETS:
    for count in THREADS:
        instruction_session(instruction_set, count)
for session_name, (python_version, file) in ENVIRONMENTS.items():
    environment_session(session_name, python_version, file)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """The tables of CONTRIBUTING.md, from what the other sessions left."""
    order = [f"{isa}-{threads}" for isa in INSTRUCTION_SETS for threads in THREADS] + [
        *ENVIRONMENTS
    ]
    names = [name for name in order if (OUT / f"{name}.json").is_file()]
    text = "\n".join([*settings_table(names), "", *rounding_table(names)])
    front, rest = CONTRIBUTING.read_text().split("<!-- portable -->\n")
    _, back = rest.split("<!-- /portable -->\n")
    CONTRIBUTING.write_text(
        f"{front}<!-- portable -->\n{text}\n<!-- /portable -->\n{back}"
    )
    print(text)


def settings_table(names: list[str]) -> list[str]:
    """What each session ran on, and how it ended."""
    titles = [
        "session",
        "processor, instructions, threads",
        "Python",
        "torch, transformers, pandas",
    ]
    lines = markdown_head([*titles, "tests", "figures", "minutes"])
    for name in names:
        facts = json.loads((OUT / f"{name}.json").read_text())
        versions = ", ".join(
            facts["packages"][package]
            for package in ("torch", "transformers", "pandas")
        )
        figures = facts.get("figures", "")
        cells = [
            name,
            facts["hardware"],
            facts["python"],
            versions,
            suite(name),
            figures,
        ]
        lines.append(f"| {' | '.join(cells)} | {facts['minutes']} |")
    return lines


def suite(name: str) -> str:
    """Passed, failed and skipped tests of a session."""
    (found,) = ElementTree.parse(OUT / f"{name}.xml").getroot().iter("testsuite")
    count = {
        key: int(found.attrib[key])
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    return f"{passed} passed, {failed} failed, {count['skipped']} skipped"


def rounding_table(names: list[str]) -> list[str]:
    """The comparisons up to rounding by kind: the closest one, and how many a tenth of the bound refuses.

    Those with a planted error stand in a sentence of their own.
    """
    kinds = defaultdict[str, list[dict[str, object]]](list)
    planted = defaultdict[tuple[str, str], float](float)
    for name in names:
        record = OUT / f"{name}.jsonl"
        lines_of_session = record.read_text().splitlines() if record.is_file() else ()
        for line in lines_of_session:
            comparison = json.loads(line)
            if "planted_error" in comparison["test"]:
                # Such a test first compares without the error, which is far smaller.
                key = (name, comparison["test"])
                planted[key] = max(planted[key], share(comparison))
            else:
                kinds[comparison["kind"]].append({**comparison, "session": name})
    titles = [
        "what is compared",
        "comparisons",
        "closest to its bound",
        "the bound",
        "share",
        "in session",
    ]
    lines = markdown_head([*titles, "beyond a tenth of the bound"])
    for kind, comparisons in sorted(kinds.items()):
        worst = max(comparisons, key=share)
        beyond = sum(share(comparison) > 0.1 for comparison in comparisons)
        numbers = (
            f"{worst['difference']:.2g} | {worst['bound']:.2g} | {share(worst):.0%}"
        )
        lines.append(
            f"| {kind} | {len(comparisons)} | {numbers} | {worst['session']} | {beyond} |"
        )
    # One is already refused by a decision, which is compared exactly.
    ratios = [ratio for ratio in planted.values() if ratio > 0]
    refused = sum(ratio > 1 for ratio in ratios)
    sentence = (
        f"Planted errors: {refused} of {len(ratios)} refused; the smallest is "
        f"{min(ratios):.1f} times its bound."
    )
    return [*lines, "", sentence]


def markdown_head(titles: list[str]) -> list[str]:
    """The first two lines of a Markdown table."""
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def share(comparison: dict[str, object]) -> float:
    """What a difference takes of its bound."""
    return float(str(comparison["difference"])) / float(str(comparison["bound"]))
