"""llama.cpp in this process, through xllamacpp: its tokens and its next-token predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from posbench.errors import UserError
from posbench.export.base import Prompts
from posbench.late import Tensor, torch

MIN_LOG_PROBABILITY = -80
"""Nats; below, the server's float32 probabilities underflow."""


def serve(model: Path, tokens: int, adapter: Path | None = None) -> Any:
    """Start a server of a GGUF file on a free port of this machine.

    Args:
        model: The GGUF file.
        tokens: Capacity of its cache, which is in float32.
        adapter: A LoRA adapter in GGUF.

    Raises:
        UserError: llama.cpp does not load the files.
    """
    import xllamacpp  # type: ignore[import-untyped]

    settings = xllamacpp.CommonParams()
    settings.model.path = str(model)
    settings.verbosity = 0
    settings.n_ctx = tokens
    settings.n_parallel = 1
    settings.warmup = False
    settings.fit_params = False
    settings.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    flash_attention = xllamacpp.llama_flash_attn_type
    settings.flash_attn_type = flash_attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = torch.get_num_threads()
    settings.cpuparams_batch.n_threads = torch.get_num_threads()
    if adapter is not None:
        settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    try:
        return xllamacpp.Server(settings)
    except RuntimeError as error:
        allowed = f"files that llama.cpp can load ({error})"
        raise UserError("llama.cpp", model.name, allowed, "--to checkpoint") from error


def next_token(server: Any, prompts: Prompts, vocabulary: int) -> Tensor:
    """Predict the next token of each prompt with a server.

    Args:
        server: Result of :func:`serve`.
        prompts: N prompts as token ids.
        vocabulary: Number of tokens in the model's vocabulary.

    Returns:
        Log-probabilities in nats, shape (N, vocabulary), float64; NaN below -80 nats.

    Raises:
        UserError: It does not answer a prompt, or not with a distribution.
    """
    log_probabilities = torch.full(
        (len(prompts), vocabulary), torch.nan, dtype=torch.float64
    )
    # The server reports no token that is part of a character: force one that is not.
    whole_character = tokens(server, "a")[-1]
    settings = {
        "max_tokens": 1,
        "n_probs": vocabulary,
        "logit_bias": [[whole_character, 1e6]],
    }
    for row, prompt in zip(log_probabilities, prompts, strict=True):
        request = {"prompt": list(prompt), "cache_prompt": False, **settings}
        answer = server.handle_completions(request)
        predictions = []
        if "choices" in answer:
            content = answer["choices"][0]["logprobs"]["content"]
            predictions = content[0]["top_logprobs"]
        for prediction in predictions:
            value = prediction["logprob"]
            if value is not None and value > MIN_LOG_PROBABILITY:
                row[prediction["id"]] = value
        total = row.exp().nansum()
        if not 0.999 < total < 1.001:
            error = answer.get("error", {})
            reason = error.get("message", "its probabilities do not add up to 1")
            allowed = f"prompts that llama.cpp can answer ({reason})"
            raise UserError(
                "llama.cpp", f"{len(prompt)} tokens", allowed, "use shorter prompts"
            )
        # The server adds them up in float32, which was off by 1.6e-4 for 49,152 tokens.
        row -= total.log()
    return log_probabilities


def tokens(server: Any, text: str) -> Sequence[int]:
    """Return the token ids of a text as the server reads it, with the special tokens (such as BOS) that it adds.

    Args:
        server: Result of :func:`serve`.
        text: The text.
    """
    request = {"content": text, "add_special": True, "parse_special": True}
    url = f"{server.listening_address}/tokenize"
    # Without the proxies of the environment: the server is on this machine.
    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, json.dumps(request).encode()), timeout=60) as reply:
        return json.load(reply)["tokens"]
