"""Behind RoPE on trained models (Figures 3, 5, 8, 11-16): mean scores before the softmax per layer, and Gram panels (a) to (i).

``make score-maps``, or ``python -m posbench.studies.score_maps --help``. Sums over heads and samples are kept, never single
maps, so memory does not grow with the number of samples.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

import posbench
from posbench import arch
from posbench.errors import UserError
from posbench.hooks import attending
from posbench.lm import LM
from posbench.plots import PAGE, new_figure, save, styled
from posbench.record import write_bytes
from posbench.studies.causal_mask import draw_map, maps
from posbench.theory.causal_mask import diagonal_normalised

Array = NDArray[np.float64]
PANELS = {
    "a": "LN(X)",
    "b": "scores of layer 1",
    "c": "A V",
    "d": "A V W_O",
    "e": "(d) + X",
    "f": "LN of (e)",
    "g": "output of block 1",
    "h": "input of attention 2",
    "i": "scores of layer 2",
}
"""The paper's nine intermediates of the first two layers."""


def samples(lm: LM, count: int, tokens: int, text: Path | None, seed: int) -> tuple[list[list[int]], str]:
    """Token rows of one length, from a local text file or drawn at random, and what they are.

    Args:
        lm: The model whose tokenizer reads the text, or whose vocabulary is drawn from.
        count: Rows.
        tokens: Tokens per row, a beginning-of-sequence token counted where the tokenizer has one.
        text: UTF-8 text; None draws whole tokens evenly.
        seed: Seed of the draws, and of the order in which pieces of a text are taken.

    Raises:
        UserError: The text is missing or too short.
    """
    rng = random.Random(seed)
    special = set(lm.tokenizer.all_special_ids) if lm.tokenizer else set()
    start = lm.encode("").ids[:1] if lm.tokenizer else []
    inner = tokens - len(start)
    if text is None:
        size = len(lm.tokenizer) if lm.tokenizer else arch.text_config(lm.model).vocab_size
        usable = [i for i in range(size) if i not in special]
        return [start + rng.choices(usable, k=inner) for _ in range(count)], f"random tokens, seed {seed}"
    try:
        whole = text.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(field="--text", value=str(text), allowed="a UTF-8 text file", hint=f"check the path ({error})") from error
    ids = list(lm._tokenizer()(whole, add_special_tokens=False)["input_ids"])
    pieces = [ids[i : i + inner] for i in range(0, len(ids) - inner + 1, inner)]
    if len(pieces) < count:
        hint = f"use --samples {len(pieces)}, fewer --tokens, or a longer text"
        raise UserError(field="--text", value=f"{len(ids)} tokens", allowed=f"{count} pieces of {inner} tokens", hint=hint)
    return [start + piece for piece in rng.sample(pieces, count)], f"{text.name}, pieces drawn with seed {seed}"


@torch.inference_mode()
def score_maps(lm: LM, rows: Sequence[Sequence[int]], batch_size: int = 8) -> Array:
    """Mean score before the softmax of every pair, [L, n, n]: after rotation and scaling, over heads and samples.

    Entries above the diagonal are not a number: the causal mask shuts them.

    Raises:
        UserError: Attention of this family does not run through the library's functions.
    """
    _check_interface(lm)
    length = len(rows[0])
    total = torch.zeros(lm.layers, length, length, dtype=torch.float64)

    def read(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, following: Any, **rest: Any) -> Any:
        total[module.layer_idx] += _scores(query, key, rest.get("scaling")).sum(0).double().cpu()
        return following(module, query, key, value, mask, **rest)

    with attending(lm.model, read):
        for at in range(0, len(rows), batch_size):
            lm.model(**lm.pad(rows[at : at + batch_size]), use_cache=False, logits_to_keep=1)
    found = (total / len(rows)).numpy()
    return np.where(np.tri(length, dtype=bool), found, np.nan)


