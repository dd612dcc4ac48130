"""Find the channel, factor and layers of scale_channel on calibration data (Yu et al. 2025, Algorithm 1)."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from torch import Tensor, nn

import posbench
from posbench.errors import UserError
from posbench.files.atomic import Row, digest, write_bytes, write_csv, write_text
from posbench.methods import ScaleChannel
from posbench.methods.composed import Composed
from posbench.methods.scale_channel import check_layers, prefill
from posbench.model import families as arch
from posbench.model.hooks import fork
from posbench.model.lm import LM, batches
from posbench.pipeline.config import Config
from posbench.run.base import Run, complete, search_once
from posbench.search import Candidate, ChannelSearch, statistics
from posbench.search.curve_run import beside, others
from posbench.search.statistics import Array, ChannelStatistics
from posbench.tasks import Example

LOSSES = "search.jsonl"
STATE = "search_state.npz"
RESULTS = ("search.csv", "channels.csv", "found.yaml")


def run(run: Run) -> None:
    """Search, write ``search.csv``, ``channels.csv`` and ``found.yaml``, and hand the result to the later
    stages."""
    key = digest(
        {
            "identity": run.identity,
            "search": run.config.raw["search"],
            "task": run.config.raw["task"],
            "layers": ranges(run),
            "channel": run.config.typed.get("channel"),
            **others(run),
        }
    )
    whole = run.config.trial()
    outer = list(whole.parts.values())[:-1] if isinstance(whole, Composed) else []

    def work() -> None:
        with ExitStack() as stack:
            for part in outer:
                stack.enter_context(part.applied(run.lm))
            _search(run)

    search_once(run, key, RESULTS, work)
    block = yaml.safe_load((run.out.path / "found.yaml").read_text())["scale_channel"]
    run.found = {name: block[name] for name in ("channel", "factor", "layers")}
    text = (
        "the unmodified model"
        if block["channel"] is None
        else f"channel {block['channel']} x {block['factor']}, layers {block['layers']}"
    )
    if block["channel"] is None:
        run.found = {"channel": 0, "factor": 1.0, "layers": [0, 0]}
    remark = (
        ""
        if block["loss"] < block["loss_unmodified"]
        else "; no candidate lowers the loss of the unmodified model"
    )
    run.console.print(
        f"search chose {text}: loss {block['loss']:.4f}, unmodified {block['loss_unmodified']:.4f}{remark}"
    )
    if "evaluate" not in run.config.stages:
        run.console.print(
            "paste into the model's YAML:\n\n" + (run.out.path / "found.yaml").read_text(), soft_wrap=True
        )


def check(config: Config, lm: LM) -> None:
    """Refuse strings and layers that do not fit the model, before anything runs.

    Raises:
        UserError: A length or a layer range does not fit.
    """
    search = _settings(config)
    low = 301 if search.variant == "official" else search.window + search.skip + 7
    if not low <= search.length <= lm.context_window:
        why = (
            "variant=official skips 300 positions"
            if search.variant == "official"
            else "search.window + search.skip + 7"
        )
        raise UserError(
            "search.length",
            search.length,
            f"from {low} ({why}) to {lm.context_window} (context window of {lm.name})",
            "change search.length, or shorten search.window",
        )
    typed = config.typed.get("channel")
    if typed is not None and not isinstance(typed, int):
        raise UserError(
            f"method.parts.{config.part}.channel" if config.part else "method.channel",
            typed,
            "one channel, with the search stage",
            "leave the search out: stages=[intervene,evaluate,report]",
        )
    if isinstance(search.layers, tuple):
        check_layers(lm, "search.layers", search.layers)


def _settings(config: Config) -> ChannelSearch:
    assert isinstance(config.search, ChannelSearch)
    return config.search


def ranges(run: Run) -> list[tuple[int, int]]:
    """The layer ranges that the search of a run tries: a typed one, those of the search, or the model's
    published one."""
    typed = run.config.typed.get("layers")
    if typed:
        return [tuple(typed)]
    block = run.config.model.scale_channel or {}
    published = tuple(block["layers"]) if block.get("layers") else None
    return _settings(run.config).layer_ranges(run.lm.layers, published)  # type: ignore[arg-type]


def _search(run: Run) -> None:
    search, lm = _settings(run.config), run.lm
    averages = average_states(lm, search, run)
    found = search.statistics(averages)
    candidates = search.ask(found, ranges(run), run.config.typed.get("channel"))
    each = calibration_losses(run, LOSSES, candidates)
    unmodified, table, n = float(each[0].mean()), each[1:].mean(1), each.shape[1]
    best = search.choose(table, unmodified)
    write_csv(run.out.path / "search.csv", _table(candidates, table, unmodified, n, found, best))
    winner = candidates[int(table.argmin()) if best is None else best]
    write_csv(run.out.path / "channels.csv", _curves(averages, winner.channel, search))
    write_text(
        run.out.path / "found.yaml",
        _block(run, None if best is None else winner, float(table.min()), unmodified, n),
    )
    (run.out.path / STATE).unlink(missing_ok=True)


def calibration_losses(run: Run, file: str, candidates: Sequence[Candidate]) -> Array:
    """Answer losses on the calibration examples, [1 + C, N], see :func:`candidate_losses`; resumed from a
    JSON-lines file."""
    examples = run.examples("calibration")
    answers = {e.id: run.lm.answer_ids(e.prompt, e.answers[0]) for e in examples}
    plan = batches([len(answers[e.id][0]) for e in examples], _settings(run.config).batch_size)

    def compute(batch: Sequence[Example]) -> list[Row]:
        losses = candidate_losses(run.lm, [answers[e.id] for e in batch], candidates)
        return [{"unmodified": row[0], "losses": row[1:]} for row in losses.T.tolist()]

    rows = complete(
        run,
        file,
        f"search: {len(candidates)} candidates",
        [[examples[i] for i in group] for group in plan],
        lambda e: {"id": e.id},
        compute,
    )
    by_id = {row["id"]: row for row in rows}
    return np.array([[by_id[e.id]["unmodified"], *by_id[e.id]["losses"]] for e in examples]).T


def _table(
    candidates: list[Candidate],
    losses: Array,
    unmodified: float,
    n: int,
    found: ChannelStatistics,
    best: int | None,
) -> pd.DataFrame:
    order = np.argsort(losses, kind="stable")
    return pd.DataFrame(
        {
            "rank": range(1, len(order) + 1),
            "channel": [candidates[i].channel for i in order],
            "factor": [candidates[i].factor for i in order],
            "layer_first": [candidates[i].layers[0] for i in order],
            "layer_last": [candidates[i].layers[1] for i in order],
            "loss": losses[order],
            "loss_unmodified": unmodified,
            "n": n,
            "monotone_layers": [int(found.monotone_layers[candidates[i].channel]) for i in order],
            "smoothness": [float(found.smoothness[candidates[i].channel]) for i in order],
            "selected": [int(i) == best for i in order],
        }
    )


def _curves(averages: dict[str, Array], channel: int, search: ChannelSearch) -> pd.DataFrame:
    """The channel's curve per site and layer, beside the sliding mean that the paper's filter looks at."""
    parts = []
    for site, values in averages.items():
        curve = values[:, :, channel]
        layer, position = np.indices(curve.shape)
        smooth = np.full(curve.shape, np.nan)
        if search.variant == "paper":
            smooth[:, search.window // 2 : search.window // 2 + curve.shape[1] - search.window + 1] = (
                statistics.sliding_mean(curve[:, :, None], search.window)[:, :, 0]
            )
            # The first positions are dropped before the fit.
            smooth[:, : search.window // 2 + search.skip] = np.nan
        parts.append(
            pd.DataFrame(
                {
                    "channel": channel,
                    "site": site,
                    "layer": layer.ravel(),
                    "position": position.ravel(),
                    "value": curve.ravel(),
                    "sliding_mean": smooth.ravel(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _block(run: Run, winner: Candidate | None, loss: float, unmodified: float, n: int) -> str:
    """The model YAML block to paste, with where it comes from."""
    search = _settings(run.config)
    block = {
        "channel": winner.channel if winner else None,
        "factor": winner.factor if winner else None,
        "layers": list(winner.layers) if winner else None,
        "loss": round(loss, 6),
        "loss_unmodified": round(unmodified, 6),
        "source": (
            f"posbench {posbench.__version__} search ({search.candidates} candidates, variant {search.variant}, {search.site}, "
            f"{search.strings} strings of {search.length} tokens, {n} calibration examples, seed {search.seed})"
            f"{beside(run.config)}; run {run.out.path.name}"
        ),
    }
    return yaml.safe_dump({"scale_channel": block}, sort_keys=False, width=1000)


# Averages over random strings


@dataclass
class _Sums:
    """Running sums of hidden states, saved so that a killed search goes on where it was."""

    count: int
    sums: dict[str, Tensor]

    def save(self) -> bytes:
        buffer = BytesIO()
        np.savez(buffer, count=self.count, **{name: value.cpu().numpy() for name, value in self.sums.items()})
        return buffer.getvalue()


@torch.inference_mode()
def average_states(lm: LM, search: ChannelSearch, run: Run | None = None) -> dict[str, Array]:
    """Hidden states averaged over random strings, without a beginning-of-sequence token.

    Args:
        lm: The model.
        search: Number, length, alphabet and seed of the strings.
        run: Saves progress in this run's folder; None keeps it in memory.

    Returns:
        ``attention_input`` [L, P, D]: the tensor after each layer's first norm; ``residual`` [L + 1, P, D]:
        embedding, block outputs, the last after the final norm, as in transformers' ``hidden_states``.
        float32.
    """
    window = lm.context_window
    if search.length > window:
        raise UserError(
            "search.length", search.length, f"at most {window} (context window of {lm.name})", "shorten it"
        )
    rows = random_strings(lm, search)
    state = _Sums(0, {})
    saved = run.out.path / STATE if run else None
    if saved and saved.is_file():
        with np.load(saved) as data:
            state = _Sums(
                int(data["count"]),
                {n: torch.tensor(data[n], device=lm.device) for n in data.files if n != "count"},
            )
    captured: dict[str, dict[int, Tensor]] = {"attention_input": {}, "residual": {}}

    def capture(site: str, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = arch.attention_input(args, kwargs)
            captured[site][layer] = hidden.float().sum(0)

        return hook

    family, base = arch.family_of(lm.model), lm.model.base_model
    with ExitStack() as stack:
        for index, layer in enumerate(lm.model.get_submodule(family.layers)):  # type: ignore[arg-type]
            attention = getattr(layer, family.attention)
            for site, module in (("residual", layer), ("attention_input", attention)):
                stack.callback(
                    module.register_forward_pre_hook(capture(site, index), with_kwargs=True).remove
                )
        advance = (
            stack.enter_context(run.progress("search: random strings", len(rows))) if run else lambda n: None
        )
        advance(state.count)
        saved_at = state.count
        for start in range(state.count, len(rows), search.batch_size):
            batch = torch.tensor(rows[start : start + search.batch_size], device=lm.device)
            out = base(input_ids=batch, use_cache=False)
            captured["residual"][lm.layers] = out.last_hidden_state.float().sum(0)
            for site, parts in captured.items():
                total = torch.stack([parts[i].to(lm.device) for i in sorted(parts)])
                state.sums[site] = state.sums[site] + total if site in state.sums else total
            state.count += len(batch)
            advance(len(batch))
            if saved and state.count - saved_at >= 200:
                write_bytes(saved, state.save())
                saved_at = state.count
    return {name: (value / state.count).cpu().numpy() for name, value in state.sums.items()}


def random_strings(lm: LM, search: ChannelSearch) -> list[list[int]]:
    """Token ids of the random strings, ``search.strings`` rows of exactly ``search.length``."""
    rng, tokenizer = random.Random(f"posbench random strings {search.seed}"), lm._tokenizer()
    if search.alphabet == "tokens":
        special = set(tokenizer.all_special_ids)
        ids = [i for i in range(len(tokenizer)) if i not in special]
        return [rng.choices(ids, k=search.length) for _ in range(search.strings)]
    rows: list[list[int]] = []
    while len(rows) < search.strings:
        ids, letters = list[int](), search.length * 4
        while len(ids) < search.length:
            text = "".join(rng.choices(string.ascii_letters + string.digits, k=letters))
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            letters *= 2
        rows.append(ids[: search.length])
    return rows


@torch.inference_mode()
def candidate_losses(
    lm: LM, pairs: Sequence[tuple[list[int], list[int]]], candidates: Sequence[Candidate]
) -> Array:
    """Answer loss of the unmodified model and of every candidate, from one prefill.

    Args:
        lm: The model.
        pairs: Prompt and answer token ids, B of them (:meth:`LM.answer_ids`).
        candidates: C candidates.

    Returns:
        [1 + C, B] nats per answer token, the unmodified model first; each equals what the candidate gives on
        its own.
    """
    model, forward = lm.model, lm.model.forward
    inputs, targets = lm.pad_with_answers(pairs)
    # The last prompt token and the answer, but for its last token, run together on every candidate's keys.
    rows = targets.shape[1]
    head = {"attention_mask": inputs["attention_mask"][:, :-rows]}
    head |= {name: inputs[name][:, :-rows] for name in ("input_ids", "position_ids")}
    tail = {"attention_mask": inputs["attention_mask"]} | {
        name: inputs[name][:, -rows:] for name in ("input_ids", "position_ids")
    }
    channels = sorted({c.channel for c in candidates})
    layers = sorted({layer for c in candidates for layer in range(c.layers[0], c.layers[1] + 1)})
    prefix, _ = prefill(model, forward, channels, layers, logits_to_keep=1, **head)
    losses = [
        lm.answer_nats(forward(past_key_values=fork(prefix.cache), use_cache=True, **tail).logits, targets)
    ]
    for candidate in candidates:
        method = ScaleChannel(channel=candidate.channel, factor=candidate.factor, layers=candidate.layers)
        out = method.continue_with(
            model, forward, past_key_values=prefix.fork(model, method), use_cache=True, **tail
        )
        losses.append(lm.answer_nats(out.logits, targets))
    return torch.stack(losses).double().cpu().numpy()
