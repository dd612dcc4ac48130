"""The numbers of a run as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench.late import pd
from posbench.model.load import is_in_process
from posbench.report.folder import name_in_config, read_json
from posbench.report.tables import (
    Table,
    bias_table,
    finding_value,
    findings_table,
    first_line_notes,
    has_missing_note,
    missing_notes,
    papers_first,
    pct,
    points,
    unmeasurable_bias,
)
from posbench.run.budget import money
from posbench.run.folder import (
    EVALUATE_STAGE,
    PREDICTIONS,
    PROVENANCE,
    open_run_dir,
)
from posbench.run.method import TYPED, typed_in_place
from posbench.run.progress import duration
from posbench.stats.findings import FINDING_VERDICTS
from posbench.stats.frames import (
    SERVED,
    UNMODIFIED,
    display_name,
    metric_name,
    rows_at_positions,
    rows_over_all_positions,
)
from posbench.stats.outcomes import describe_kinds, kind_of_row
from posbench.stats.policies import MARGIN, within_margin
from posbench.stats.shape import SHAPES, shape_in_metrics
from posbench.stats.verdict import BIAS, Verdict, run_verdict

MAX_LISTED = 4
"""Claims of one verdict, or names, that a sentence lists."""
CITATION = r" \([^()]*\d[^()]*\)$"
"""The source at the end of a claim, as ``(Yu et al. 2025, Figure 3)``."""
TIMED_STAGES = ("search", "study", "intervene", "evaluate")
"""Stages whose cost is reported; the report itself can be drawn again later."""


def describe_costs(status: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run cost, from its ``status.json``, by name: time, tokens/s, cost (US dollars), peak memory.

    Only measured costs have a key.
    """
    costs = status.get("spent", {})
    stages = {name: costs[name] for name in TIMED_STAGES if name in costs}
    times = [f"{name} {duration(cost['seconds'])}" for name, cost in stages.items()]
    rates = []
    for name, cost in stages.items():
        if not cost.get("loop_seconds"):
            continue
        tokens = cost["prompt_tokens"] + cost["reply_tokens"]
        if tokens:
            rates.append(f"{name} {tokens / cost['loop_seconds']:,.0f}")
    peaks = []
    for memory in ("resident", "cuda"):
        peak_bytes = max((cost.get(memory, 0) for cost in stages.values()), default=0)
        if peak_bytes:
            peaks.append(f"{peak_bytes / 1e9:.2f} GB {memory}")
    texts = {}
    if times:
        texts["time"] = ", ".join(times)
    if rates:
        texts["tokens/s"] = f"{', '.join(rates)} (prompts and replies)"
    money_spent = [cost["usd"] for cost in stages.values() if "usd" in cost]
    if money_spent:
        texts["cost"] = money(sum(money_spent))
    if peaks:
        texts["peak memory"] = ", ".join(peaks)
    return texts


def describe_stop(status: Mapping[str, Any]) -> str:
    """Say how many questions a run asked before it stopped early, and why; empty if it did not.

    Args:
        status: Content of ``status.json``.
    """
    for record in status.get("stages", {}).values():
        if not record.get("stopped"):
            continue
        asked, planned = record["stopped"]
        if record.get("decided"):
            return f"stopped when the shape was decided: {asked} of at most {planned} questions"
        return f"stopped at the budget: {asked} of {planned} questions"
    return ""


def title(
    subjects: Iterable[str],
    models: Iterable[str],
    tasks: Iterable[str],
    swept_keys: Iterable[str] = (),
) -> str:
    """The subject of a page, as `scale_channel on tiny, kv_retrieval, by method.factor`.

    Args:
        subjects: Methods or studies; like the other names, empty ones and repetitions
            are left out, and many names are given as their number.
        models: Names of models.
        tasks: Names of tasks.
        swept_keys: Keys that a sweep varies.
    """
    return (
        _list_names("", subjects, "methods")
        + _list_names(" on ", models, "models")
        + _list_names(", ", tasks, "tasks")
        + _list_names(", by ", swept_keys, "keys")
    )


