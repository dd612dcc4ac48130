"""The numbers of a run as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posbench.late import pd
from posbench.report.tables import (
    Table,
    bias_table,
    findings_table,
    limits,
    number,
    pct,
    points,
)
from posbench.run.progress import duration
from posbench.stats.findings import VERDICTS
from posbench.stats.frames import (
    SERVED,
    UNMODIFIED,
    at_positions,
    metric_name,
    overall,
    shown,
)

FEW = 4  # claims of one verdict, or names, that a sentence lists
SOURCE = r" \([^()]*\d[^()]*\)$"
"""The source at the end of a claim, as ``(Yu et al. 2025, Figure 3)``."""


def spent(status: Mapping[str, Any]) -> dict[str, str]:
    """What a run took, from its ``status.json``: time by stage, tokens a second of the loops over prompts,
    the most memory of its process. Drawing the page is left out: that is done later again."""
    known = status.get("spent", {})
    stages = {
        name: known[name]
        for name in ("search", "study", "intervene", "evaluate")
        if name in known
    }
    looped = {
        stage: facts for stage, facts in stages.items() if facts.get("loop_seconds")
    }
    tokens = {
        stage: facts["prompt_tokens"] + facts["reply_tokens"]
        for stage, facts in looped.items()
    }
    rates = [
        f"{stage} {n / looped[stage]['loop_seconds']:,.0f}"
        for stage, n in tokens.items()
        if n
    ]
    peaks = {
        name: max((f.get(name, 0) for f in stages.values()), default=0)
        for name in ("resident", "cuda")
    }
    told = {
        "time": ", ".join(
            f"{stage} {duration(facts['seconds'])}" for stage, facts in stages.items()
        ),
        "tokens/s": f"{', '.join(rates)} (prompts and replies)" if rates else "",
        "peak memory": ", ".join(
            f"{peak / 1e9:.2f} GB {name}" for name, peak in peaks.items() if peak
        ),
    }
    return {name: words for name, words in told.items() if words}


def title(
    what: Iterable[str],
    models: Iterable[str],
    tasks: Iterable[str],
    swept: Iterable[str] = (),
) -> str:
    """What a page is about: studies or methods on models, tasks, and what was swept; many as their number."""
    text = ""
    parts = {"": (what, "methods"), " on ": (models, "models"), ", ": (tasks, "tasks")}
    for front, (names, kind) in (parts | {", by ": (swept, "keys")}).items():
        each = list(dict.fromkeys(filter(None, names)))
        text += front * bool(each) + (
            ", ".join(each) if len(each) <= FEW else f"{len(each)} {kind}"
        )
    return text


def subject(config: Mapping[str, Any]) -> str:
    """The :func:`title` of a run by its config: the study, the search alone, or the method on its model."""

    def name(key: str) -> str:
        part = config.get(key)
        return str(part.get("name", "")) if isinstance(part, Mapping) else ""

    method = name("method")
    stages = config.get("stages") or ()
    model = config.get("model")
    method = SERVED if isinstance(model, Mapping) and model.get("base_url") else method
    what = shown(method) if method else "run"
    if name("study"):
        what = f"study {name('study')}" + f" with {method}" * (
            method not in ("", UNMODIFIED)
        )
    elif "search" in stages and "evaluate" not in stages:
        what = f"search {name('search')} for {method}"
    return title([what], [name("model")], [name("task")])


def headline(metrics: pd.DataFrame | None) -> str:
    """The result in plain words, from metrics.csv rows of a run, or None when nothing was scored. A method
    raises or lowers the average only if the 95 % interval of the difference excludes zero."""
    if metrics is None or overall(metrics).empty:
        return "Nothing was scored in this run."
    average: Any = overall(metrics).drop_duplicates("method").set_index("method")
    verb = "answers" if metric_name(metrics) == "accuracy" else "scores"
    limited = limits(metrics)
    front = [_limited(note, limited) for note in dict.fromkeys(limited.values())]
    said = list[str]()
    base = SERVED if SERVED in average.index else UNMODIFIED
    if base in average.index and (len(average) == 1 or base not in limited):
        said += [_alone(metrics, average, base, verb, base not in limited)]
    said += [
        _verdict(metrics, average, str(name), verb)
        for name in average.index
        if name != base
    ]
    header, bias = bias_table(metrics)
    if bias:
        cells = zip(header[1:], bias[0][1:], strict=True)
        listed = [f"{name} {cell}" for name, cell in cells if "[" in cell]
        said += [f"position bias in points: {', '.join(listed)}"] if listed else []
    return " ".join(f"{sentence}." for sentence in (*front, "; ".join(said)))


def _limited(note: str, limited: Mapping[str, str]) -> str:
    """Of which methods no position bias can be measured, and why."""
    who = " and ".join(shown(method) for method, own in limited.items() if own == note)
    head, _, why = note.partition(": ")
    told = f" ({why})" if why else ""  # older versions do not say
    return f"{head.capitalize()}: position bias of {who} cannot be measured{told}"


def _alone(rows: pd.DataFrame, average: Any, name: str, verb: str, curved: bool) -> str:
    """How the unmodified or served model does: at the ends and inside, and on average where it is alone."""
    base = at_positions(rows)
    base = base[base["method"] == name].sort_values("depth")
    mean = f"{pct(average.at[name, 'value'])} on average (n = {average.at[name, 'n']})"
    if curved and len(base) > 2:
        ends = (base["value"].iloc[0] + base["value"].iloc[-1]) / 2
        worst = base["value"].iloc[1:-1].min()
        curve = f"{pct(ends)} at the ends and {pct(worst)} at its worst inner position"
        mean = f"{curve}, {mean}" if len(average) == 1 else curve
    return f"The {shown(name)} model {verb} {mean}"


def _verdict(rows: pd.DataFrame, average: Any, method: str, verb: str) -> str:
    """What a method does to the average, as far as the interval of the difference allows to say."""
    after = pct(average.at[method, "value"])
    n = average.at[method, "n"]
    difference = overall(rows, "difference")
    difference = difference[difference["method"] == method].dropna(subset="ci_low")
    if UNMODIFIED not in average.index or difference.empty:
        return f"{method} {verb} {after} on average (n = {n}; no paired comparison was recorded)"
    change = difference.iloc[0]
    before = pct(average.at[UNMODIFIED, "value"])
    low = 100 * change["ci_low"]
    high = 100 * change["ci_high"]
    facts = f"{points(change['value'])} points, 95 % interval {low:.1f} to {high:.1f}, n = {change['n']}"
    if low > 0 or high < 0:
        return f"{method} {'raises' if low > 0 else 'lowers'} the average from {before} to {after} ({facts})"
    same = f"{method} cannot be told from the unmodified model on average"
    return f"{same}: {before} before, {after} after ({facts})"


def shortened(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many prompts lost tokens, from rows with ``id`` and ``dropped``; empty where none did."""
    dropped = {row["id"]: row.get("dropped", 0) for row in rows}
    cut = [tokens for tokens in dropped.values() if tokens]
    if not cut:
        return ""
    mean = f"mean {np.mean(cut):.0f} tokens removed"
    return f"{len(cut)} of {len(dropped)} prompts were shortened to the context window ({mean})."


