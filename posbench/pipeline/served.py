"""A run of a served model, before its first prompt: what the server is called and takes, and what the run takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from posbench.errors import MachineError, UserError
from posbench.measure.replies import encode_untruncated
from posbench.model.encode import Encoder
from posbench.model.endpoint import (
    BY_LOG_LIKELIHOODS,
    CHOICE_TOKENS,
    MAX_LISTED_MODELS,
    NO_WINDOW,
    PROBE,
    PROBE_TOKENS,
    Api,
    Endpoint,
    ListedModel,
    Prompt,
    ServerProfile,
    is_on_this_machine,
    text_encoder,
)
from posbench.pipeline.arguments import ENDPOINT, model_name
from posbench.pipeline.config import Config
from posbench.run.budget import money, price_of
from posbench.run.progress import duration
from posbench.tasks import Example, Task

ANSWER_TOKENS = 4
"""Tokens that a reply has beside its answer, about."""
ASSUMED_TOKENS_PER_CHARACTER = 0.4
"""Where neither a server nor a tokenizer counts: English text has about 0.25, random characters 0.6."""
UNPRICED_TOKENS = 200_000
"""Tokens of unknown price that a server may be asked for without a question."""
_PROFILES: dict[str, ServerProfile] = {}
"""What this process learned of servers, by the kind of requests: several runs of one command ask the same one."""
SAMPLE_CHARACTERS = 4000
PIECE_CHARACTERS = 1000
"""Characters of the task's prompts whose tokens a server counts before the run, and those of one prompt."""
COUNTED_PROMPTS = 16
"""Prompts whose tokens are counted where the tokenizer is known."""


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
    name = config.model.server_name
    windows = [m.window for m in listed if m.id == name or len(listed) == 1]
    listed_window = next(filter(None, windows), None)
    own_windows = [encoder.context_window for encoder in encoders.values()]
    sample_text = sample_of_prompts(
        examples, min(*own_windows, listed_window or NO_WINDOW)
    )
    answer_tokens = _answer_tokens(task, examples)
    stops = any(example.stop for example in examples)
    choosing = any(example.choices for example in examples)
    key = repr((config.model, apis, answer_tokens, stops, choosing))
    profile = endpoint.probe(
        apis,
        _prompts(endpoint, encoders, examples[0], PROBE),
        answer_tokens=answer_tokens,
        stops=stops,
        choosing=choosing,
        sample=_prompts(endpoint, encoders, examples[0], sample_text),
        sample_characters=len(sample_text),
        known=_PROFILES.get(key),
    )
    _PROFILES[key] = profile
    profile = replace(profile, window=profile.window or listed_window)
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