@torch.inference_mode()
def gram_panels(lm: LM, rows: Sequence[Sequence[int]], batch_size: int = 8) -> dict[str, Array]:
    """Mean inner products between tokens of nine intermediates of the first two layers, each [n, n]; see :data:`PANELS`.

    Raises:
        UserError: The family has no ``o_proj`` and ``post_attention_layernorm`` in its layers, or too few layers.
    """
    _check_interface(lm)
    attentions = arch.attention_modules(lm.model)
    by_module = {id(module): module for module in lm.model.modules()}
    layers = [m for m in by_module.values() if any(child is attentions[0] for child in m.children())]
    norm = getattr(layers[0], "post_attention_layernorm", None) if layers else None
    if len(attentions) < 2 or norm is None or not hasattr(attentions[0], "o_proj"):
        raise UserError(
            field="model",
            value=lm.name,
            allowed="two layers or more with o_proj and post_attention_layernorm (Llama, Qwen2, Mistral, SmolLM3, ...)",
            hint="in Python, score_maps needs neither",
        )
    length = len(rows[0])
    total = {name: torch.zeros(length, length, dtype=torch.float64) for name in PANELS}
    kept: dict[str, Tensor] = {}

    def add(name: str, states: Tensor) -> None:
        flat = states.float()
        total[name].add_((flat @ flat.transpose(1, 2)).sum(0).double().cpu())

    def read(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, following: Any, **rest: Any) -> Any:
        if module.layer_idx < 2:
            total["bi"[module.layer_idx]].add_(_scores(query, key, rest.get("scaling")).sum(0).double().cpu())
        return following(module, query, key, value, mask, **rest)

    def entering(name: str) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            add(name, arch.attention_input(args, kwargs))

        return hook

    def keep_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept["X"] = arch.attention_input(args, kwargs)

    def left(_: Any, __: Any, out: Any) -> None:
        states = out[0] if isinstance(out, tuple) else out
        add("d", states)
        add("e", states + kept["X"])

    first = attentions[0]
    with ExitStack() as stack:
        for handle in (
            layers[0].register_forward_pre_hook(keep_input, with_kwargs=True),
            first.register_forward_pre_hook(entering("a"), with_kwargs=True),
            first.o_proj.register_forward_pre_hook(lambda _, args: add("c", args[0])),
            first.register_forward_hook(left),
            norm.register_forward_hook(lambda _, __, out: add("f", out)),
            layers[0].register_forward_hook(lambda _, __, out: add("g", out[0] if isinstance(out, tuple) else out)),
            attentions[1].register_forward_pre_hook(entering("h"), with_kwargs=True),
        ):
            stack.callback(handle.remove)
        stack.enter_context(attending(lm.model, read))
        for at in range(0, len(rows), batch_size):
            lm.model(**lm.pad(rows[at : at + batch_size]), use_cache=False, logits_to_keep=1)
    causal = np.tri(length, dtype=bool)
    return {name: np.where(causal, (value / len(rows)).numpy(), np.nan) for name, value in total.items()}


def _scores(query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
    """Scores before the softmax, averaged over heads, [B, n, n]."""
    keys = repeat_kv(key, query.shape[1] // key.shape[1]).float()
    return (query.float() @ keys.transpose(-1, -2)).mean(1) * (scaling or query.shape[-1] ** -0.5)


def _check_interface(lm: LM) -> None:
    family = arch.family_of(lm.model)
    if not family.interface:
        raise UserError(
            field="model", value=lm.name, allowed=f"a family whose attention runs through the library; {family.name} does not",
            hint="take another model",
        )  # fmt: skip


@styled
def panels_figure(panels: dict[str, Array], model: str) -> Figure:
    """Behind RoPE, Figure 3: the nine intermediates, each with its own colours."""
    figure = new_figure(PAGE, 6.2)
    for axes, (name, values) in zip(figure.subplots(3, 3).flat, panels.items(), strict=True):
        draw_map(figure, axes, values)
        axes.set_title(f"({name}) {PANELS[name]}")
    figure.suptitle(model, fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, draw and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["tiny", "tiny_nope"], help="names in conf/model, directories or hub ids")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=50, help="the paper: 50 for the panels, 1024 for the maps of large models")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file; without it random tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("outputs/score_maps"))
    options = parser.parse_args(argv)
    console = Console()
    try:
        for name in options.models:
            lm = posbench.load(name)
            rows, what = samples(lm, options.samples, options.tokens, options.text, options.seed)
            folder = options.out / lm.name
            folder.mkdir(parents=True, exist_ok=True)
            found, panels = score_maps(lm, rows, options.batch_size), gram_panels(lm, rows, options.batch_size)
            write_npz(folder / "maps.npz", scores=found, normalised=diagonal_normalised(found), **panels)
            shown = [(f"{lm.name}", found[:4]), (f"{lm.name}, normalised", diagonal_normalised(found[:4]))]
            save(maps(shown), folder / "score_maps")
            save(panels_figure(panels, f"{lm.name}: {len(rows)} samples, {what}"), folder / "gram")
            lower = np.tril_indices(options.tokens, -1)
            left = [np.var(diagonal_normalised(layer)[lower]) / np.var(layer[lower]) for layer in found]
            words = ", ".join(f"{share:.2f}" for share in left)
            console.print(f"{lm.name} ({what}): share of the scores' variance beyond i - j, layer by layer: {words}.")
    except UserError as error:
        console.print(f"posbench: {error}", soft_wrap=True)
        return 2
    console.print(f"written: {options.out}", soft_wrap=True)
    return 0


def write_npz(path: Path, **arrays: Array) -> None:
    """Write arrays in one compressed file, whole or not at all."""
    from io import BytesIO

    stream = BytesIO()
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    write_bytes(path, stream.getvalue())


if __name__ == "__main__":
    raise SystemExit(main())
