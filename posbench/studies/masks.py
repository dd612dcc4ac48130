"""Wu et al. 2025, Section 4: what the theorems predict beside what stacks of attention do, and the rollout of a model.

``make masks``, or ``python -m posbench.studies.masks --help``. Everything but the rollout needs no model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

import posbench
from posbench.lm import LM
from posbench.plots import PAGE, line_style, new_figure, save, styled
from posbench.record import write_csv
from posbench.studies.precision import task_of
from posbench.theory import masks

Array = NDArray[np.float64]
M = -float(np.log(0.8))  # the decay of the paper's runs, gamma 0.8
ITEMS = 17  # tokens of the paper's sequences: eight pairs and a query


def causal_rates(n: int = 32, layers: int = 40, tokens: Sequence[int] = (2, 3, 5, 10)) -> pd.DataFrame:
    """Weight of token j (from 1) in the last row under a causal mask of equal weights, and the bound of Theorem 4.1.

    Returns:
        Rows of layers, token, weight, bound, predicted (the rate log j of the eigenvalue 1/j, drawn back from the last weight).
    """
    found = masks.rollout([masks.uniform(masks.causal(n))] * layers)
    rows = []
    for j in tokens:
        last = found[-1][-1, j - 1]
        for t, weights in enumerate(found, start=1):
            bound = masks.causal_bound(n, t, 1 / n)[j - 1]
            rows.append((t, j, weights[-1, j - 1], bound, last * float(j) ** (layers - t)))
    return pd.DataFrame(rows, columns=["layers", "token", "weight", "bound", "predicted"])


def half_times(n: int = 32, widths: Sequence[int] = (2, 3, 5, 9, 17, 32)) -> pd.DataFrame:
    """Layers until half of the last token's weight is on the first one, per window width, and the drift's prediction."""
    rows = []
    for width in widths:
        weights, state, t = masks.uniform(masks.window(n, width)), np.eye(n), 0
        while state[-1, 0] < 0.5:
            state, t = weights @ state, t + 1
        rows.append((width, t, masks.window_half_time(n, width)))
    return pd.DataFrame(rows, columns=["width", "measured", "predicted"])


def decay_rows(n: int = 256, m: float = M, layers: Sequence[int] = (2, 4, 6, 10, 16)) -> pd.DataFrame:
    """The last row under a decay mask of equal scores by distance, and the negative binomial law of Theorem 4.5."""
    found = masks.rollout([masks.attention(masks.decay(n, m), masks.causal(n))] * max(layers))
    distance = np.arange(n)
    parts = []
    for t in layers:
        values = {"weight": found[t - 1][-1, ::-1], "predicted": masks.decay_law(t, m, distance)}
        parts.append(pd.DataFrame({"layers": t, "distance": distance, **values}))
    return pd.concat(parts, ignore_index=True)


def peaks(m: Sequence[float] = (M, 0.5), layers: Sequence[int] = (2, 4, 6, 10, 16), n: int = 512) -> pd.DataFrame:
    """Distance of the largest weight behind the first token, measured and as t / (e^m - 1)."""
    rows = []
    for each in m:
        found = masks.rollout([masks.attention(masks.decay(n, each), masks.causal(n))] * max(layers))
        for t in layers:
            row = found[t - 1][-1, ::-1][:-1]
            rows.append((each, t, int(row.argmax()), masks.decay_peak(t, each)))
    return pd.DataFrame(rows, columns=["m", "layers", "measured", "predicted"])


def item_mass(layers: Sequence[int] = (2, 4, 6)) -> pd.DataFrame:
    """Weight of the last token on the first, middle and last item of the paper's sequences, with equal scores."""
    kinds = {"no PE, causal": np.zeros((ITEMS, ITEMS)), "decay 0.8, causal": masks.decay(ITEMS, M)}
    rows = []
    for name, scores in kinds.items():
        found = masks.rollout([masks.attention(scores, masks.causal(ITEMS))] * max(layers))
        for t in layers:
            last = found[t - 1][-1]
            rows += [(name, t, place, last[2 * i] + last[2 * i + 1]) for place, i in (("first", 0), ("middle", 4), ("last", 7))]
    return pd.DataFrame(rows, columns=["attention", "layers", "item", "weight"])


