"""Preparation of a served run: probe the server for its model's name, API and limits, and estimate the cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from posbench.backends.base import (
    CHOICE_TOKENS,
    NO_WINDOW,
    Api,
    ListedModel,
    MakePrompt,
    Prompt,
    ServerProfile,
    text_encoder,
    untruncated,
)
from posbench.backends.choice import make_backend
from posbench.backends.delivery import (
    Delivery,
    check_delivery,
    cold,
    rounded_down,
)
from posbench.backends.pacing import ServerSpeed, Timing
from posbench.backends.served import (
    MAX_LISTED_MODELS,
    PROBE_QUESTION,
    SHORT_PROBE_TOKENS,
    Endpoint,
    ProbeTimeOver,
    is_on_this_machine,
    key_error,
)
from posbench.errors import MachineError, UserError
from posbench.measure.replies import encode_untruncated
from posbench.model.answers import BY_LOG_LIKELIHOODS, Reply, RequestError
from posbench.model.encode import Encoder
from posbench.pipeline.arguments import ENDPOINT, model_name
from posbench.pipeline.config import Config
from posbench.run.budget import Budget, money, price_of
from posbench.run.heartbeat import doing
from posbench.run.progress import duration
from posbench.run.prompts import rewrite_examples
from posbench.tasks import Example, Task

REPLY_OVERHEAD_TOKENS = 4
"""Tokens of a reply in addition to the answer, approximately."""
ASSUMED_TOKENS_PER_CHARACTER = 0.4
"""Where neither a server nor a tokenizer counts: English text has about 0.25, random characters 0.6."""
UNPRICED_TOKENS = 200_000
"""Tokens of unknown price that a server may be asked for without a question."""
_PROFILES: dict[str, ServerProfile] = {}
"""Profiles of the probed servers, by kind of request; runs of one command share them."""
SAMPLE_CHARACTERS = 4000
"""Most characters of the task's prompts whose tokens a server counts before the run."""
MIN_SAMPLE_CHARACTERS = 400
"""Fewest characters of that sample."""
PIECE_CHARACTERS = 1000
"""Characters of the sample from one prompt."""
_DELIVERIES: dict[tuple[str, str], tuple[int, Delivery, tuple[Timing, ...]]] = {}
"""By server and kind of text: characters of the longest checked prompt, the result, and the times."""
LARGER_WINDOW = "give the server a larger window (Ollama: num_ctx; a router: turn its compression off)"
COUNTED_PROMPTS = 16
"""Prompts whose tokens are counted where the tokenizer is known."""
PARALLEL_SECONDS = 20.0
"""Longest time of requests sent at once if the server answers one by one; beyond it, two are sent."""
PARALLEL_SHARE = 0.5
"""Share of the time left that these requests may take."""
DELIVERY_SHARE = 0.5
"""Share of the time left that the check that prompts arrive whole may take."""
PROBE_SHARE = 0.2
"""Share of a budget of tokens or money that the parallel requests or the delivery check may take."""
DELIVERY_LENGTHS = 2.2
"""Length of the delivery check in longest prompts: the whole prompt, its halves, and short pieces."""
SAME_LENGTH_RATIO = 1.02
"""A prompt up to this factor longer than one that arrived whole is not checked again."""
SIZE_FIELDS = ("limit", "positions", "seed", "max_new_tokens", "calibration_examples")
"""Fields of a task that do not change the kind of text in its prompts."""


