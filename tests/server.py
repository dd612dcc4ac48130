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

KEY = "sk-of-the-test-0123456789"
Fault = Callable[[str, int], str]
"""What goes wrong with a prompt that is asked for the n-th time (from 0); empty: nothing."""


def value(prompt: str) -> str:
    """The value that a compact prompt of kv_retrieval asks for; of every fourth prompt a wrong one."""
    pairs = dict(re.findall(r'"(\w+)": "(\w+)"', prompt))
    asked = re.search(r'key "(\w+)" is "$', prompt)
    right = pairs.get(asked[1], "") if asked else " B"
    return "bal" if sum(map(ord, prompt)) % 4 == 0 else right


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
    """Answers of a model called ``fake``; ``asked`` counts every prompt, ``most`` requests at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, fault: Fault, ways: tuple[str, ...], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.fault = fault
        self.ways = ways
        # what stands for the log-probability of the last token
        self.last_nats: Any = None
        # makes the text of a reply from its data
        self.written: Callable[[Any], str] = json.dumps
        # fields that it refuses, and in whose words
        self.refused_fields: tuple[str, ...] = ()
        self.refusal_style = "openai"
        # whether its checkpoint's generation_config.json has penalties
        self.has_penalties = False
        self.asked = Counter[str]()
        self.lock = Lock()
        self.now = self.most = 0
        self.bodies: list[Mapping[str, Any]] = []
        self.keys = set[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serving(
    fault: Fault = lambda prompt, n: "", ways: tuple[str, ...] = (), port: int = 0
) -> Iterator[Server]:
    """A server that runs inside the block; ``ways`` are those of telling choices that it has."""
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
        self.give({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(str(self.headers["Authorization"]))
            count = self.server.asked[prompt]
            self.server.asked[prompt] += 1
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        self.held = True
        try:
            self.answer(body, prompt, self.server.fault(prompt, count))
        finally:
            self.leave()

    def leave(self) -> None:
        """Count a request as done, once: before the client can know, who then sends the next one."""
        if getattr(self, "held", False):
            self.held = False
            with self.server.lock:
                self.server.now -= 1

    def answer(self, body: Mapping[str, Any], prompt: str, fault: str) -> None:
        chat = "messages" in body
        if fault.isdigit():
            said = f"fault {fault} of {self.headers['Authorization']}"
            return self.give({"error": {"message": said}}, int(fault))
        if fault == "overflow":
            said = "This model's maximum context length is 64 tokens. However, you requested 99 tokens."
            return self.give(
                {"error": {"message": said, "code": "context_length_exceeded"}}, 400
            )
        refused = [name for name in self.server.refused_fields if name in body]
        if refused:
            return self.give(*refusal(refused, self.server.refusal_style))
        if fault == "late":
            time.sleep(0.6)
        text, finish, logprobs = self.said(body, prompt)
        if self.server.has_penalties and not is_neutral(body):
            text = "penalised"
        if fault == "filter":
            text = ""
            finish = "content_filter"
        part = (
            {"message": {"role": "assistant", "content": text}}
            if chat
            else {"text": text}
        )
        choice = {"index": 0, "finish_reason": finish, "logprobs": logprobs, **part}
        choices = [choice]
        if fault == "unfinished":
            choice["finish_reason"] = None
        if fault == "reversed":
            choices = [{**choice, "index": 1, "text": "wrong"}, choice]
        if fault == "second":
            choice["index"] = 1
        if fault == "surrogate":
            choice["text"] = "caf\ud83d"
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "total_tokens": len(prompt) + 1,
        }
        whole = {
            "id": "1",
            "object": "text_completion",
            "created": 1,
            "model": "fake",
            "choices": choices,
        }
        self.give({**whole, "usage": usage, "system_fingerprint": "fp_1"}, cut=fault)

    def said(self, body: Mapping[str, Any], prompt: str) -> tuple[str, str, Any]:
        """Text, finish reason and log-likelihoods of a reply."""
        ways = self.server.ways
        if body.get("echo") and "echo" in ways:
            tokens = re.findall(r"\s?\w+|\W", prompt)
            nats = [
                None,
                *(-float(sum(map(ord, token)) % 7) - 0.5 for token in tokens[1:]),
            ]
            if self.server.last_nats is not None:
                nats[-1] = self.server.last_nats
            return prompt, "length", {"tokens": tokens, "token_logprobs": nats}
        if body.get("top_logprobs") and "first" in ways:
            top = [{"token": "B", "logprob": -0.5}, {"token": "A", "logprob": -1.0}]
            return "B", "length", {"content": [{"token": "B", "top_logprobs": top}]}
        if body.get("logprobs") and "first" in ways:
            return (
                " B",
                "length",
                {"top_logprobs": [{" C": -0.3, " A": -1.5, "x": -0.1}]},
            )
        return value(prompt), "stop", None

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
        if status == 429:
            self.send_header("Retry-After", "0.01")
        if status >= 429:
            self.send_header("retry-after-ms", "1")
        self.send_header("Connection", "close")
        self.leave()
        self.end_headers()
        self.wfile.write(sent)
        self.close_connection = True


def main(port: int, most: int) -> None:
    """Serve until so many prompts were asked, and die of SIGKILL."""
    count = 0

    def fault(prompt: str, n: int) -> str:
        nonlocal count
        count += 1
        if count > most:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    server = Server(fault, (), port)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
