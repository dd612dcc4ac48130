"""Fit a run to a served model: to its tokenizer, or to the properties of its server."""

from __future__ import annotations

from typing import Any

from posbench.backends.asking import check_server
from posbench.backends.base import NO_WINDOW, text_encoder
from posbench.errors import Faults, UserError
from posbench.model.encode import Encoder
from posbench.pipeline.config import Config
from posbench.pipeline.fit import FitToModel
from posbench.pipeline.served import (
    ASSUMED_TOKENS_PER_CHARACTER,
    LARGER_WINDOW,
    asked_examples,
    check_prompts_arrive,
    probe_server_if_it_answers,
)
from posbench.run.budget import Budget


def fit_to_server(
    config: Config, asks_calibration: bool, budget: Budget | None, faults: Faults
) -> tuple[FitToModel, list[str]]:
    """Probe a server, and fit the defaults of a run to its properties.

    Args:
        config: The run.
        asks_calibration: Whether calibration prompts are asked in addition to the prompts of the stages.
        budget: Budget of the probe; None: the budget of the config, if it has one.
        faults: Collects the faults that the user has to mend.

    Returns:
        The fitted run; and in words which prompts do not fit, and how replies differ from a model in process.
    """
    config = probe_server_if_it_answers(config, budget)
    fit, notes = _fit(config, asks_calibration, faults)
    if not faults.found:
        checked = check_prompts_arrive(fit.config, config, budget)
        if checked.model == fit.config.model:
            fit.config = checked
        else:
            # The server reads less than it says.
            fit, notes = _fit(checked, asks_calibration, faults)
            _blame_server(faults, checked)
    with faults.collecting():
        examples = asked_examples(fit.config, fit.reader)
        notes += check_server(config.model, fit.config.task, examples, fit.reader)
    return fit, notes


def _fit(
    config: Config, asks_calibration: bool, faults: Faults
) -> tuple[FitToModel, list[str]]:
    """Fit a run's prompts to a served model: by its tokenizer, or without one by characters.

    Args:
        config: The run.
        asks_calibration: Whether calibration prompts are asked in addition to the prompts of the stages.
        faults: Collects settings that do not fit.

    Returns:
        The fitted run, and a sentence for each kind of prompt that may not fit.
    """
    # A served model's tokenizer replaces a checkpoint.
    reader: Any = text_encoder(config.model)
    fit = FitToModel(config, reader, asks_calibration)
    misfits: list[str] = []
    if fit.reader.tokenizer:
        fit.fit_to_tokenizer(faults)
        return fit, misfits
    with faults.collecting():
        fit.leave_prompts_uncut()
    with faults.collecting():
        misfits = _fit_to_window(fit, fit.reader)
    return fit, misfits


def _fit_to_window(fit: FitToModel, encoder: Encoder) -> list[str]:
    """Fit prompts to the window of a server whose tokenizer is not known, by characters.

    Returns:
        A sentence for each kind of prompt that does not fit; none without a window or a measured density of tokens.

    Raises:
        UserError: A typed setting does not fit, or the server would cut long prompts without an error.
    """
    server = fit.config.server
    if server is None or encoder.context_window >= NO_WINDOW:
        return []
    delivery = server.delivery
    is_cut = delivery is not None and delivery.limit is not None
    per_character = server.tokens_per_character
    overhead = server.overhead_tokens
    # Without a measurement, an assumption protects from cut prompts.
    if is_cut and per_character is None:
        per_character = ASSUMED_TOKENS_PER_CHARACTER
    if per_character is None:
        return []
    long_prompts = fit.fit_by_characters(per_character, overhead)
    if is_cut and long_prompts:
        # The server would answer them cut.
        allowed = f"shorter prompts: {delivery}"
        hint = f"{LARGER_WINDOW}, or leave out what is longer"
        raise UserError("task", fit.config.task.name, allowed, hint)
    return long_prompts


def _blame_server(faults: Faults, config: Config) -> None:
    """Add to each fault that the server reads only a part of long prompts, and how to change that."""
    delivery = str(config.server.delivery) if config.server else ""
    blamed = []
    for error in faults.found:
        for fault in error.faults:
            allowed, hint = fault.allowed, fault.hint
            if delivery not in allowed:
                allowed += f"; {delivery}"
            if LARGER_WINDOW not in hint:
                hint += f"; or {LARGER_WINDOW}"
            blamed.append(UserError(fault.field, fault.value, allowed, hint))
    faults.found = blamed