class _Probe:
    """The requests of a probe, within a budget.

    Args:
        config: The run of a served model.
        budget: Budget of the run, or of the diagnosis that includes the run; None: no limit.
    """

    def __init__(self, config: Config, budget: Budget | None) -> None:
        self.config = config
        self.endpoint = Endpoint(config.model, config.server)
        self._budget = budget or config.budget
        seconds = self._budget.seconds if self._budget else None
        if seconds is not None:
            self.endpoint.give_up_at = time.monotonic() + seconds

    def affords(self, seconds: float, tokens: float, share: float) -> bool:
        """Return whether requests fit: into a share of the time that is left, or of the tokens or the money.

        Args:
            seconds: Time that they take, about.
            tokens: Their tokens.
            share: The share of the time.
        """
        budget = self._budget
        if budget is None:
            return True
        if self.endpoint.give_up_at is not None:
            return seconds <= share * (self.endpoint.give_up_at - time.monotonic())
        if budget.usd is not None:
            cost = price_of(tokens, 0, self.config.model.price) or 0.0
            return cost <= PROBE_SHARE * budget.usd
        return budget.tokens is None or tokens <= PROBE_SHARE * budget.tokens

    def need_room(self) -> None:
        """Raise UserError where the probe has taken too much of a budget of tokens or money."""
        budget = self._budget
        if budget is None or not (budget.tokens or budget.usd):
            return
        read, written = self.endpoint.tokens_read, self.endpoint.tokens_written
        spent: float = read + written
        if budget.usd:
            spent = price_of(read, written, self.config.model.price) or 0.0
        if spent > DELIVERY_SHARE * budget.size:
            allowed = "more: the server shortens prompts in silence, and how much it reads takes more to find out"
            hint = f"set a budget ten times as large, or {LARGER_WINDOW}"
            raise UserError("budget", budget.text, allowed, hint)

    @contextmanager
    def in_time(self, what: str) -> Any:
        """Raise UserError where the time is over in the block.

        Args:
            what: Description of the requests.
        """
        with doing(f"asking the server {self.config.model.base_url}: {what}"):
            try:
                yield
            except ProbeTimeOver as error:
                assert self._budget is not None, "without a budget there is time"
                allowed = f"more time: the server had not answered the first requests by then ({what})"
                seconds = 10 * (self._budget.seconds or 0.0)
                hint = f"set budget={-(-seconds // 60):.0f}min, or smaller prompts"
                raise UserError("budget", self._budget.text, allowed, hint) from error


def probe_server(config: Config, budget: Budget | None = None) -> Config:
    """Probe a server for its model's name and limits, and fill in the settings that the user left open.

    Args:
        config: The run of a served model.
        budget: Budget of the probe; None: the config's.

    Returns:
        The config with name, API, thinking tokens and window of the model, and with the profile of its server.

    Raises:
        UserError: The server lists several models and the user named none, refuses a typed setting, or does not
            answer within the budget.
        MachineError: It does not answer.
    """
    if config.model.backend:
        return replace(config, server=make_backend(config.model).profile)
    unnamed = Endpoint(config.model)
    listed = unnamed.models()
    config = _with_name(config, listed, unnamed.listing_problem)
    probe = _Probe(config, budget)
    endpoint = probe.endpoint
    task = config.task
    examples = asked_examples(config, text_encoder(config.model))
    apis = _apis(config, examples)
    encoders = {
        api: text_encoder(replace(config.model, api=api, thinking_tokens=0))
        for api in apis
    }
    name = config.model.server_name
    windows = [m.window for m in listed if m.id == name or len(listed) == 1]
    listed_window = next(filter(None, windows), None)
    answer_tokens = _answer_tokens(task, examples)
    stops = any(example.stop for example in examples)
    choosing = any(example.choices for example in examples)
    kind = (_kind_of_text(task), answer_tokens, stops, choosing)
    key = repr((config.model, apis, kind))
    with probe.in_time("what it takes"):
        profile = endpoint.probe(
            apis,
            _prompts(endpoint, encoders, examples[0]),
            answer_tokens=answer_tokens,
            stops=stops,
            choosing=choosing,
            known=_PROFILES.get(key),
        )
    if profile.speed is None:
        own_windows = [encoder.context_window for encoder in encoders.values()]
        sample = sample_of_prompts(
            examples, min(*own_windows, listed_window or NO_WINDOW)
        )
        make_prompt = _prompt_maker(endpoint, encoders[profile.api], examples[0])
        _measure(probe, make_prompt, sample)
    profile = endpoint.profile
    _PROFILES[key] = profile
    profile = replace(
        profile,
        window=profile.window or listed_window,
        tokens_read=endpoint.tokens_read,
        tokens_written=endpoint.tokens_written,
    )
    return replace(_with_profile(config, endpoint, profile, encoders), server=profile)


