"""Simulated readers behind an OpenAI-compatible server, with a known position bias, and a log for them to read."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Curve = Callable[[int, int], float]
"""Probability that a document is read, by its index and the number of documents."""

CURVES: dict[str, Curve] = {
    "primacy": lambda i, n: 0.95 - 0.6 * i / max(n - 1, 1),
    "recency": lambda i, n: 0.35 + 0.6 * i / max(n - 1, 1),
    "u": lambda i, n: 0.2 + 0.75 * abs(2 * i / max(n - 1, 1) - 1),
    "inverted_u": lambda i, n: 0.95 - 0.75 * abs(2 * i / max(n - 1, 1) - 1),
    "first_three": lambda i, n: 0.95 if i < 3 else 0.05,
    "distractors": lambda i, n: max(1.1 - 0.1 * n, 0.2),
    "flat_70": lambda i, n: 0.7,
    "flat_95": lambda i, n: 0.95,
}
PROBE_REPLY = "ok"


def write_log(path: Path, questions: int, documents: int, seed: int) -> None:
    """Write a log whose gold document is more often among the first, as a retriever ranks it."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(questions):
            gold = min(int(rng.expovariate(1 / 2.5)), documents - 1)
            names = [f"item{number}x{k}" for k in range(documents)]
            docs = [
                {
                    "id": f"d{rng.randrange(10**6):06d}-{k}",
                    "title": f"Sheet {rng.randrange(1000)}",
                    "text": f"The code of {name} is {rng.randrange(10**6, 10**7)}.",
                    "score": round(20 - k + rng.random() / 2, 3),
                }
                for k, name in enumerate(names)
            ]
            answer = docs[gold]["text"].rstrip(".").split()[-1]
            line = {
                "id": f"q{number}",
                "query": f"What is the code of {names[gold]}?",
                "contexts": docs,
                "answers": [answer],
            }
            file.write(json.dumps(line) + "\n")


def reply_of(prompt: str, curve: Curve, seed: int) -> str:
    """The reader's reply: the code that the prompt gives, where it reads one of the documents that hold it."""
    asked = re.findall(r"What is the code of (\w+)\?", prompt)
    if not asked:
        return PROBE_REPLY
    name = asked[-1]
    documents = re.findall(r"The code of (\w+) is (\d+)\.", prompt)
    # Documents that stand twice are read as two lists.
    length = len(dict.fromkeys(documents)) or 1
    code = dict(documents).get(name)
    for copy, start in enumerate(range(0, len(documents), length)):
        found = [
            k for k, (n, _) in enumerate(documents[start : start + length]) if n == name
        ]
        rng = random.Random(f"{seed} {name} {copy}")
        if found and code and rng.random() < curve(found[0], length):
            return f"The code is {code}."
    wrong = [c for n, c in documents if n != name]
    return (
        f"The code is {random.Random(f'{seed} {prompt}').choice(wrong)}."
        if wrong
        else "I do not know."
    )


@contextmanager
def reading(curve: Curve, seed: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve a reader; ``server.prompts`` holds what it was asked, ``server.url`` is its address."""
    prompts: list[str] = []
    totals = {"read": 0, "written": 0}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Say nothing."""

        def give(self, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.give(
                {"object": "list", "data": [{"id": "reader", "max_model_len": 100_000}]}
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body.get("prompt") or body["messages"][-1]["content"]
            reply = reply_of(prompt, curve, seed)
            if "What is the code of" in prompt and not prompt.startswith("Check "):
                prompts.append(prompt)
            usage = {
                "prompt_tokens": len(prompt.split()) + 8,
                "completion_tokens": len(reply.split()),
            }
            usage["total_tokens"] = sum(usage.values())
            totals["read"] += usage["prompt_tokens"]
            totals["written"] += usage["completion_tokens"]
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": "stop",
                "logprobs": None,
            }
            if "messages" in body:
                choice["message"] = {"role": "assistant", "content": reply}
            else:
                choice["text"] = reply
            self.give(
                {
                    "id": "x",
                    "object": "reply",
                    "model": "reader",
                    "choices": [choice],
                    "usage": usage,
                }
            )

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.prompts, server.totals = prompts, totals
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