@torch.inference_mode()
def _attentions(lm: LM, prompts: Sequence[Sequence[int]]) -> Iterator[Array]:
    """All attention weights of each prompt, [L, H, n, n], from eager attention."""
    before = lm.model.config.get_text_config()._attn_implementation
    lm.model.set_attn_implementation("eager")
    try:
        for ids in prompts:
            out = lm.model(**lm.pad([ids]), output_attentions=True, use_cache=False)
            yield np.stack([weights[0].double().cpu().numpy() for weights in out.attentions])
    finally:
        lm.model.set_attn_implementation(before)


def model_rollout(lm: LM, prompts: Sequence[Sequence[int]], residual: float = 0.5, places: int = 10) -> pd.DataFrame:
    """Where the last token's content comes from, layer by layer: attention rollout of a model, averaged over heads.

    Args:
        lm: A model; it runs with eager attention inside.
        prompts: Token ids.
        residual: Share of a layer's own input: 0 is the theory's product of attentions, 0.5 Abnar and Zuidema's rollout.
        places: Equal parts of the prompt to sum over.

    Returns:
        Rows of layers, part (from 0), weight (mean over prompts), n.
    """
    total = np.zeros((lm.layers, places))
    for stack in _attentions(lm, prompts):
        mixed = [residual * np.eye(len(weights)) + (1 - residual) * weights for weights in stack.mean(1)]
        for layer, found in enumerate(masks.rollout(mixed)):
            total[layer] += [part.sum() for part in np.array_split(found[-1], places)]
    at, part = np.indices(total.shape)
    values = {"layers": at.ravel() + 1, "part": part.ravel(), "weight": total.ravel() / len(prompts)}
    return pd.DataFrame({**values, "n": len(prompts)})


def model_sinks(lm: LM, prompts: Sequence[Sequence[int]], tokens: int = 64) -> pd.DataFrame:
    """Both sink metrics of a model on the first tokens of each prompt, which is where sinks are looked for.

    Args:
        lm: A model; it runs with eager attention inside.
        prompts: Token ids, each at least that long to count.
        tokens: Tokens T of each prompt (Gu et al.: 64).

    Returns:
        Rows of token (from 0), by_head (Gu et al.), by_entry (Wu et al.), n.
    """
    long = [list(ids[:tokens]) for ids in prompts if len(ids) >= tokens]
    weights = np.stack(list(_attentions(lm, long)))
    values = {"by_head": masks.sink_by_head(weights), "by_entry": masks.sink_by_entry(weights, masks.causal(tokens))}
    return pd.DataFrame({"token": np.arange(tokens), **values, "n": len(long)})


