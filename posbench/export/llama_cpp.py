"""llama.cpp in this process, through xllamacpp: how a GGUF file reads a text, and what it says comes next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from posbench.errors import UserError
from posbench.export.base import Prompts
from posbench.late import Tensor, torch


def serve(model: Path, tokens: int, adapter: Path | None = None) -> Any:
    """A server of a GGUF file on a free port of this machine, with float32 caches for as many tokens.

    Raises:
        UserError: llama.cpp does not load the files.
    """
    import xllamacpp  # type: ignore[import-untyped]

    settings = xllamacpp.CommonParams()
    settings.model.path = str(model)
    settings.verbosity = 0
    settings.n_ctx = tokens
    settings.n_parallel = 1
    settings.warmup = settings.fit_params = False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = (
        xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = (
        torch.get_num_threads()
    )
    if adapter is not None:
        settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    try:
        return xllamacpp.Server(settings)
    except RuntimeError as error:
        allowed = f"files that it loads ({error})"
        raise UserError("llama.cpp", model.name, allowed, "--to checkpoint") from error


def next_token(server: Any, prompts: Prompts, vocabulary: int) -> Tensor:
    """As :func:`posbench.export.base.next_token`, from a server; NaN below -80 nats, where its float32 ends.

    Raises:
        UserError: It does not answer a prompt, or not with a distribution.
    """
    found = torch.full((len(prompts), vocabulary), torch.nan, dtype=torch.float64)
    # The server tells of no token that is part of a character: let it choose one that is not.
    settings = {
        "max_tokens": 1,
        "n_probs": vocabulary,
        "logit_bias": [[tokens(server, "a")[-1], 1e6]],
    }
    for row, prompt in zip(found, prompts, strict=True):
        answer = server.handle_completions(
            {"prompt": list(prompt), "cache_prompt": False, **settings}
        )
        said = (
            answer["choices"][0]["logprobs"]["content"]
            if "choices" in answer
            else [{"top_logprobs": []}]
        )
        for token in said[0]["top_logprobs"]:
            if token["logprob"] is not None and token["logprob"] > -80:
                row[token["id"]] = token["logprob"]
        if not 0.999 < row.exp().nansum() < 1.001:
            told = answer.get("error", {}).get(
                "message", "its probabilities do not add up to 1"
            )
            allowed = f"prompts that it answers ({told})"
            raise UserError(
                "llama.cpp", f"{len(prompt)} tokens", allowed, "shorter prompts"
            )
    return found


def tokens(server: Any, text: str) -> Sequence[int]:
    """A text as the server reads it, with the tokens that it puts before."""
    data = json.dumps(
        {"content": text, "add_special": True, "parse_special": True}
    ).encode()
    direct = build_opener(ProxyHandler({}))
    with direct.open(
        Request(f"{server.listening_address}/tokenize", data), timeout=60
    ) as reply:
        return json.load(reply)["tokens"]
