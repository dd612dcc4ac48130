"""A run of a served model, before its first prompt: what the server is called and takes, and what the run takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posbench.errors import MachineError, UserError
from posbench.model.encode import Encoder
from posbench.model.endpoint import (
    CHOICE_TOKENS,
    MAX_LISTED_MODELS,
    PROBE,
    Api,
    Endpoint,
    ListedModel,
    Prompt,
    ServerProfile,
    text_encoder,
)
from posbench.pipeline.arguments import ENDPOINT, model_name
from posbench.pipeline.config import Config
from posbench.tasks import Example, Task

SAMPLE_CHARACTERS = 4000
"""Characters of the task's prompts whose tokens a server counts before the run."""


def probe_server(config: Config) -> Config:
    """Ask a server what its model is called and what it takes, and fill in what the user left to that.

    Args:
        config: The run of a served model.

    Returns:
        The config with name, API, thinking tokens and window of the model, and with the profile of its server.

    Raises:
        UserError: The server lists several models and the user named none, or refuses what the user set.
        MachineError: It does not answer.
    """
    endpoint = Endpoint(config.model)
    listed = endpoint.models()
    config = _with_name(config, listed)
    endpoint = Endpoint(config.model)
    task = config.task
    examples = task.evaluation()
    apis = _apis(config, examples)
    encoders = {
        api: text_encoder(replace(config.model, api=api, thinking_tokens=0))
        for api in apis
    }
    sample_text = sample_of_prompts(examples)
    profile = endpoint.probe(
        apis,
        _prompts(endpoint, encoders, examples[0], PROBE),
        answer_tokens=_answer_tokens(task, examples),
        stops=any(example.stop for example in examples),
        choosing=any(example.choices for example in examples),
        may_think=bool(config.model.path) or "chat" in apis,
        sample=_prompts(endpoint, encoders, examples[0], sample_text),
        sample_characters=len(sample_text),
    )
    windows = [model.window for model in listed if model.id == config.model.server_name]
    window = next(filter(None, (profile.window, *windows)), None)
    profile = replace(profile, window=window)
    return replace(_with_profile(config, endpoint, profile, encoders), server=profile)


def _with_name(config: Config, listed: Sequence[ListedModel]) -> Config:
    """The config with the model's name at the server, where the user did not type it.

    Raises:
        UserError: Several are listed, and none of them is the model's.
    """
    model = config.model
    names = [entry.id for entry in listed]
    if model.served or "model.name" in config.typed:
        return config
    own_names = [name for name in (model.name, model.path) if name in names]
    if own_names:
        served = own_names[0]
    elif len(names) == 1:
        (served,) = names
    elif not names and model.name != ENDPOINT:
        return config
    else:
        allowed = "a model of the server, which lists none"
        if names:
            shown = ", ".join(names[:MAX_LISTED_MODELS])
            more = len(names) - MAX_LISTED_MODELS
            allowed = f"one of {shown}" + (f" and {more} more" if more > 0 else "")
        raise UserError("model.served", None, allowed, "set model.served=ID")
    values = {"served": served}
    if model.name == ENDPOINT:
        values["name"] = model_name(served)
    return config.with_fields("model", values)


def _apis(config: Config, examples: Sequence[Example]) -> list[Api]:
    """The APIs to try, the one that asks a task best first.

    Completions send the very text; where no tokenizer is known, a chat template is the server's alone.
    """
    if config.model.api != "auto":
        return [config.model.api]
    if any(example.prefill for example in examples):
        return ["completions"]
    has_template = all(example.chat for example in examples)
    if config.model.path or not has_template:
        return ["completions", "chat"]
    return ["chat", "completions"]


def _prompts(
    endpoint: Endpoint, encoders: Mapping[Api, Encoder], example: Example, text: str
) -> dict[Api, Prompt]:
    """A text in the form of a task's prompts, for each API."""
    return {
        api: endpoint.prompt_for(
            api, encoder, encoder.encode(text, chat=example.chat), ""
        )
        for api, encoder in encoders.items()
    }