def sample_of_prompts(examples: Sequence[Example], window: int = NO_WINDOW) -> str:
    """Pieces of a few prompts, spread over them and joined: their tokens stand for those of all.

    Args:
        examples: The prompts.
        window: Tokens that the sample must not be over, at a token a character.
    """
    characters = min(SAMPLE_CHARACTERS, max(window - 4 * PROBE_TOKENS, window // 2))
    # Short pieces have more beginnings and ends than prompts.
    count = min(len(examples), max(characters // PIECE_CHARACTERS, 1))
    size = characters // count
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


# What a run takes


@dataclass(frozen=True)
class ServedEstimate:
    """What a run asks of a server, about.

    Attributes:
        requests: Number of requests.
        read: Tokens of their prompts.
        written: Tokens of their replies, as far as the probe tells.
        written_at_most: The most that these may be.
        counting: How tokens are counted, in words.
        seconds: Time of the run; None: not known.
        cost: Money for what is read and written; None: the price is not known.
        cost_at_most: The most that it may be.
    """

    requests: int
    read: int
    written: int
    written_at_most: int
    counting: str
    seconds: float | None
    cost: float | None
    cost_at_most: float | None

    @property
    def tokens(self) -> int:
        """Tokens read and written, about."""
        return self.read + self.written

    def times(self, factor: float) -> ServedEstimate:
        """Return ``factor`` times this work."""

        def scaled(amount: float | None) -> float | None:
            return None if amount is None else amount * factor

        return replace(
            self,
            requests=round(self.requests * factor),
            read=round(self.read * factor),
            written=round(self.written * factor),
            written_at_most=round(self.written_at_most * factor),
            seconds=scaled(self.seconds),
            cost=scaled(self.cost),
            cost_at_most=scaled(self.cost_at_most),
        )

    def line(self, concurrency: int) -> str:
        """Return what is said before the first prompt: requests, tokens, time and money.

        Args:
            concurrency: Requests at a time.
        """
        parts = [
            f"{self.requests:,} requests",
            f"about {self.read:,} tokens read ({self.counting}) and {self.written:,} written, at most "
            f"{self.written_at_most:,}",
        ]
        if self.seconds is not None:
            parts.append(
                f"about {duration(self.seconds)} at {concurrency} requests at a time"
            )
        if self.cost is None or self.cost_at_most is None:
            parts.append("price unknown (model.price=[IN,OUT] of a million tokens)")
        else:
            parts.append(
                f"about {money(self.cost)}, at most {money(self.cost_at_most)}"
            )
        return f"server: {'; '.join(parts)}"


def estimate_served(
    config: Config, profile: ServerProfile, encoder: Encoder
) -> ServedEstimate:
    """Estimate what the evaluation of a served model takes.

    Args:
        config: The run.
        profile: What the probe of the server told.
        encoder: Makes the model's prompts.
    """
    task = config.task
    examples = task.evaluation()
    characters = [len(e.prompt) + len(e.system) + len(e.prefill) for e in examples]
    per_character, overhead, counting = _token_count(profile, encoder, examples)
    by_likelihoods = profile.choice_method == BY_LOG_LIKELIHOODS
    requests = 0
    read = 0.0
    written = 0.0
    written_at_most = 0
    thinking_tokens = config.model.thinking_tokens or 0
    thought = profile.reply_tokens if profile.thinking else 0
    for example, size in zip(examples, characters, strict=True):
        repeats = len(example.choices) if by_likelihoods and example.choices else 1
        requests += repeats
        read += repeats * (size * per_character + overhead)
        if by_likelihoods and example.choices:
            written_at_most += repeats
            continue
        longest = example.max_new_tokens or task.max_new_tokens
        if example.choices:
            longest = CHOICE_TOKENS
        answer = per_character * max(map(len, example.answers), default=0)
        written += min(answer + ANSWER_TOKENS, longest) + thought
        written_at_most += longest + thinking_tokens
    written = min(written, written_at_most)
    price = config.model.price
    return ServedEstimate(
        requests=requests,
        read=round(read),
        written=round(written),
        written_at_most=written_at_most,
        counting=counting,
        seconds=_seconds(config, profile, requests, read, written),
        cost=price_of(read, written, price),
        cost_at_most=price_of(read, written_at_most, price),
    )


def _token_count(
    profile: ServerProfile, encoder: Encoder, examples: Sequence[Example]
) -> tuple[float, int, str]:
    """Tokens of a character of prompts, tokens of a prompt beside its text, and in words how they are known."""
    if encoder.tokenizer:
        step = -(-len(examples) // COUNTED_PROMPTS)
        counted = examples[::step]
        tokens = sum(len(encode_untruncated(encoder, e).ids) for e in counted)
        characters = sum(
            len(e.prompt) + len(e.system) + len(e.prefill) for e in counted
        )
        value = tokens / max(characters, 1)
        overhead = profile.overhead_tokens if profile.api == "chat" else 0
        return value, overhead, f"{value:.2f} a character, by the tokenizer"
    overhead = profile.overhead_tokens
    if profile.tokens_per_character is not None:
        value = profile.tokens_per_character
        return value, overhead, f"{value:.2f} a character, as the server counts"
    value = ASSUMED_TOKENS_PER_CHARACTER
    counting = f"{value:.2f} a character, assumed: the server does not count"
    return value, overhead, counting


def _seconds(
    config: Config,
    profile: ServerProfile,
    requests: int,
    read: float,
    written: float,
) -> float | None:
    """The time of a run, from the longest request of the probe; None where that is not known."""
    if not (profile.seconds and profile.seconds_tokens and requests):
        return None
    longer_prompts = read / requests / profile.seconds_tokens
    longer_replies = written / requests / PROBE_TOKENS
    each = profile.seconds * max(longer_prompts, longer_replies, 1.0)
    return each * requests / min(config.model.concurrency, requests)


def need_consent(config: Config, estimate: ServedEstimate, console: Console) -> None:
    """Ask whether a run may start that costs money, or much of an unknown price.

    What answers on this machine is not asked about, nor what a budget of money or tokens bounds.

    Raises:
        UserError: Nobody can be asked and the user did not say so beforehand, or says no.
    """
    model = config.model
    budget = config.budget
    is_bounded = budget is not None and (budget.usd or budget.tokens)
    if config.runtime.yes or is_bounded or is_on_this_machine(str(model.base_url)):
        return
    if estimate.cost_at_most is None:
        is_small = estimate.tokens <= UNPRICED_TOKENS
        what = f"{estimate.tokens:,} tokens of unknown price"
    else:
        is_small = estimate.cost_at_most == 0
        what = f"{money(estimate.cost_at_most)} at most"
    if is_small:
        return
    hint = "add --yes, or ask less: budget=1usd, budget=500ktok"
    if not (console.is_terminal and sys.stdin.isatty()):
        allowed = f"given, where no terminal asks: the run takes {what}"
        raise UserError("--yes", False, allowed, hint)
    answer = console.input(f"the run takes {what}: go on? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("--yes", answer, "y: nothing was asked", hint)


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