def served(rows: Iterable[Mapping[str, Any]]) -> str:
    """What a server did with the prompts, from rows that tell so; empty for a model in process."""
    rows = list(rows)
    notes, ways, servers = (
        Counter(r[k] for r in rows if r.get(k)) for k in ("note", "by", "server")
    )
    named = " and ".join(map(str, servers))
    said = (
        [f"The replies are those of a server, of its model {named}."] if named else []
    )
    empty = sum(
        "finish" in row and not row["output"] and "note" not in row for row in rows
    )
    said += [f"{empty} of {len(rows)} replies are empty."] if empty else []
    kinds = {
        name: ", ".join(f"{n} {at}" for at, n in of.items())
        for name, of in (("note", notes), ("by", ways))
    }
    if notes:
        count = f"{notes.total()} of {len(rows)} prompts"
        said.append(
            f"{count} have no score, the model did not read them: {kinds['note']}."
        )
    said += [f"Choices were read by: {kinds['by']}."] if ways else []
    pairs = [
        (row.get("prompt_tokens"), row.get("tokens")) for row in rows if "by" not in row
    ]
    if other := [read - own for read, own in pairs if read and own and read != own]:
        count = f"{len(other)} prompts, by {np.mean(other):+.1f} on average"
        said.append(
            f"The server counted other tokens than the tokenizer here in {count}."
        )
    return " ".join(said)