def _list_names(prefix: str, names: Iterable[str], kind: str) -> str:
    names = list(dict.fromkeys(filter(None, names)))
    if not names:
        return ""
    if len(names) > MAX_LISTED:
        return f"{prefix}{len(names)} {kind}"
    return prefix + ", ".join(names)


def run_title(config: Mapping[str, Any]) -> str:
    """Return the title of a run from its config: its study, its search alone, or its method, with model and task."""
    method = name_in_config(config, "method")
    study = name_in_config(config, "study")
    model = config.get("model")
    stages = config.get("stages") or ()
    if not is_in_process(model) and method == UNMODIFIED:
        method = SERVED
    if study:
        text = f"study {study}"
        if method not in ("", UNMODIFIED, SERVED):
            text += f" with {method}"
    elif "search" in stages and "evaluate" not in stages:
        text = f"search {name_in_config(config, 'search')} for {method}"
    else:
        text = display_name(method) if method else "run"
    return title(
        [text], [name_in_config(config, "model")], [name_in_config(config, "task")]
    )


def headline(
    metrics: pd.DataFrame | None,
    delivery: Mapping[str, Any] | None = None,
    verdict: Verdict | None = None,
) -> str:
    """The result of a run in sentences.

    A method raises or lowers the average only if the 95 % interval of the paired
    difference excludes zero.

    Args:
        metrics: Rows of metrics.csv; None when nothing was scored.
        delivery: ``delivery`` of the provenance, where a server was asked.
        verdict: The verdict on them, where the caller has it.
    """
    if metrics is None or rows_over_all_positions(metrics).empty:
        return "Nothing was scored in this run."
    averages: Any = (
        rows_over_all_positions(metrics).drop_duplicates("method").set_index("method")
    )
    verdict = verdict or run_verdict(metrics)
    verb = "answers" if metric_name(metrics) == "accuracy" else "scores"
    reasons = unmeasurable_bias(metrics)
    warnings = [
        _bias_warning(note, reasons) for note in dict.fromkeys(reasons.values())
    ]
    # Where answers are missing, a score says nothing about the model.
    lacking = list(missing_notes(metrics))
    averages = averages.drop(index=lacking)
    metrics = metrics[~metrics["method"].isin(lacking) & ~has_missing_note(metrics)]
    results = list[str]()
    # The model that methods are compared with.
    base = SERVED if SERVED in averages.index else UNMODIFIED
    if base in averages.index and (len(averages) == 1 or base not in reasons):
        results.append(_base_result(metrics, averages, base, verb, base not in reasons))
    for method in averages.index:
        if method != base:
            results.append(_method_result(metrics, averages, str(method), verb))
    header, rows = bias_table(metrics)
    if rows:
        # The first statistic of the table is the position bias.
        shapes = {display_name(m): shape_in_metrics(metrics, m) for m in averages.index}
        biases = []
        for name, text in zip(header[1:], rows[0][1:], strict=True):
            if "[" not in text:
                continue
            shape = shapes.get(name)
            biases.append(f"{name} {text} ({shape})" if shape else f"{name} {text}")
        if biases:
            results.append(f"position bias in points: {', '.join(biases)}")
    summary = "; ".join(results)
    # The name of a method keeps its spelling.
    if summary.split(" ")[0] not in averages.index:
        summary = summary[:1].upper() + summary[1:]
    sentences = [*warnings, summary]
    texts = [f"{sentence}." for sentence in sentences if sentence]
    if rows_at_positions(metrics)["gold_position"].nunique() == 2:
        texts.append(
            "A position bias takes three gold positions or more, of three items or more."
        )
    if verdict:
        text = f"Verdict: {verdict.name}"
        # A server that shortens prompts gives any model a bias.
        if verdict.name == BIAS and delivery and delivery.get("unchecked"):
            text += ", of this server if not of its model"
        texts.append(f"{text}.")
    texts += [
        f"{display_name(name).capitalize()}: {note}."
        for name, note in first_line_notes(metrics).items()
    ]
    return " ".join(texts)