def sample_of_prompts(examples: Sequence[Example]) -> str:
    """Pieces of a few prompts, spread over them and joined: their tokens stand for those of all."""
    count = min(len(examples), 4)
    size = SAMPLE_CHARACTERS // count
    pieces = []
    for index in range(count):
        prompt = examples[index * len(examples) // count].prompt
        start = max(len(prompt) - size, 0) * index // max(count - 1, 1)
        pieces.append(prompt[start : start + size])
    return "\n".join(pieces)


def _answer_tokens(task: Task, examples: Sequence[Example]) -> int:
    """Tokens of the longest answer that a task asks for, without thinking."""
    if all(example.choices for example in examples):
        return CHOICE_TOKENS
    return max(example.max_new_tokens or task.max_new_tokens for example in examples)


def _with_profile(
    config: Config,
    endpoint: Endpoint,
    profile: ServerProfile,
    encoders: Mapping[Api, Encoder],
) -> Config:
    """The config with what the probe found in the place of what the user left open."""
    values: dict[str, Any] = {}
    if config.model.api != profile.api:
        values["api"] = profile.api
    window = profile.window
    own_window = encoders[profile.api].context_window
    if window and config.model.context_window is None and window < own_window:
        values["context_window"] = window
    thinking_tokens = endpoint.thinking_tokens
    if config.model.thinking_tokens is None:
        if window:
            thinking_tokens = min(thinking_tokens, window // 2)
        values["thinking_tokens"] = thinking_tokens
    return config.with_fields("model", values) if values else config


def describe_endpoint(endpoint: Endpoint) -> list[str]:
    """Return what a user has to know of how a server is asked that was probed, a line each."""
    profile = endpoint.profile
    decoding = endpoint.decoding
    lines = []
    facts = [f"api {profile.api}"]
    if profile.window:
        facts.append(f"window {profile.window:,} tokens")
    if profile.length_field != "max_tokens":
        facts.append(f"lengths as {profile.length_field}")
    if profile.choice_method:
        facts.append(f"choices by {profile.choice_method}")
    lines.append(f"server: {', '.join(facts)}")
    left_out = list(decoding["left_out"])
    if profile.thinking:
        form = THINKING_FORMS[profile.thinking]
        lines.append(
            f"server: the model thinks ({form}): replies get {endpoint.thinking_tokens:,} tokens more for that "
            "(model.thinking_tokens), and it is not scored"
        )
    if "temperature" in left_out:
        lines.append(
            "server: it refuses temperature 0, so replies are SAMPLED: the same prompt may get another one"
        )
    elif profile.is_sampled:
        lines.append(
            f"server: replies are SAMPLED at temperature {profile.temperature:g}: the same prompt may get another one"
        )
    if left_out:
        message = f"server: it refuses {', '.join(left_out)}: not sent"
        if decoding["open_penalties"]:
            names = " or ".join(decoding["open_penalties"])
            message += f"; if it applies a {names} of its own, replies differ from those in process"
        lines.append(message)
    if not profile.sends_stop:
        lines.append("server: it refuses stop: replies are cut here")
    return lines


THINKING_FORMS = {
    "field": "in a field of its own",
    "inline": "between marks in its replies",
    "opened": "up to a mark in its replies",
    "hidden": "unseen",
}


def need_server(config: Config) -> None:
    """Ask the server of a run that was not asked yet; nothing for a model in process.

    Raises:
        UserError: As :func:`probe_server`.
        MachineError: It does not answer.
    """
    if config.uses_model and config.model.base_url and config.server is None:
        probe_server(config)


def probe_server_if_it_answers(config: Config) -> Config:
    """The same as :func:`probe_server`; where a server does not answer, a run that is made may still be shown.

    Raises:
        UserError: As :func:`probe_server`.
        MachineError: The server does not answer, and the user left to it what the run is called.
    """
    try:
        return probe_server(config)
    except MachineError:
        is_complete = config.model.api != "auto" and (
            config.model.served or "model.name" in config.typed
        )
        if not is_complete:
            raise
        return config