def asked_examples(config: Config, encoder: Encoder) -> list[Example]:
    """Return the evaluation examples of a served run as it asks them, under each of its methods.

    Args:
        config: The run.
        encoder: Makes the model's prompts.
    """
    examples = config.task.evaluation()
    if config.study:
        return config.study.asked_examples(encoder, config.task, config.all_methods)
    asked = list[Example]()
    for method in config.method_under_test().methods().values():
        if method.rewrites:
            asked += rewrite_examples(encoder, config.task, examples, method)
        else:
            asked += examples
    return asked


def _kind_of_text(task: Task) -> str:
    """A key of the kind of text in a task's prompts, whatever their number and length."""
    left_out = (*SIZE_FIELDS, *task.sizes, "calibration_positions")
    values = {k: v for k, v in vars(task).items() if k not in left_out}
    return repr(sorted(values.items()))


def _measure(probe: _Probe, make_prompt: MakePrompt, sample: str) -> None:
    """Count the tokens of a sample of the prompts, time it, and measure the number of parallel requests."""
    endpoint = probe.endpoint
    concurrency = probe.config.model.concurrency
    with probe.in_time("tokens and time of a piece of the prompts"):
        endpoint.measure_sample(make_prompt, sample)
    if endpoint.profile.speed is None:
        return
    seconds = endpoint.timings[-1].seconds
    count = concurrency
    if count * seconds > PARALLEL_SECONDS:
        count = min(count, 2)
    tokens = count * len(sample) * _density(endpoint.profile)
    if probe.affords(count * seconds, tokens, PARALLEL_SHARE):
        with probe.in_time("how many requests it answers at a time"):
            endpoint.measure_parallel(make_prompt, sample, count)


def _density(profile: ServerProfile) -> float:
    """Tokens of a character of the prompts, as far as that is known."""
    return profile.tokens_per_character or ASSUMED_TOKENS_PER_CHARACTER


def check_prompts_arrive(
    config: Config, unfitted: Config, budget: Budget | None
) -> Config:
    """Find out whether the longest prompt of a run arrives whole.

    Args:
        config: The run, its prompts fitted to the window that is known.
        unfitted: The same run before that.
        budget: Budget of the check; None: the config's.

    Returns:
        ``config`` where prompts arrive whole or the server's profile says that nobody can know; else ``unfitted``
        with the window that the server really has.

    Raises:
        UserError: The user typed a window that the server does not have.
    """
    profile = config.server
    if profile is None or config.model.backend:
        return config
    examples = asked_examples(config, text_encoder(config.model))
    longest = max(examples, key=lambda example: len(example.prompt.encode()))
    key = (
        repr((config.model.base_url, config.model.server_name, profile.form)),
        _kind_of_text(config.task),
    )
    length = len(longest.prompt)
    probe = _Probe(config, budget)
    known = _DELIVERIES.get(key)
    if known is None or (
        known[1].limit is None and length > SAME_LENGTH_RATIO * known[0]
    ):
        known = (length, _deliver(probe, longest), ())
    _, delivery, timings = known
    speed = profile.speed
    earlier = speed.timings if speed else ()
    timings = tuple(dict.fromkeys((*earlier, *timings, *probe.endpoint.timings)))
    if timings:
        speed = replace(speed or ServerSpeed(timings), timings=timings)
        if not speed.was_timed_at(length):
            _time_prompt(probe, longest, speed)
            timings = tuple(dict.fromkeys((*timings, *probe.endpoint.timings)))
            speed = replace(speed, timings=timings)
    _DELIVERIES[key] = (known[0], delivery, timings)
    profile = replace(
        profile,
        speed=speed,
        delivery=delivery,
        tokens_read=profile.tokens_read + probe.endpoint.tokens_read,
        tokens_written=profile.tokens_written + probe.endpoint.tokens_written,
    )
    if delivery.limit is None:
        return replace(config, server=profile)
    if delivery.tokens_per_character is not None:
        # The sample may have been shortened, too.
        profile = replace(
            profile,
            tokens_per_character=delivery.tokens_per_character,
            overhead_tokens=delivery.overhead_tokens,
        )
    return replace(_with_limit(unfitted, delivery, longest), server=profile)


