"""An OpenAI-compatible server in a thread that answers kv_retrieval, and fails where it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

PROBE = "1 + 1 = ?\nA. 1\nB. 2\nAnswer:"
"""What a server is asked first."""
KEY = "sk-of-the-test-0123456789"
Fault = Callable[[str, int], str]
"""What goes wrong with a prompt that is asked for the n-th time (from 0); empty: nothing."""


def right_value(prompt: str) -> str:
    """The value that a compact prompt of kv_retrieval, or a text of the probe, asks for; a letter for any other."""
    asked = re.search(r'\nKey: "(\w+)"\nCorresponding value:$', prompt)
    if asked:
        found = re.search(rf'"{asked[1]}": "(\w+)"', prompt)
        return found[1] if found else "unknown"
    pairs = dict(re.findall(r'"(\w+)": "(\w+)"', prompt))
    asked = re.search(r'key "(\w+)" is "$', prompt)
    return pairs.get(asked[1], "") if asked else " B"


def value(prompt: str) -> str:
    """The same; of every fourth question a wrong one."""
    if not is_question(prompt):
        return right_value(prompt)
    return "bal" if sum(map(ord, prompt)) % 4 == 0 else right_value(prompt)


def gold_position(prompt: str) -> int:
    """The index of the pair that a compact prompt asks for; 0 for any other prompt."""
    keys = [key for key, _ in re.findall(r'"(\w+)": "(\w+)"', prompt)]
    asked = re.search(r'key "(\w+)" is "$', prompt)
    return keys.index(asked[1]) if asked and asked[1] in keys else 0


def is_neutral(body: Mapping[str, Any]) -> bool:
    """Whether a request undoes the penalties of a checkpoint, in the words of any server."""
    names = ("repetition_penalty", "repeat_penalty")
    penalties = [float(body[name]) for name in names if name in body]
    if "generation_config" in body:
        settings = json.loads(body["generation_config"])
        penalties.append(settings.get("repetition_penalty", 1.05))
    additive = [body.get(f"{name}_penalty", 0.5) for name in ("presence", "frequency")]
    return set(penalties) == {1.0} and set(additive) == {0}


def refusal(names: list[str], style: str) -> tuple[dict[str, Any], int]:
    """What real servers answer to fields that they do not know: body and status."""
    if style == "openai":  # one at a time
        message = f"Unrecognized request argument supplied: {names[0]}"
        return {"error": {"message": message, "param": None}}, 400
    if style == "model":
        message = f"Unsupported parameter: '{names[0]}' is not supported with fake."
        return {"error": {"message": message, "param": names[0]}}, 400
    if style == "transformers":
        return {"detail": f"Unexpected fields in the request: {set(names)}"}, 422
    assert style == "pydantic"
    message = "Extra inputs are not permitted"
    details = [{"loc": ["body", name], "msg": message, "input": 1} for name in names]
    return {"detail": details}, 422


class Server(ThreadingHTTPServer):
    """Answers of a model called ``fake``; ``asked`` counts every prompt, ``most`` requests at a time.

    What stands below is how a plain server is; tests change it.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, fault: Fault, ways: tuple[str, ...], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.fault = fault
        self.ways = ways
        # the entries of its list of models; None: it has no such list
        self.listed: list[dict[str, Any]] | None = [{"id": "fake", "object": "model"}]
        # the status with which it refuses that list
        self.list_refusal: int | None = None
        # the address to which it redirects questions
        self.moved_to = ""
        self.apis = ("completions", "chat")
        # what stands for the log-probability of the last token
        self.last_nats: Any = None
        # makes the text of a reply from its data
        self.written: Callable[[Any], str] = json.dumps
        # fields that it refuses, and in whose words
        self.refused_fields: tuple[str, ...] = ()
        self.refusal_style = "openai"
        # requests that it refuses without a word on the reason
        self.refuses_all: Callable[[Mapping[str, Any]], bool] = lambda body: False
        # the only temperature that it takes; None: any
        self.temperature: float | None = None
        # the most tokens of a reply that it takes
        self.max_reply_tokens: int | None = None
        # tokens of prompt and reply that it takes
        self.window: int | None = None
        # the model that it reports; what it appends to all texts that it sends, by the header of the key
        self.model = "fake"
        self.echo: Callable[[str], str] = lambda header: ""
        # the likeliest first tokens of a reply in a chat
        self.first_tokens = {"B": -0.5, "A": -1.0}
        # whether its checkpoint's generation_config.json has penalties
        self.has_penalties = False
        # the right answer to a prompt; tokens of thinking before it, and how that is given
        self.answer: Callable[[str], str] = lambda prompt: value(prompt)
        self.thinking: Callable[[str], int] | None = None
        self.thinking_form = "reasoning_content"
        # tokens of a prompt of so many characters; None: not told
        self.count_tokens: Callable[[int], int] | None = lambda characters: characters
        self.cached_share = 0.0
        # what it lets its model read of a prompt
        self.reads: Callable[[str], str] = lambda prompt: prompt
        # requests that it takes in a span of seconds, and what it tells of that: "retry-after", "headers" or ""
        self.rate: tuple[int, float] | None = None
        self.rate_told = "retry-after"
        self.times: list[float] = []
        # requests after which the quota is spent
        self.quota: int | None = None
        self.num_busy = 0
        self.asked = Counter[str]()
        self.lock = Lock()
        self.now = self.most = 0
        self.bodies: list[Mapping[str, Any]] = []
        self.keys = set[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def questions(self) -> list[Mapping[str, Any]]:
        """The requests that ask questions of a task: those of the probe have several lines."""
        return [body for body in self.bodies if is_question(prompt_of(body))]


def prompt_of(body: Mapping[str, Any]) -> str:
    """The text of a request's prompt."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def is_question(prompt: str) -> bool:
    """Whether a prompt is a compact one of kv_retrieval, or another in one line, and no piece of some."""
    return "\n" not in prompt


def forget_servers() -> None:
    """Forget what this process learned of servers: another one may have the port of an earlier one."""
    served = sys.modules.get("posbench.pipeline.served")
    if served:
        served._PROFILES.clear()
        served._DELIVERIES.clear()


@contextmanager
def serving(
    fault: Fault = lambda prompt, n: "", ways: tuple[str, ...] = (), port: int = 0
) -> Iterator[Server]:
    """A server that runs inside the block; ``ways`` are those of telling choices that it has."""
    forget_servers()
    server = Server(fault, ways, port)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        if self.server.list_refusal:
            return self.refuse("Missing API key", self.server.list_refusal)
        if self.server.listed is None or not self.path.endswith("/models"):
            return self.give({"detail": "Not Found"}, 404)
        self.give({"object": "list", "data": self.server.listed})

    def do_POST(self) -> None:
        if self.server.moved_to:
            self.send_response(301)
            self.send_header("Location", self.server.moved_to + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = prompt_of(body)
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(str(self.headers["Authorization"]))
            count = self.server.asked[prompt]
            if is_question(prompt):
                self.server.asked[prompt] += 1
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        self.held = True
        try:
            is_piece = not is_question(prompt) and prompt != PROBE
            fault = "" if is_piece else self.server.fault(prompt, count)
            self.answer(body, self.server.reads(prompt), fault)
        finally:
            self.leave()

    def leave(self) -> None:
        """Count a request as done, once: before the client can know, who then sends the next one."""
        if getattr(self, "held", False):
            self.held = False
            with self.server.lock:
                self.server.now -= 1

    def refuse(self, message: str, status: int = 400, **error: Any) -> None:
        """An error in OpenAI's form."""
        self.give({"error": {"message": message, **error}}, status)

    def answer(self, body: Mapping[str, Any], prompt: str, fault: str) -> None:
        chat = "messages" in body
        server = self.server
        is_offered = ("chat" if chat else "completions") in server.apis
        if not is_offered or self.path.count("completions") > 1:
            return self.give({"detail": "Not Found"}, 404)
        if server.quota is not None and len(server.bodies) > server.quota:
            said = "You exceeded your current quota, please check your plan and billing details."
            kind = "insufficient_quota"
            return self.refuse(said, 429, type=kind, code=kind)
        if server.rate and self.is_too_soon(*server.rate):
            said = "Rate limit reached for requests per min; see account/billing to raise it"
            return self.refuse(said, 429, type="requests", code="rate_limit_exceeded")
        if fault.isdigit():
            said = f"fault {fault} of {self.headers['Authorization']}"
            return self.refuse(said, int(fault))
        if fault == "overflow":
            return self.refuse_length(64)
        if self.refuses_fields(body, prompt):
            return None
        if fault == "late":
            time.sleep(0.6)
        self.give_reply(body, prompt, fault)
        return None

    def is_too_soon(self, count: int, seconds: float) -> bool:
        """Whether a request is one too many of those of the last seconds."""
        with self.server.lock:
            now = time.monotonic()
            times = [t for t in self.server.times if now - t < seconds]
            is_over = len(times) >= count
            if not is_over:
                times.append(now)
            self.server.num_busy += is_over
            self.server.times = times
            return is_over

    def refuse_length(self, window: int) -> None:
        said = f"This model's maximum context length is {window} tokens. However, you requested 99 tokens."
        self.refuse(said, code="context_length_exceeded")

    def refuses_fields(self, body: Mapping[str, Any], prompt: str) -> bool:
        """Refuse a request for its fields, where the server does so."""
        server = self.server
        most = body.get("max_tokens", body.get("max_completion_tokens", 16))
        refused = [name for name in server.refused_fields if name in body]
        temperature = body.get("temperature", server.temperature)
        if server.refuses_all(body):
            self.refuse("Bad Request")
        elif "max_tokens" in refused:
            said = (
                "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead."
            )
            self.refuse(said, param="max_tokens", code="unsupported_parameter")
        elif refused:
            self.give(*refusal(refused, server.refusal_style))
        elif server.temperature is not None and temperature != server.temperature:
            said = (
                f"Unsupported value: 'temperature' does not support {temperature} with this model. "
                f"Only the default ({server.temperature}) value is supported."
            )
            self.refuse(said, param="temperature", code="unsupported_value")
        elif server.max_reply_tokens and most > server.max_reply_tokens:
            self.refuse(
                f"max_tokens is too large: {most}. This model supports at most {server.max_reply_tokens} "
                f"completion tokens, whereas you provided {most}."
            )
        elif server.window and most + self.num_tokens(prompt) > server.window:
            self.refuse_length(server.window)
        else:
            return False
        return True

    def num_tokens(self, prompt: str) -> int:
        """Tokens of a prompt."""
        count = self.server.count_tokens
        return count(len(prompt)) if count else 0

    def give_reply(self, body: Mapping[str, Any], prompt: str, fault: str) -> None:
        text, finish, logprobs = self.said(body, prompt)
        echo = self.server.echo(str(self.headers["Authorization"]))
        text += echo
        message: dict[str, Any] = {}
        if self.server.has_penalties and not is_neutral(body):
            text = "penalised"
        written = 1
        thought = 0
        if self.server.thinking and not logprobs:
            most = body.get("max_tokens", body.get("max_completion_tokens", 16))
            thought = min(self.server.thinking(prompt), most)
            finish = "length" if thought == most else "stop"
            written = min(thought + 1, most)
            text, message = self.thought(prompt, text, thought, finish == "stop")
        if fault == "filter":
            text = ""
            finish = "content_filter"
        message = {"role": "assistant", "content": text, **message}
        part = {"message": message} if "messages" in body else {"text": text}
        choice = {"index": 0, "finish_reason": finish, "logprobs": logprobs, **part}
        if hasattr(self, "prompt_logprobs"):
            choice["prompt_logprobs"] = self.prompt_logprobs
        choices = [choice]
        if fault == "unsaid":
            del choice["finish_reason"]
        if fault == "reversed":
            choices = [{**choice, "index": 1, "text": "wrong"}, choice]
        if fault == "second":
            choice["index"] = 1
        if fault == "surrogate":
            choice["text"] = "caf\ud83d"
        whole = {
            "id": "1",
            "object": "text_completion",
            "created": 1,
            "model": self.server.model + echo,
            "choices": choices,
            "system_fingerprint": "fp_1" + echo,
        }
        prompt_tokens = self.num_tokens(prompt)
        if self.server.count_tokens:
            whole["usage"] = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": written,
                "total_tokens": prompt_tokens + written,
            }
            if self.server.cached_share:
                cached = int(self.server.cached_share * prompt_tokens)
                whole["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
            if self.server.thinking and self.server.thinking_form == "hidden":
                details = {"reasoning_tokens": thought}
                whole["usage"]["completion_tokens_details"] = details
        self.give(whole, cut=fault)

    def thought(
        self, prompt: str, text: str, tokens: int, is_whole: bool
    ) -> tuple[str, dict[str, Any]]:
        """Text and further fields of a message of a model that thought before it answered.

        The thinking names the right value, whatever the model says then.
        """
        form = self.server.thinking_form
        thinking = " ".join(["hm"] * tokens) + f" maybe {right_value(prompt)}"
        answer = text if is_whole else ""
        if form in ("reasoning_content", "reasoning"):
            return answer, {form: thinking}
        if form in ("hidden", "uncounted"):
            return answer, {}
        begin = "" if form == "opened" else "<think>"
        if is_whole:
            return f"{begin}{thinking}</think>\n\n{answer}", {}
        return f"{begin}{thinking}", {}

    def said(self, body: Mapping[str, Any], prompt: str) -> tuple[str, str, Any]:
        """Text, finish reason and log-likelihoods of a reply."""
        ways = self.server.ways
        if body.get("echo") and ("echo" in ways or "echo1" in ways):
            if "echo1" in ways and not body["max_tokens"]:
                return value(prompt), "stop", None
            tokens = re.findall(r"\s?\w+|\W", prompt)
            nats = [None, *map(nats_of, tokens[1:])]
            if self.server.last_nats is not None:
                nats[-1] = self.server.last_nats
            if "echo1" in ways:
                tokens.append(" more")
                nats.append(-9.0)
            return prompt, "length", {"tokens": tokens, "token_logprobs": nats}
        if body.get("prompt_logprobs") == 0 and "prompt_logprobs" in ways:
            tokens = re.findall(r"\s?\w+|\W", prompt)
            self.prompt_logprobs = [
                None,
                *(
                    {str(hash(t)): {"logprob": nats_of(t), "rank": 1}}
                    for t in tokens[1:]
                ),
            ]
        if body.get("top_logprobs") and "first" in ways:
            first = self.server.first_tokens
            top = [{"token": t, "logprob": nats} for t, nats in first.items()]
            token = next(iter(first))
            return token, "length", {"content": [{"token": token, "top_logprobs": top}]}
        if body.get("logprobs") and "first" in ways:
            return (
                " B",
                "length",
                {"top_logprobs": [{" C": -0.3, " A": -1.5, "x": -0.1}]},
            )
        return self.server.answer(prompt), "stop", None

    def give(self, data: Any, status: int = 200, cut: str = "") -> None:
        """A JSON body; half of it where it is ``torn`` on the way or ``cut`` short as if that were all."""
        written = self.server.written if "choices" in data else json.dumps
        text = written(data).encode()
        if cut == "deep":
            text = b"[" * 100_000 + b"]" * 100_000
        sent = text[: len(text) // 2] if cut in ("torn", "cut") else text
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text if cut == "torn" else sent)))
        for name, header in self.rate_headers(status).items():
            self.send_header(name, header)
        self.send_header("Connection", "close")
        self.leave()
        self.end_headers()
        self.wfile.write(sent)
        self.close_connection = True

    def rate_headers(self, status: int) -> dict[str, str]:
        """What a server tells of its limits."""
        server = self.server
        if server.rate and server.rate_told == "headers":
            count, seconds = server.rate
            with server.lock:
                left = count - len(server.times)
                since = time.monotonic() - min(server.times, default=time.monotonic())
            return {
                "x-ratelimit-limit-requests": "1",
                "x-ratelimit-remaining-requests": str(left),
                "x-ratelimit-reset-requests": f"{1000 * max(seconds - since, 0):.0f}ms",
            }
        if server.rate and server.rate_told != "retry-after":
            return {}
        if server.rate and status == 429:
            count, seconds = server.rate
            with server.lock:
                wait = min(server.times) + seconds - time.monotonic()
            return {"Retry-After": f"{max(wait, 0):.3f}"}
        return {"Retry-After": "0.02"} if status >= 429 else {}


def nats_of(token: str) -> float:
    """What stands for the log-probability of a token."""
    return -float(sum(map(ord, token)) % 7) - 0.5


def main(port: int, most: int) -> None:
    """Serve until so many prompts were asked, and die of SIGKILL."""
    count = 0

    def fault(prompt: str, n: int) -> str:
        nonlocal count
        count += is_question(prompt)
        if count > most:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    server = Server(fault, (), port)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