@styled
def theory_figure(rates: pd.DataFrame, halves: pd.DataFrame, rows: pd.DataFrame, tops: pd.DataFrame) -> Figure:
    """Theorems 4.1, 4.2 and 4.5: dots are stacks of attention with equal scores, lines are predictions."""
    figure = new_figure(PAGE, 4.6)
    one, two, three, four = figure.subplots(2, 2).flat
    for index, (token, line) in enumerate(rates.groupby("token")):
        style = line_style(index)
        one.plot(line["layers"], line["weight"], **style | {"linestyle": "none"}, label=f"token {token}")
        one.plot(line["layers"], line["predicted"], color=style["color"], linewidth=0.8)
        one.plot(line["layers"], line["bound"], color=style["color"], linewidth=0.8, linestyle=":")
    one.set(yscale="log", ylim=(rates["weight"].min() / 3, 2), xlabel="layers", ylabel="weight in the last row")
    one.set_title("4.1 causal: rate log j (line), bound (dotted)")
    two.plot(halves["width"], halves["measured"], "o", color="black", label="measured")
    two.plot(halves["width"], halves["predicted"], label="2 (n - 1) / (w - 1)")
    two.set(xscale="log", yscale="log", xlabel="window width w", ylabel="layers to half on token 1", title="4.2 window")
    for axis, ticks in ((two.xaxis, halves["width"]), (two.yaxis, halves["measured"])):
        axis.set_ticks(list(ticks), [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    for index, (layers, line) in enumerate(rows.groupby("layers")):
        style, inner = line_style(index, of=rows["layers"].nunique()), line.iloc[:-1]
        three.plot(inner["distance"], inner["weight"], color=style["color"], linewidth=3, alpha=0.4)
        three.plot(inner["distance"], inner["predicted"], color=style["color"], linewidth=0.8, label=f"{layers} layers")
    three.set(xlim=(0, 130), xlabel="distance to the query", ylabel="weight", title="4.5 decay: negative binomial (thin)")
    for index, (m, line) in enumerate(tops.groupby("m")):
        four.plot(line["predicted"], line["measured"], **line_style(index) | {"linestyle": "none"}, label=f"m {m:.3g}")
    ends = [0, tops["predicted"].max()]
    four.plot(ends, ends, color="0.5", linewidth=0.8)
    four.set(xlabel="t / (e^m - 1)", ylabel="measured peak distance", title="4.5 decay: where the peak stands")
    for axes in (one, two, three, four):
        axes.legend()
    return figure


@styled
def rollout_figure(parts: dict[str, pd.DataFrame], model: str) -> Figure:
    """Rollout of a model by depth of the prompt, a line per number of layers; a panel per share of the residual stream."""
    figure = new_figure(PAGE, 2.6)
    for axes, (title, frame) in zip(figure.subplots(1, len(parts)), parts.items(), strict=True):
        count = frame["part"].nunique()
        for index, (layers, line) in enumerate(frame.groupby("layers")):
            label = f"{layers} layer{'s' if layers > 1 else ''}"
            axes.plot(
                100 * (line["part"] + 0.5) / count, line["weight"], label=label, **line_style(index, of=frame["layers"].nunique())
            )
        axes.set(xlabel="place in the prompt (%)", ylabel="weight of the last token", title=f"{model}: {title}", ylim=(0, None))
        axes.legend()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Compute, draw, write CSVs, and say what agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="model of the rollout")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("outputs/masks"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    frames = {"causal_rates": causal_rates(), "half_times": half_times(), "decay_rows": decay_rows(), "peaks": peaks()}
    save(theory_figure(*frames.values()), options.out / "theory")
    frames["item_mass"] = item_mass()
    lm = posbench.load(options.model)
    examples = task_of(options.model).examples("evaluation")
    chosen = examples[:: max(len(examples) // options.prompts, 1)][: options.prompts]
    prompts = [lm.encode(e.prompt).ids for e in chosen]
    parts = {"attention alone": model_rollout(lm, prompts, 0.0), "with the residual stream": model_rollout(lm, prompts, 0.5)}
    save(rollout_figure(parts, options.model), options.out / "rollout")
    frames["rollout"] = pd.concat([frame.assign(rollout=name) for name, frame in parts.items()], ignore_index=True)
    frames["sinks"] = model_sinks(lm, prompts)
    for name, frame in frames.items():
        write_csv(options.out / f"{name}.csv", frame)
    console, rates = Console(), frames["causal_rates"]
    second = rates[rates["token"] == 2]["weight"].to_numpy()
    law = (
        frames["decay_rows"].query("distance < 100")["weight"] - frames["decay_rows"].query("distance < 100")["predicted"]
    ).abs()
    console.print(f"4.1: token 2 loses a factor {second[-2] / second[-1]:.4f} per layer at the end (2 predicted); bound broken: "
                  f"{int((rates['weight'] > rates['bound'] + 1e-12).sum())} times.")  # fmt: skip
    console.print(f"4.5: largest distance to the negative binomial law, distances below 100: {law.max():.1e}.")
    for name, frame in parts.items():
        last = frame[frame["layers"] == lm.layers]["weight"].to_numpy()
        inner = last[1:-1]
        console.print(
            f"{options.model}, {name}: first tenth {last[0]:.3f}, last {last[-1]:.3f}, lowest inner one {inner.min():.3f}."
        )
    sinks = frames["sinks"]
    top, other = sinks.iloc[0], sinks.iloc[1:]
    share = {name: f"{100 * top[name]:.1f} % and {100 * other[name].max():.1f} %" for name in ("by_head", "by_entry")}
    console.print(f"{options.model}, attention sinks, token 1 and the strongest other: {share['by_head']} of heads (Gu et al.), ")
    console.print(f"{share['by_entry']} of entries (Wu et al.).")
    console.print(f"written: {options.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