def _bias_warning(note: str, reasons: Mapping[str, str]) -> str:
    """Return a sentence on methods whose position bias cannot be measured for the same reason.

    Args:
        note: The reason, as `problem: why`; older versions left out the why.
        reasons: The reason of each such method.
    """
    methods = " and ".join(
        display_name(name) for name in reasons if reasons[name] == note
    )
    problem, _, why = note.partition(": ")
    text = f"{problem.capitalize()}: position bias of {methods} cannot be measured"
    return f"{text} ({why})" if why else text


def _base_result(
    metrics: pd.DataFrame, averages: Any, name: str, verb: str, has_curve: bool
) -> str:
    """Return a sentence on how the unmodified or served model does at the ends and inside, and which shape that is.

    Args:
        metrics: Rows of metrics.csv.
        averages: Scores over all positions, indexed by method.
        name: The model's name in the column ``method``.
        verb: `answers` or `scores`.
        has_curve: Whether scores by position are informative; else, and where it ran
            alone, the average is reported.
    """
    rows = rows_at_positions(metrics)
    curve = rows[rows["method"] == name].sort_values("depth")["value"]
    average = pct(averages.at[name, "value"])
    result = f"{average} on average (n = {averages.at[name, 'n']})"
    if has_curve and len(curve) > 2:
        curve_text = (
            f"{pct(curve.iloc[0])} at the first gold position, a mean of {pct(curve.iloc[1:-1].mean())} at inner "
            f"ones and {pct(curve.iloc[-1])} at the last"
        )
        shape = shape_in_metrics(metrics, name)
        if shape:
            curve_text += f" ({shape}: {SHAPES[shape]})"
        result = f"{curve_text}; {result}" if len(averages) == 1 else curve_text
    return f"The {display_name(name)} model {verb} {result}"


def _method_result(metrics: pd.DataFrame, averages: Any, method: str, verb: str) -> str:
    """Say whether a method raises or lowers the average score, or that its interval does not exclude zero.

    Args:
        metrics: Rows of metrics.csv.
        averages: Averages over all gold positions, indexed by method.
        method: The method.
        verb: Verb of the sentence if there is nothing to compare, such as "answers".
    """
    after = pct(averages.at[method, "value"])
    differences = rows_over_all_positions(metrics, "difference").dropna(subset="ci_low")
    differences = differences[differences["method"] == method]
    if UNMODIFIED not in averages.index or differences.empty:
        n = averages.at[method, "n"]
        return f"{method} {verb} {after} on average (n = {n}; not compared with the unmodified model)"
    difference = differences.iloc[0]
    unmodified_average = pct(averages.at[UNMODIFIED, "value"])
    low = 100 * difference["ci_low"]
    high = 100 * difference["ci_high"]
    change = points(difference["value"])
    facts = (
        f"{change} points, 95 % interval {low:.1f} to {high:.1f}, n = {difference['n']}"
    )
    if low > 0:
        return f"{method} raises the average from {unmodified_average} to {after} ({facts})"
    if high < 0:
        return f"{method} lowers the average from {unmodified_average} to {after} ({facts})"
    text = f"whether {method} changes the average cannot be told"
    if within_margin(low / 100, high / 100):
        text = f"{method} changes the average by less than {100 * MARGIN:.0f} points"
    return f"{text}: {unmodified_average} before, {after} after ({facts})"


