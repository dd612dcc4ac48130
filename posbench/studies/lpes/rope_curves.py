"""What a RoPE scale does: slower decay with distance, other attention waves, and more attention to the middle
of a prompt.

LPES, Figures 3-5. ``make rope-curves``, or ``python -m posbench.studies.lpes.rope_curves --help``. The first
two need no model; the third is measured on one, under position_interpolation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

import posbench
from posbench.files.atomic import write_csv
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.model.lm import LM, batches
from posbench.plots.base import PAGE, line_style, new_figure, save, styled
from posbench.studies.cost.precision import task_of

SCALES = (1.0, 1.2, 1.5, 2.0)
BASES = (10000.0, 17500.0, 25000.0)
Z95 = 1.959963984540054


def wave(
    distance: NDArray[np.float64], dim: int = 128, base: float = 10000.0, scale: float = 1.0
) -> NDArray[np.float64]:
    """Attention score of two equal unit vectors at a distance in tokens, as RoPE alone makes it.

    Args:
        distance: Relative distances m, [n].
        dim: Size d of a head.
        base: Theta of the rotary embedding.
        scale: Divisor of the positions.

    Returns:
        (2 / sqrt(d)) sum over k < d / 2 of cos(m / scale * base^(-2k / d)), [n].

    Source: Attention Buckets (Chen et al. 2023), the waveform; LPES, Figures 3 and 4.
    """
    frequencies = base ** (-2 * np.arange(dim // 2) / dim)
    return 2 / np.sqrt(dim) * np.cos(np.outer(distance / scale, frequencies)).sum(1)


def decay(
    distance: NDArray[np.float64], dim: int = 128, base: float = 10000.0, scale: float = 1.0
) -> NDArray[np.float64]:
    """Upper bound of a score's size at a distance: the mean size of partial sums of e^(i m theta_k), [n].

    Source: Su et al. 2021 (RoFormer), Section 3.4.3, the long-term decay.
    """
    angles = np.outer(distance / scale, base ** (-2 * np.arange(dim // 2) / dim))
    return np.abs(np.cumsum(np.exp(1j * angles), axis=1)).mean(1)


@torch.inference_mode()
def attention_to_thirds(
    lm: LM, prompts: Sequence[Sequence[int]], scales: Sequence[float], batch_size: int = 16
) -> pd.DataFrame:
    """Share of the last token's attention that goes to each third of the prompt, per scale and layer.

    Args:
        lm: A model with rotary embedding.
        prompts: Token ids; the thirds are of each prompt's own tokens.
        scales: Scales of position_interpolation.
        batch_size: Prompts per forward.

    Returns:
        Rows of scale, layer, third (first, middle, last), attention (mean over heads and prompts), ci_low,
        ci_high (95 %, normal, over prompts), n.
    """
    rows = []
    for scale in scales:
        found = np.zeros((len(prompts), lm.layers, 3))
        with PositionInterpolation(scale=scale).applied(lm):
            for batch in batches([len(p) for p in prompts], batch_size):
                inputs = lm.pad([prompts[i] for i in batch])
                with lm.last_attention() as weights:
                    lm.model(**inputs, use_cache=False, logits_to_keep=1)
                for layer in range(lm.layers):
                    mean = weights[layer].mean(1).double().cpu().numpy()
                    for row, i in zip(mean, batch, strict=True):
                        own = row[-len(prompts[i]) :]
                        found[i, layer] = [part.sum() for part in np.array_split(own, 3)]
        half = Z95 * found.std(0, ddof=1) / np.sqrt(len(prompts))
        for layer, third in np.ndindex(lm.layers, 3):
            mean = found[:, layer, third].mean()
            ends = (mean - half[layer, third], mean + half[layer, third])
            rows.append((scale, layer, ("first", "middle", "last")[third], mean, *ends, len(prompts)))
    return pd.DataFrame(rows, columns=["scale", "layer", "third", "attention", "ci_low", "ci_high", "n"])


@styled
def curves_figure(distance: NDArray[np.float64], dim: int) -> Figure:
    """LPES, Figures 3 and 4: positions under a scale, decay of the bound, and attention waves of scales and
    of bases."""
    figure = new_figure(PAGE, 4.2)
    axes = figure.subplots(2, 2)
    near, part = distance[:128], distance[:600]
    thin = {"marker": "", "linewidth": 0.8}
    for index, scale in enumerate(SCALES):
        style = line_style(index, of=len(SCALES)) | thin
        axes[0, 0].plot(
            near, np.cos(near / scale * 10000.0 ** (-2 * (dim // 8) / dim)), label=f"scale {scale:g}", **style
        )
        axes[0, 1].plot(distance, decay(distance, dim, scale=scale), label=f"scale {scale:g}", **style)
        axes[1, 0].plot(part, wave(part, dim, scale=scale), label=f"scale {scale:g}", **style)
    for index, base in enumerate(BASES):
        axes[1, 1].plot(part, wave(part, dim, base), label=f"base {base:g}", **line_style(index) | thin)
    titles = ("one frequency", "long-term decay: bound of the score", "waves of scales", "waves of bases")
    for panel, title, label in zip(
        axes.flat, titles, ("cosine", "mean partial sum", "score", "score"), strict=True
    ):
        panel.set(title=title, xlabel="relative distance (tokens)", ylabel=label)
    axes[0, 1].set_xscale("log")
    for panel in axes.flat[1:]:
        panel.legend(loc="upper right")
    axes[0, 0].set_title("one frequency (colours: scales, as on the right)")
    return figure


@styled
def thirds_figure(frame: pd.DataFrame, model: str) -> Figure:
    """LPES, Figure 5: attention to the middle third over the layers, a line per scale, and its change against
    scale 1."""
    middle = frame[frame["third"] == "middle"]
    figure = new_figure(PAGE, 2.6)
    left, right = figure.subplots(1, 2)
    scales = sorted(middle["scale"].unique())
    for index, scale in enumerate(scales):
        rows, style = middle[middle["scale"] == scale].sort_values("layer"), line_style(index, of=len(scales))
        left.plot(rows["layer"], rows["attention"], label=f"scale {scale:g}", **style)
        left.fill_between(
            rows["layer"], rows["ci_low"], rows["ci_high"], color=style["color"], alpha=0.15, linewidth=0
        )
    thirds = frame.groupby(["third", "scale"])["attention"].mean()
    for index, third in enumerate(("first", "middle", "last")):
        right.plot(thirds[third].index, thirds[third].to_numpy(), label=f"{third} third", **line_style(index))
    left.set(
        xlabel="layer",
        ylabel="attention to the middle third",
        title=f"{model}: last prompt token",
        xticks=sorted(set(rows["layer"])),
    )
    right.set(xlabel="RoPE scale", ylabel="attention (mean over layers)", title="where it goes")
    for panel in (left, right):
        panel.set_ylim(bottom=0)
        panel.legend()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Compute, write CSVs and figures, and say in words what the model shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--distance", type=int, default=4096, help="tokens that the curves cover")
    parser.add_argument("--dim", type=int, default=128, help="size of a head in the curves")
    parser.add_argument("--out", type=Path, default=Path("outputs/rope_curves"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    distance = np.arange(1.0, options.distance + 1)
    lines = {f"wave_scale_{s:g}": wave(distance, options.dim, scale=s) for s in SCALES}
    lines |= {f"decay_scale_{s:g}": decay(distance, options.dim, scale=s) for s in SCALES}
    lines |= {f"wave_base_{b:g}": wave(distance, options.dim, b) for b in BASES}
    write_csv(options.out / "curves.csv", pd.DataFrame({"distance": distance, **lines}))
    save(curves_figure(distance, options.dim), options.out / "curves")
    lm = posbench.load(options.model)
    examples = task_of(options.model).examples("evaluation")
    chosen = examples[:: max(len(examples) // options.prompts, 1)][: options.prompts]
    frame = attention_to_thirds(lm, [lm.encode(e.prompt).ids for e in chosen], SCALES)
    write_csv(options.out / "thirds.csv", frame)
    save(thirds_figure(frame, options.model), options.out / "thirds")
    middle = frame[frame["third"] == "middle"].pivot(index="layer", columns="scale", values="attention")
    rising = int((middle.diff(axis=1).iloc[:, 1:] > 0).all(axis=1).sum())
    mean = ", ".join(f"{scale:g}: {value:.4f}" for scale, value in middle.mean().items())
    console = Console()
    console.print(
        f"{options.model}, {len(chosen)} prompts: attention to the middle third, mean over layers, by scale: {mean}."
    )
    console.print(
        f"It rises with every step of the scale in {rising} of {lm.layers} layers (LPES, Figure 5, reads a rise)."
    )
    console.print(f"written: {options.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