def applied(method: Mapping[str, Any]) -> str:
    """The method as it ran, from ``method.json``: its name, its parameters, and the source of constants."""
    own = {k: v for k, v in method.items() if k not in ("name", "source")}
    values = []
    for name, part in method.get("parts", {"": own}).items():
        text = ", ".join(f"{k} {v}" for k, v in part.items() if v is not None)
        values.append(f"{name} ({text})" if name else text)
    constants = f"; constants: {method['source']}" if "source" in method else ""
    return f"{method['name']}: {'; '.join(values)}{constants}"


def verdicts(findings: pd.DataFrame) -> str:
    """How a study's claims fared, the paper's and our controls apart."""
    said = []
    for kind, words in {
        "paper": "Claims of the paper",
        "control": "Our controls",
    }.items():
        own = findings[findings["kind"] == kind]
        corrected = (
            " (Holm-corrected within the study)"
            if own["p_holm"].notna().sum() > 1
            else ""
        )
        if len(own):
            said.append(f"{words}: {tally(own['verdict'])}{corrected}.")
    return " ".join(said)


def decided(findings: pd.DataFrame) -> str:
    """The paper's claims that are decided, each with the models it is said of, and how many are not; our
    controls where there are no others."""
    said = _named(findings, FEW)
    undecided = tally(_own(findings)["verdict"], VERDICTS[2:])
    said += [f"{'Beside these: ' if said else ''}{undecided}."] if undecided else []
    return " ".join(said)


def answer(findings: pd.DataFrame) -> str:
    """What a study found: how its claims fared, and the first that are decided, with their numbers; the first
    that is not where none is."""
    found = _named(findings, 2, numbers=True) or _named(
        findings, 1, ("inconclusive",), numbers=True
    )
    return " ".join([verdicts(findings), *found])


def _own(findings: pd.DataFrame) -> pd.DataFrame:
    """The paper's claims, or our controls where there are no others."""
    own = findings[findings["kind"] == "paper"]
    return (own if len(own) else findings).fillna({"model": ""})


def _named(
    findings: pd.DataFrame,
    few: int,
    among: Sequence[str] = VERDICTS[:2],
    numbers: bool = False,
) -> list[str]:
    """The first claims of each verdict with their models; of one model, if asked for, with their number."""
    own = _own(findings)
    every = findings["model"].nunique()
    said = []
    for verdict in among:
        claims: dict[str, list[Any]] = {}
        for row in own[own["verdict"] == verdict].itertuples():
            claims.setdefault(re.sub(SOURCE, "", row.claim), []).append(row)
        # Those of the most models come first.
        ranked = sorted(
            claims.items(), key=lambda pair: -len({row.model for row in pair[1]})
        )
        listed = []
        for claim, rows in ranked[:few]:
            told = numbers and every < 2 and len(rows) == 1
            one = f" ({rows[0].statistic}: {number(rows[0])})" if told else ""
            listed.append(
                f"{claim}{_on(list(dict.fromkeys(row.model for row in rows)), every)}{one}"
            )
        listed += [f"{len(claims) - few} more"] * (len(claims) > few)
        said += [f"{verdict.capitalize()}: {'; '.join(listed)}."] if listed else []
    return said


def _on(models: Sequence[str], every: int) -> str:
    """`` (tiny, tiny_b)``: the models, where not all of several are meant."""
    if not any(models) or every == 1:
        return ""
    whole = "both" if every == 2 else f"all {every}"
    return f" ({whole} models)" if len(models) == every else f" ({', '.join(models)})"


def tally(verdicts: pd.Series, words: Sequence[str] = VERDICTS) -> str:
    """`3 hold, 1 inconclusive`: how often each verdict occurs, in the order of the words."""
    counts = verdicts.value_counts()
    plural = {"holds": "hold", "agrees": "agree", "differs": "differ"}
    there = [(counts[name], name) for name in words if name in counts]
    return ", ".join(
        f"{n} {plural.get(name, name) if n > 1 else name}" for n, name in there
    )


def verdict_table(findings: pd.DataFrame) -> Table:
    """Claims of many runs: a row for each claim, the papers' first, and verdict, with the models of it."""
    ordered = findings.sort_values(
        "kind", key=lambda kind: kind != "paper", kind="stable"
    )
    rows = []
    for _, each in ordered.groupby("claim", sort=False):
        for verdict, part in each.groupby("verdict", sort=False):
            claim = findings_table(part)[1][0][1]
            models = "; ".join(dict.fromkeys(part["model"]))
            rows.append([str(verdict), claim, models])
    return ["verdict", "claim", "models"], rows