def describe_cut_prompts(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many prompts were cut to the context window; empty where none was.

    Args:
        rows: Predictions with ``id`` and ``dropped``, the number of tokens cut.
    """
    dropped = {row["id"]: row.get("dropped", 0) for row in rows}
    lengths = [tokens for tokens in dropped.values() if tokens]
    if not lengths:
        return ""
    mean = f"mean {np.mean(lengths):.0f} tokens removed"
    return f"{len(lengths)} of {len(dropped)} prompts were shortened to the context window ({mean})."


def describe_window_share(facts: Mapping[str, Any]) -> str:
    """Say how much of the model's context window the prompts take; empty where it is not known.

    Args:
        facts: The record of the stage ``evaluate``, see :func:`posbench.run.reply_rows.prompt_columns`, or of the stage
            ``study``, see :meth:`posbench.run.base.Run.note_prompts`.
    """
    window = facts.get("window")
    if facts.get("window_share") is not None:
        tokens = f"{facts['tokens']:,.0f} tokens on average"
        share = f"{100 * facts['window_share']:.3g} %"
    elif facts.get("tokens_range"):
        shortest, longest = facts["tokens_range"]
        tokens, share = f"{longest:,} tokens", f"{100 * longest / window:.3g} %"
        if shortest < longest:
            tokens = f"{shortest:,} to {tokens}"
            share = f"{100 * shortest / window:.3g} to {share}"
    else:
        return ""
    return f"Prompts of {tokens}, {share} of the window of {window:,}."


def describe_missing_answers(rows: Iterable[Mapping[str, Any]]) -> str:
    """Number, kinds and reasons of rows without an answer; empty if every row has one.

    Args:
        rows: Predictions with ``outcome``, and without an answer with ``reason``.
    """
    rows = list(rows)
    missing = sum(bool(kind_of_row(row)) for row in rows)
    if not missing:
        return ""
    text = f"{missing} of {len(rows)} replies are no answers, and have no score"
    return f"{text}: {describe_kinds(rows)}."


def describe_delivery(facts: Mapping[str, Any]) -> str:
    """The finding on whether prompts arrived whole; empty where they did, and for a model in process.

    Args:
        facts: ``delivery`` of the provenance.
    """
    text = str(facts.get("text", ""))
    if not text:
        return ""
    text = text[0].upper() + text[1:]
    if facts.get("unchecked"):
        return f"{text}."
    return f"{text}; the prompts of this run are fitted to that."


def template_sentence(sources: Sequence[str]) -> str:
    """The warning that a run's prompts change between runs; empty without ``sources``.

    Args:
        sources: See :meth:`posbench.model.encode.Encoder.template_sources`.
    """
    if not sources:
        return ""
    return (
        f"The chat template reads {' and '.join(sources)}: "
        "the same command asks other prompts at another time."
    )


def describe_server(rows: Iterable[Mapping[str, Any]]) -> str:
    """Say how a server answered: its model, thinking, how choices were read, and other token counts than ours.

    Args:
        rows: Rows of ``predictions.jsonl``.

    Returns:
        Sentences; empty for a model in this process.
    """
    rows = list(rows)
    sentences = []
    models = _count(rows, "server")
    if models:
        names = " and ".join(map(str, models))
        sentences.append(f"The replies come from a server, from its model {names}.")
    thoughts = [row["thinking_tokens"] for row in rows if row.get("thinking_tokens")]
    num_thinking = sum(bool(row.get("thinking")) for row in rows)
    if num_thinking or thoughts:
        num_thinking = max(num_thinking, len(thoughts))
        text = f"The model thought before {num_thinking} of {len(rows)} replies"
        if thoughts:
            text += f", in {np.mean(thoughts):,.0f} tokens on average"
        sentences.append(f"{text}; that is not scored.")
    readers = _count(rows, "by")
    if readers:
        sentences.append(f"Choices were read by: {_list_counts(readers)}.")
    surplus = []
    for row in rows:
        by_server = row.get("prompt_tokens")
        by_tokenizer = row.get("tokens")
        if "by" in row or not by_server or not by_tokenizer:
            continue
        if by_server != by_tokenizer:
            surplus.append(by_server - by_tokenizer)
    if surplus:
        count = f"{len(surplus)} prompts, by {np.mean(surplus):+.1f} on average"
        sentences.append(
            f"The server counted other tokens than the tokenizer on this machine in {count}."
        )
    return " ".join(sentences)


def _count(rows: Sequence[Mapping[str, Any]], key: str) -> Counter[Any]:
    """How often each value of a key occurs; rows without a value do not count."""
    return Counter(row[key] for row in rows if row.get(key))


def _list_counts(counts: Counter[Any]) -> str:
    return ", ".join(f"{count} {value}" for value, count in counts.items())


def describe_method(method: Mapping[str, Any]) -> str:
    """Describe the method of ``method.json``: name, parameters, source of the constants, and what the user typed."""
    others = ("name", "source", TYPED)
    parameters = {k: v for k, v in method.items() if k not in others}
    texts = []
    # A composed method has the parameters of its parts.
    for name, values in method.get("parts", {"": parameters}).items():
        text = ", ".join(f"{k} {v}" for k, v in values.items() if v is not None)
        texts.append(f"{name} ({text})" if name else text)
    text = f"{method['name']}: {'; '.join(texts)}"
    if "source" in method:
        text += f"; constants: {method['source']}"
    typed = typed_in_place(method)
    return f"{text}; {typed}" if typed else text


def count_verdicts(findings: pd.DataFrame, correction: str = "within the study") -> str:
    """Verdicts on claims, counted: the paper's, and our controls; a claim of many runs has several.

    Args:
        findings: Rows of findings.csv.
        correction: Over which claims the p values were corrected.
    """
    sentences = []
    kinds = {
        "paper": "Claims of the paper",
        "control": "Our controls",
        "source": "Sources of the bias",
    }
    for kind, heading in kinds.items():
        claims = findings[findings["kind"] == kind]
        if not len(claims):
            continue
        if has_repeated_claims(claims):
            heading = f"Verdicts on {heading[0].lower()}{heading[1:]}"
        text = f"{heading}: {tally_verdicts(claims['verdict'])}"
        if claims["p_holm"].notna().sum() > 1:
            text += f" (Holm-corrected {correction})"
        sentences.append(f"{text}.")
    return " ".join(sentences)


def list_decided_claims(findings: pd.DataFrame) -> str:
    """Return sentences on the claims that hold or are contradicted, and the number of undecided ones.

    Claims are the paper's, or our controls where the paper makes none.

    Args:
        findings: Rows of findings.csv.
    """
    # The first two verdicts are "holds" and "contradicted".
    sentences = _list_claims(findings, FINDING_VERDICTS[:2], MAX_LISTED)
    undecided = tally_verdicts(main_claims(findings)["verdict"], FINDING_VERDICTS[2:])
    if undecided and sentences:
        sentences.append(f"Undecided: {undecided}.")
    elif undecided:
        sentences.append(f"{undecided}.")
    return " ".join(sentences)


def study_answer(findings: pd.DataFrame) -> str:
    """Return sentences on how a study's claims fared, and on the first claims with their numbers.

    Shown are two of each decisive verdict, or one inconclusive one.

    Args:
        findings: Rows of findings.csv.
    """
    # The first two verdicts are "holds" and "contradicted".
    claims = _list_claims(findings, FINDING_VERDICTS[:2], 2, numbers=True)
    if not claims:
        claims = _list_claims(findings, ("inconclusive",), 1, numbers=True)
    return " ".join([count_verdicts(findings), *claims])


def swept_keys(table: pd.DataFrame) -> list[str]:
    """The keys that a sweep's table begins with, behind the run and before the model; a table of one run has none."""
    before_model = table.columns[: list(table).index("model")]
    return [column for column in before_model if column != "run"]


def count_settings(findings: pd.DataFrame) -> int:
    """The number of settings that a sweep's findings are of; 1 for those of one run."""
    columns = swept_keys(findings)
    return len(findings[columns].drop_duplicates()) if columns else 1


def has_repeated_claims(findings: pd.DataFrame) -> bool:
    """Whether several models or settings judged the same claims, so that a claim has several verdicts."""
    judges = ["claim", "model", *swept_keys(findings)]
    return bool(findings[judges].drop_duplicates().duplicated("claim").any())


def main_claims(findings: pd.DataFrame) -> pd.DataFrame:
    """The paper's claims, or our controls where the paper makes none."""
    claims = findings[findings["kind"] == "paper"]
    if claims.empty:
        claims = findings
    return claims.fillna({"model": ""})


def _list_claims(
    findings: pd.DataFrame,
    among: Sequence[str],
    count: int,
    numbers: bool = False,
) -> list[str]:
    """A sentence per verdict, with its first claims and their models.

    Args:
        findings: Rows of findings.csv.
        among: The verdicts to list.
        count: Claims to list of each verdict; of the others their number is given.
        numbers: Whether claims on a single model are listed with their numbers.
    """
    findings_of_claims = main_claims(findings)
    num_models = findings["model"].nunique()
    sentences = []
    for verdict in among:
        claims: dict[str, list[Any]] = {}
        for row in findings_of_claims.itertuples():
            if row.verdict == verdict:
                claims.setdefault(re.sub(CITATION, "", row.claim), []).append(row)
        texts = []
        for claim in sorted(claims, key=lambda claim: -len(_models(claims[claim]))):
            rows = claims[claim]
            text = claim + _on_models(_models(rows), num_models)
            if _has_other_verdict(findings_of_claims, rows):
                text += " (not in every test)"
            if numbers and num_models < 2 and len(rows) == 1:
                text += f" ({rows[0].statistic}: {finding_value(rows[0])})"
            texts.append(text)
        if len(texts) > count:
            texts = [*texts[:count], f"{len(texts) - count} more"]
        if texts:
            sentences.append(f"{verdict.capitalize()}: {'; '.join(texts)}.")
    return sentences


def _has_other_verdict(findings: pd.DataFrame, rows: Sequence[Any]) -> bool:
    """Whether another run or statistic gave a claim another verdict on a model of these rows."""
    claim = re.sub(CITATION, "", rows[0].claim)
    is_claim = findings["claim"].map(lambda text: re.sub(CITATION, "", text) == claim)
    of_models = findings[is_claim & findings["model"].isin(_models(rows))]
    return of_models["verdict"].nunique() > 1


def _models(rows: Sequence[Any]) -> list[str]:
    """The models of these findings, each once."""
    return list(dict.fromkeys(row.model for row in rows))


def _on_models(models: Sequence[str], num_models: int) -> str:
    """`` (tiny, tiny_b)``, or `` (all 3 models)``; empty if there is only one model."""
    if not any(models) or num_models == 1:
        return ""
    if len(models) != num_models:
        return f" ({', '.join(models)})"
    return " (both models)" if num_models == 2 else f" (all {num_models} models)"


def tally_verdicts(verdicts: pd.Series, order: Sequence[str] = FINDING_VERDICTS) -> str:
    """Return `3 hold, 1 inconclusive`: how often each verdict occurs, in the order given."""
    counts = verdicts.value_counts()
    plural = {"holds": "hold", "agrees": "agree", "differs": "differ"}
    texts = []
    for word in order:
        if word in counts:
            count = counts[word]
            texts.append(f"{count} {plural.get(word, word) if count > 1 else word}")
    return ", ".join(texts)


def verdict_table(findings: pd.DataFrame) -> Table:
    """Return a table with a row per claim and verdict, which names models and settings, from findings of many runs."""
    rows = []
    for _, findings_of_claim in papers_first(findings).groupby("claim", sort=False):
        for verdict, findings_of_verdict in findings_of_claim.groupby(
            "verdict", sort=False
        ):
            header, cells = findings_table(findings_of_verdict)
            claim = cells[0][header.index("claim")]
            models = "; ".join(dict.fromkeys(findings_of_verdict["model"]))
            rows.append([str(verdict), claim, models])
    named = "model and setting" if swept_keys(findings) else "models"
    return ["verdict", "claim", named], rows


def describe_data(folder: Path) -> str:
    """Return a sentence with a run's notes on its data, such as the entries of a log that were skipped."""
    notes = (read_json(folder / "prompts.json") or {}).get("notes", ())
    return f"Of the data: {'; '.join(notes)}." if notes else ""


def describe_prompts(folder: Path) -> str:
    """Return sentences on a run's prompts (share of the window, cuts, chat template), missing answers and server."""
    out = open_run_dir(folder)
    rows = out.rows_without_error(PREDICTIONS)
    facts = read_json(folder / "prompts.json") or {}
    sentences = [
        describe_window_share(out.stage(EVALUATE_STAGE)),
        describe_cut_prompts(rows),
        template_sentence(facts.get("template_reads", ())),
        describe_missing_answers(rows),
        describe_server(rows),
        describe_delivery(out.facts(PROVENANCE).get("delivery", {})),
    ]
    return " ".join(filter(None, sentences))
