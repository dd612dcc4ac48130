"""Before a run: every obstacle at once, and defaults that fit the model. Nothing here reads weights."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench import paths
from posbench.errors import Faults, UserError, merge_errors
from posbench.files.digests import (
    Content,
    hash_paths,
    method_file_hashes,
    read_contents,
)
from posbench.files.sources import Source, cached_path, local, need_reachable
from posbench.late import has_torch, transformers
from posbench.measure.replies import encode_longest, template_sources
from posbench.methods.prompt_change import UNRANKED, PromptChange
from posbench.model.encode import Encoder
from posbench.model.load import CheckpointReader, load_without_weights, read_checkpoint
from posbench.pipeline.compose import ComposedConfig
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.constants import calibration_overlap, suggest_run
from posbench.pipeline.fit import Adjustment, FitToModel
from posbench.pipeline.identity import (
    input_sources,
    model_identity,
    need_constants_of_weights,
    unmodified_identity,
)
from posbench.report.text import template_sentence
from posbench.run.base import Run
from posbench.run.budget import Budget
from posbench.run.heartbeat import doing
from posbench.tasks.base import EvaluationOnly
from posbench.tasks.items import ranks_items

KEY_OF_EXPERIMENT = re.compile(r"(task|method|search|study)(\.(?!path\b)\w+)*")
"""Keys that an experiment chooses; the files of a task are not there, or wrong, for any model."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Attributes:
        config: The config, its defaults fitted to the model.
        warnings: Changed defaults, limits of a server, and quantised weights, a line each.
        reader: The checkpoint without its weights; None where the run looks at none.
    """

    config: Config
    warnings: tuple[str, ...] = ()
    reader: CheckpointReader | None = None


def prepare(
    composed: ComposedConfig,
    download: bool = True,
    asks_calibration: bool = False,
    budget: Budget | None = None,
) -> PreparedRun:
    """Check a composed config, look for all that it reads, and fit its defaults to the model.

    Args:
        composed: The config as composed.
        download: Whether missing files may be downloaded; else they are obstacles.
        asks_calibration: Whether calibration prompts are asked in addition to the prompts of the stages.
        budget: Budget of probing a server; None: the budget of the config, if it has one.

    Raises:
        UserError: All obstacles together.
    """
    try:
        return _prepare(composed, download, asks_calibration, budget)
    except UserError as error:
        faults = [_as_typed(fault, composed) for fault in error.faults]
        if faults == list(error.faults):
            raise
        raise merge_errors(faults) from error


def _as_typed(fault: UserError, composed: ComposedConfig) -> UserError:
    """A fault of a key that the experiment set as one of the model, where the user typed this and not that."""
    group = fault.field.partition(".")[0]
    is_typed = bool({fault.field, group} & composed.typed_by_user)
    model_is_typed = any(
        key.partition(".")[0] == "model" for key in composed.typed_by_user
    )
    is_key = KEY_OF_EXPERIMENT.fullmatch(fault.field) and type(fault) is UserError
    if not composed.experiment or is_typed or not model_is_typed or not is_key:
        return fault
    name = composed.raw["model"]["name"]
    allowed = f"one that goes with {fault.field}={fault.value} of experiment={composed.experiment} ({fault.allowed})"
    return UserError("model", name, allowed, f"leave model out, or {fault.hint}")


def _prepare(
    composed: ComposedConfig,
    download: bool,
    asks_calibration: bool,
    budget: Budget | None,
) -> PreparedRun:
    """See :func:`prepare`."""
    faults = Faults()
    config = None
    with faults.collecting():
        config = check_config(composed, faults)
    if config is None:
        faults.raise_any()
    assert config is not None, "check returns a config or raises a fault"
    with faults.collecting():
        need_text_model(config)
    _need_remote_sources(config, composed, download, faults)
    # Without a source no prompts can be made, or no tokens counted.
    faults.raise_any()
    if not config.uses_model:
        _check_parts(config, None, faults)
        return PreparedRun(config)

    with faults.collecting():
        _check_constants(config)
    with faults.collecting():
        _check_order(config)
    silence_transformers()
    notes: list[str] = []
    if config.model.in_process:
        fit = FitToModel(config, read_checkpoint(config.model), asks_calibration)
        _note_method_left_out(fit, composed.raw["method"]["name"])
        fit.fit_to_tokenizer(faults)
        with faults.collecting():
            fit.fit_batches()
        notes += _check_parts(fit.config, fit.reader, faults)
    else:
        from posbench.pipeline.fit_served import fit_to_server

        fit, notes = fit_to_server(config, asks_calibration, budget, faults)
        study = fit.config.study
        if study and not faults.found:
            with faults.collecting():
                study.check(build_run(fit.config, Console(quiet=True)))
    encoder = fit.reader
    faults.raise_any()
    warnings = list(composed.notes)
    warnings += [
        f"{key}: {adjustment.old} -> {adjustment.new}, {adjustment.reason}"
        for key, adjustment in fit.adjustments.items()
    ]
    checkpoint = encoder if isinstance(encoder, CheckpointReader) else None
    for constants in config.constants:
        parts = {config.choice.name: config.choice, **config.choice.parts}
        typed = parts[constants.method].pinned if constants.method in parts else {}
        warnings.append(constants.line(typed))
    if config.uses_task:
        warnings += fit.config.task.notes()
    if "evaluate" in config.stages:
        if encoder.tokenizer and encoder.has_template:
            warnings += _template_warnings(fit.config, encoder)
        warnings += filter(
            None, (calibration_overlap(c, config.task) for c in config.constants)
        )
    warnings += [*notes, *_dequantised(config.model.files)]
    return PreparedRun(fit.config, tuple(warnings), checkpoint)


def _template_warnings(config: Config, encoder: Encoder) -> list[str]:
    """A line where the prompts of a run are other ones tomorrow, as the chat template reads more than messages."""
    sources = template_sources(encoder, config.task.evaluation())
    if not sources:
        return []
    line = template_sentence(sources).removesuffix(".")
    return [f"{line}; model.chat_template=none leaves the template out"]


def _check_constants(config: Config) -> None:
    """Refuse constants that a run found for other weights, if these are on this machine; else the run does.

    Raises:
        UserError: The weights differ.
    """
    here = all(cached_path(source) for source in config.model.files)
    if config.constants and here:
        need_constants_of_weights(config, read_contents(config.model.files))


def _check_order(config: Config) -> None:
    """Refuse a method that only moves the gold item, or cuts it away: what it gains says nothing.

    Raises:
        UserError: The method orders or cuts the items, and the task places the gold item.
    """
    classes = [c for c in config.choice.classes if issubclass(c, PromptChange)]
    if not any(cls.uses_order() for cls in classes):
        return
    # Over all positions an order only changes places between them, and the average is fair.
    asks_all = len({*config.task.gold_positions}) == config.task.items
    if not asks_all and not ranks_items(config.task, config.task.evaluation()):
        hint = "posbench order LOG compares orders on a log of your own; or set task.positions to all positions"
        raise UserError("method", config.choice.name, f"others: {UNRANKED}", hint)


def _dequantised(needed: Sequence[Source]) -> list[str]:
    """Warnings that weights were quantised, a line for each such GGUF file."""
    lines = []
    for source in needed:
        if not source.is_converted:
            continue
        from posbench.files.gguf import UNQUANTISED, weight_types

        types = set(weight_types(local(source))) - set(UNQUANTISED)
        if types:
            names = ", ".join(sorted(types))
            lines.append(
                f"{source.field}: the weights of {source.id} are quantised ({names}) and computed in float: "
                "the numbers are those of the quantised weights, the memory is that of float"
            )
    return lines


def need_text_model(config: Config) -> None:
    """Refuse, before anything is downloaded, texts of a benchmark for a model that knows few words.

    Raises:
        UserError: Model and task do not go together.
    """
    task = config.task
    model = config.model
    asks_texts = isinstance(task, EvaluationOnly) and task.path is None
    knows_few_words = model.path.startswith(paths.EMBEDDED)
    if asks_texts and knows_few_words and config.uses_model and config.uses_task:
        allowed = f"kv_retrieval with model {model.name}, which knows only its words and reads short prompts"
        hint = (
            f"take a model that reads text: posbench task={task.name} model=mistral7b"
        )
        raise UserError("task", task.name, allowed, hint)


def _need_remote_sources(
    config: Config, composed: ComposedConfig, download: bool, faults: Faults
) -> None:
    """Collect which checkpoints and data sets are neither on this machine nor can be downloaded."""
    faulty_groups = {fault.field.partition(".")[0] for fault in faults.found}
    for source in input_sources(config):
        group = source.field.partition(".")[0]
        if source.kind == "path" or group in faulty_groups:
            continue
        with faults.collecting():
            if cached_path(source):
                continue
            if download:
                need_reachable(source)
            else:
                about = f" ({source.about})" if source.about else ""
                allowed = f"files that are on this machine; this one is not{about}"
                if source.kind == "gguf":
                    allowed = (
                        "a GGUF file that posbench has converted; this one is not yet"
                    )
                hint = shlex.join(["posbench", "fetch", *composed.arguments()])
                raise UserError(source.field, source.id, allowed, hint)


def _note_method_left_out(fit: FitToModel, chosen: str) -> None:
    """Note that the chosen method was left out, for want of constants that could be found."""
    config = fit.config
    model = config.model
    left_out = config.choice.name == "none" and chosen != "none"
    if left_out and config.study is None and model.in_process:
        outputs = Path(config.runtime.outputs).expanduser()
        finds_them = f"posbench model={model.path} finds them"
        suggestion = suggest_run(outputs, chosen, model.files, finds_them)
        reason = (
            f"no constants of {model.name} are known, and {config.task.name} has nothing to search on"
            f" ({suggestion})"
        )
        fit.adjustments["method"] = Adjustment(chosen, "none", reason)


def silence_transformers() -> None:
    """Keep transformers from printing bars and warnings: posbench reports the relevant ones itself."""
    if not has_torch():
        return
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def build_run(
    config: Config,
    console: Console,
    identity: Mapping[str, Any] | None = None,
    contents: Sequence[Content] = (),
) -> Run:
    """Build the input of the stages, without a folder.

    Args:
        config: The checked config.
        console: Where progress and tables go.
        identity: Distinguishes runs, see :func:`posbench.pipeline.identity.identity`.
        contents: Contents of the files that it reads.
    """
    return Run(
        model=config.model,
        task=config.task,
        method=config.method_under_test(),
        runtime=config.runtime,
        raw=hash_paths(config.raw, contents),
        stages=config.stages,
        reference=config.reference()[0],
        console=console,
        identity=identity or {},
        unmodified_identity=unmodified_identity(config, identity) if identity else {},
        all_methods=config.all_methods,
        model_identity=model_identity(config, contents),
        server=config.server,
        method_files=method_file_hashes(contents),
    )


def _check_parts(
    config: Config, checkpoint: CheckpointReader | None, faults: Faults
) -> list[str]:
    """Check that method, study, search and prompts fit the model.

    Args:
        config: The config.
        checkpoint: The model without its weights; None where the run looks at none.
        faults: The faults that were found before.

    Returns:
        A line where the method changes none of the prompts.

    Raises:
        UserError: All faults, earlier ones included.
    """
    notes: list[str] = []
    run = build_run(config, Console(quiet=True))
    faulty_groups = {fault.field.partition(".")[0] for fault in faults.found}
    if checkpoint:
        has_outline = False
        with faults.collecting():
            run.lm = load_without_weights(
                config.model, checkpoint, config.runtime.device
            )
            has_outline = True
            run.method.trial().check(run.lm)
            if "task" not in faulty_groups:
                _check_prompts_of_method(run, config)
        if not has_outline:
            faults.raise_any()  # the checks below would load the weights
    if config.study and "task" not in faulty_groups:
        with faults.collecting():
            config.study.check(run)
    if "search" in config.stages and not {"task", "search"} & faulty_groups:
        with faults.collecting():
            config.search.check(run)
            config.search.held_back_examples(run, config.search.held_back)
    if "task" not in faulty_groups:
        with faults.collecting(), doing("writing all prompts, to check the longest"):
            lengths = [len(ids) for ids in longest_prompts(run, config.stages)]
            if checkpoint and lengths and not faults.found:
                notes += _notes_on_method(run, max(lengths))
    faults.raise_any()
    return notes


def _notes_on_method(run: Run, prompt_tokens: int) -> list[str]:
    """A line where the prompts are too short for the method to change anything, or too long for its constants.

    Args:
        run: The run.
        prompt_tokens: Tokens of its longest prompt.
    """
    if "search" in run.stages:
        return []  # its constants are not found yet
    tokens = prompt_tokens + run.task.max_new_tokens
    method = run.method.trial()
    name = run.method.choice.name
    notes = []
    reason = method.without_effect(run.lm, tokens)
    if reason:
        notes.append(
            f"method: {name} {reason}, and the longest prompt here has {prompt_tokens}: expect no difference"
        )
    caution = method.caution(run.lm, tokens)
    if caution:
        notes.append(
            f"method: {name}: {caution}; the longest prompt here has {prompt_tokens:,}, and what is further away may "
            "be lost"
        )
    return notes


def _check_prompts_of_method(run: Run, config: Config) -> None:
    """Refuse a method that reads items or rewrites prompts where the stages do not support it.

    Raises:
        UserError: The task's prompts have no items, or a study or search looks at them as they are.
    """
    method = run.method.trial()
    name = run.method.choice.name
    asks_prompts = bool(
        {"study", "search", "intervene", "evaluate"} & set(config.stages)
    )
    if not asks_prompts:
        return
    if run.reads_items and not any(example.items for example in run.evaluation):
        allowed = f"a task whose prompts have items, which {name} reads"
        hint = "task=kv_retrieval or task=nq_multidoc; docs/own_data.md says how to mark yours"
        raise UserError("task", run.task.name, allowed, hint)
    if method.rewrites and "study" in config.stages:
        allowed = f"no study stage: it looks at prompts as the task gives them, and {name} rewrites them"
        raise UserError("stages", "study", allowed, "set stages=[intervene,evaluate]")
    # A search measures the answer right after the prompt, or takes the reply for it.
    is_plain = method.rewrites_by_text and not method.answer_cue
    if method.rewrites and "search" in config.stages and not is_plain:
        allowed = "no search stage, or changes of the prompt that need no model and ask for the answer alone"
        raise UserError("stages", "search", allowed, "set stages=[intervene,evaluate]")
    if method.rewrites and "search" in config.stages:
        _check_calibration_prompts(run)


def _check_calibration_prompts(run: Run) -> None:
    """Refuse a search under a change of the prompt that its calibration prompts do not show.

    Raises:
        UserError: No calibration prompt changes, or items are cut away that the task places.
    """
    name = run.method.choice.name
    hint = "set stages=[evaluate,report], or search without that change"
    changes = [c for c in run.method.choice.classes if issubclass(c, PromptChange)]
    if any(change.changes == "number" for change in changes):
        allowed = f"changes of the prompt that keep all items, where a search reads it; {name} cuts some away"
        raise UserError("stages", "search", allowed, hint)
    examples = run.task.examples("calibration")
    if [e.prompt for e in run.as_asked(examples)] == [e.prompt for e in examples]:
        allowed = f"calibration prompts that {name} changes: these have no marked items, or nothing to change"
        raise UserError("stages", "search", allowed, hint)


def longest_prompts(run: Run, stages: Sequence[str]) -> Iterator[list[int]]:
    """Yield the longest prompt (in characters) of each split that the stages ask, as tokens.

    Raises:
        UserError: It does not fit the window, or the tokenizer gives two of its choices the same tokens.
    """
    if "search" in stages:
        examples = run.task.examples("calibration")
        # One that asks the model how to rewrite is refused with a search.
        if run.method.trial().rewrites_by_text:
            examples = run.as_asked(examples)
        longest = max(examples, key=lambda e: len(e.prompt))
        yield run.lm.encode(longest.prompt).ids
    if {"intervene", "evaluate"} & set(stages):
        examples = run.evaluation
        method = run.method.trial()
        # Only the run itself knows the prompts of a method that asks the model how to rewrite them.
        if method.rewrites and method.rewrites_by_text:
            examples = [*examples, *run.prompts.rewrite(examples, method)]
        example, encoded = encode_longest(run.lm, run.task, examples)
        continuations = {
            tuple(run.lm.continuation_ids(encoded, choice))
            for choice in example.choices
        }
        if len(continuations) < len(example.choices):
            choices = ", ".join(map(repr, example.choices))
            allowed = f"a tokenizer that tells the choices of {run.task.name} apart: {choices}"
            hint = "use a model that reads this text; the embedded ones know only the words of kv_retrieval"
            raise UserError("model", run.lm.name, allowed, hint)
        yield encoded.ids