def _time_prompt(probe: _Probe, longest: Example, speed: ServerSpeed) -> None:
    """Time the longest prompt of a run where no text of about its length was timed, if the budget has room for it."""
    endpoint = probe.endpoint
    length = len(longest.prompt)
    tokens = length * _density(endpoint.profile)
    seconds = speed.seconds_of_request(length, 0)
    if not probe.affords(seconds, tokens, DELIVERY_SHARE):
        return
    encoder = untruncated(text_encoder(probe.config.model))
    make_prompt = _prompt_maker(endpoint, encoder, longest)
    with suppress(RequestError), probe.in_time("how long a prompt takes"):
        endpoint.deliver(make_prompt, cold(longest.prompt), 0)


def _deliver(probe: _Probe, longest: Example) -> Delivery:
    """Whether the longest prompt arrives whole; checked if the budget and the user's consent leave room for it."""
    endpoint = probe.endpoint
    profile = endpoint.profile
    length = len(longest.prompt)
    encoder = untruncated(text_encoder(probe.config.model))
    make_prompt = _prompt_maker(endpoint, encoder, longest)
    tokens = DELIVERY_LENGTHS * length * _density(profile)
    seconds = 0.0
    if profile.speed:
        seconds = DELIVERY_LENGTHS * profile.speed.seconds_of_request(length, 0)
    if not probe.affords(seconds, tokens, DELIVERY_SHARE):
        return Delivery(unchecked="the budget has no room for it")
    if not _may_be_asked(probe.config, tokens):
        return Delivery(
            unchecked=f"it takes about {tokens:,.0f} tokens, which --yes agrees to"
        )

    def ask(text: str, answer_tokens: int) -> Reply:
        probe.need_room()
        return endpoint.deliver(make_prompt, text, answer_tokens)

    try:
        with probe.in_time("whether long prompts arrive whole"):
            return check_delivery(ask, longest.prompt)
    except RequestError as error:
        return Delivery(unchecked=f"the server failed ({error})")


def _may_be_asked(config: Config, tokens: float) -> bool:
    """Whether a server may be sent these requests before the user agreed to the run."""
    is_local = is_on_this_machine(str(config.model.base_url))
    return is_local or config.runtime.yes or tokens <= UNPRICED_TOKENS


def _with_limit(config: Config, delivery: Delivery, longest: Example) -> Config:
    """The config with the window of a server that drops the excess of longer prompts.

    Raises:
        UserError: The user typed a larger one.
    """
    assert delivery.limit is not None, "a limit was met"
    window = delivery.limit
    encoder = text_encoder(replace(config.model, thinking_tokens=0))
    if encoder.tokenizer:
        # In tokens of the tokenizer that prompts are fitted with, which may not be the server's.
        beginning = longest.prompt[: delivery.characters]
        encoded = untruncated(encoder).encode(beginning, chat=longest.chat)
        window = rounded_down(len(encoded.ids))
    elif not delivery.is_counted:
        window = round(window * ASSUMED_TOKENS_PER_CHARACTER)
    typed = config.model.context_window
    if typed is not None and "model.context_window" in config.typed and typed > window:
        allowed = f"at most {window}: {delivery}"
        hint = f"{LARGER_WINDOW}, or set model.context_window={window}"
        raise UserError("model.context_window", typed, allowed, hint)
    values: dict[str, Any] = {"context_window": min(window, typed or window)}
    thinking_tokens = config.model.thinking_tokens
    if thinking_tokens and "model.thinking_tokens" not in config.typed:
        values["thinking_tokens"] = min(thinking_tokens, window // 2)
    return config.with_fields("model", values)


def _with_name(
    config: Config, listed: Sequence[ListedModel], listing_problem: str
) -> Config:
    """The config with the model's name at the server, where the user did not type it.

    Args:
        config: The run.
        listed: The models that the server lists.
        listing_problem: Why its list could not be read.

    Raises:
        UserError: The server lists no model, or several of which none is the run's.
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
        hint = "set model.served=ID"
        if "Expecting value" in listing_problem:
            allowed = "the address of an API: this one answers with no JSON"
            hint = "end the address with /v1 if that is missing"
            raise UserError("model.base_url", model.base_url, allowed, hint)
        if listing_problem.startswith("HTTP 401"):
            raise key_error(model, listing_problem)
        if listing_problem:
            allowed += f" ({listing_problem})"
            hint += ", or repeat the command when the server is ready"
        if names:
            shown = ", ".join(names[:MAX_LISTED_MODELS])
            more = len(names) - MAX_LISTED_MODELS
            allowed = f"one of {shown}" + (f" and {more} more" if more > 0 else "")
        raise UserError("model.served", None, allowed, hint)
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
    endpoint: Endpoint, encoders: Mapping[Api, Encoder], example: Example
) -> dict[Api, Prompt]:
    """The short question in the form of a task's prompts, for each API."""
    return {
        api: _prompt_maker(endpoint, encoder, example, api)(PROBE_QUESTION)
        for api, encoder in encoders.items()
    }


def _prompt_maker(
    endpoint: Endpoint, encoder: Encoder, example: Example, api: Api | None = None
) -> MakePrompt:
    """A function that turns a text into a prompt in the form of the task's prompts.

    Args:
        endpoint: The server.
        encoder: Makes prompts.
        example: One of the task's.
        api: The API; None: the one that was found.
    """

    def make_prompt(text: str) -> Prompt:
        encoded = encoder.encode(text, chat=example.chat)
        return endpoint.prompt_for(api or endpoint.profile.api, encoder, encoded, "")

    return make_prompt


def sample_of_prompts(examples: Sequence[Example], window: int) -> str:
    """Pieces of a few prompts, spread over them and joined; their tokens per character represent all prompts.

    The sample is no longer than the longest prompt, so a server that reads that prompt reads the sample.

    Args:
        examples: The prompts.
        window: Tokens that the sample must not be over, at a token a character.
    """
    longest = max(len(example.prompt) for example in examples)
    characters = min(
        SAMPLE_CHARACTERS,
        max(longest, MIN_SAMPLE_CHARACTERS),
        max(window - 4 * SHORT_PROBE_TOKENS, window // 2),
    )
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
    """The config with the probe's values for settings that the user left open."""
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
    """Return how requests to a probed server are made, for the user, a line each."""
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
    if profile.delivery and str(profile.delivery):
        text = str(profile.delivery).replace("the server reads", "it reads", 1)
        lines.append(f"server: {text}")
    return lines


THINKING_FORMS = {
    "field": "in a field of its own",
    "inline": "between marks in its replies",
    "opened": "up to a mark in its replies",
    "hidden": "unseen",
}


# The cost of a run


@dataclass(frozen=True)
class ServedEstimate:
    """The requests of a run to a server, and their cost, estimated.

    Attributes:
        requests: Number of requests.
        read: Tokens of their prompts.
        written: Tokens of their replies, from the probe's replies.
        written_at_most: Upper bound of ``written``.
        counting: How tokens are counted, in words.
        seconds: Time of the run; None: not known.
        at_once: Requests that the server answers in the time of one; None: not measured.
        cost: Cost of the tokens read and written; None: the price is not known.
        cost_at_most: Upper bound of ``cost``.
    """

    requests: int
    read: int
    written: int
    written_at_most: int
    counting: str
    seconds: float | None
    cost: float | None
    cost_at_most: float | None
    at_once: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens read and written, about."""
        return self.read + self.written

    def plus(self, other: ServedEstimate) -> ServedEstimate:
        """Return this work and another one of the same server."""

        def total(one: float | None, two: float | None) -> float | None:
            return None if one is None or two is None else one + two

        return replace(
            self,
            requests=self.requests + other.requests,
            read=self.read + other.read,
            written=self.written + other.written,
            written_at_most=self.written_at_most + other.written_at_most,
            seconds=total(self.seconds, other.seconds),
            cost=total(self.cost, other.cost),
            cost_at_most=total(self.cost_at_most, other.cost_at_most),
        )

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
        """Return the line printed before the first prompt: requests, tokens, time and money.

        Args:
            concurrency: Requests at a time.
        """
        parts = [
            f"{self.requests:,} requests",
            f"about {self.read:,} tokens read ({self.counting}) and {self.written:,} written, at most "
            f"{self.written_at_most:,}",
        ]
        if self.seconds is not None:
            text = f"about {duration(self.seconds)} at {concurrency} requests at a time"
            if self.at_once and self.at_once < concurrency / 2 and self.seconds > 60:
                text += f", of which the server answers about {self.at_once:.0f}"
            parts.append(text)
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
    """Estimate requests, tokens, time and money of the evaluation of a served model.

    Args:
        config: The run.
        profile: The server's profile, from the probe.
        encoder: Makes the model's prompts.
    """
    task = config.task
    examples = asked_examples(config, encoder)
    characters = [len(e.prompt) + len(e.system) + len(e.prefill) for e in examples]
    per_character, overhead, counting = _token_count(profile, encoder, examples)
    by_likelihoods = profile.choice_method == BY_LOG_LIKELIHOODS
    requests = 0
    all_characters = 0
    read = 0.0
    written = 0.0
    written_at_most = 0
    thinking_tokens = config.model.thinking_tokens or 0
    thought = profile.reply_tokens if profile.thinking else 0
    for example, size in zip(examples, characters, strict=True):
        repeats = len(example.choices) if by_likelihoods and example.choices else 1
        requests += repeats
        all_characters += repeats * size
        read += repeats * (size * per_character + overhead)
        if by_likelihoods and example.choices:
            written_at_most += repeats
            continue
        longest = example.max_new_tokens or task.max_new_tokens
        if example.choices:
            longest = CHOICE_TOKENS
        answer = per_character * max(map(len, example.answers), default=0)
        if example.answer_cue:
            # The model quotes an item first.
            lengths = [end - start for start, end in example.items]
            answer += per_character * sum(lengths) / max(len(lengths), 1)
        written += min(answer + REPLY_OVERHEAD_TOKENS, longest) + thought
        written_at_most += longest + thinking_tokens
    written = min(written, written_at_most)
    price = config.model.price
    return ServedEstimate(
        requests=requests,
        read=round(read),
        written=round(written),
        written_at_most=written_at_most,
        counting=counting,
        seconds=_seconds(config, profile, requests, all_characters, written),
        cost=price_of(read, written, price),
        cost_at_most=price_of(read, written_at_most, price),
        at_once=profile.speed.parallel if profile.speed else None,
    )


def _token_count(
    profile: ServerProfile, encoder: Encoder, examples: Sequence[Example]
) -> tuple[float, int, str]:
    """Tokens per character of prompts, tokens of a prompt outside its text, and in words how they were counted."""
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
    characters: float,
    written: float,
) -> float | None:
    """The time of a run, from the requests of the probe; None where that is not known."""
    if not (profile.speed and requests):
        return None
    concurrency = min(config.model.concurrency, requests)
    return profile.speed.seconds_of_requests(
        requests, characters / requests, written / requests, concurrency
    )


def need_consent(config: Config, estimate: ServedEstimate, console: Console) -> None:
    """Ask whether a run may start that costs money, or much of an unknown price.

    Servers on this machine need no consent, nor does a run with a budget of money or tokens.

    Raises:
        UserError: The user refuses, or cannot be asked and did not consent beforehand.
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


def probe_server_if_it_answers(config: Config, budget: Budget | None) -> Config:
    """The same as :func:`probe_server`; where a server does not answer, a run that is made may still be shown.

    Raises:
        UserError: As :func:`probe_server`.
        MachineError: The server does not answer, and the user did not name its model.
    """
    try:
        return probe_server(config, budget)
    except MachineError:
        is_complete = config.model.api != "auto" and (
            config.model.served or "model.name" in config.typed
        )
        if not is_complete:
            raise
        return config
