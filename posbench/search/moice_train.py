"""Train the router of MoICE: the model stays frozen, only the gates of its attention layers learn.

``python -m posbench.search.moice_train --model tiny --out FILE``, then ``posbench method=moice
method.weights=FILE``.

The loss is the next-token cross-entropy of all tokens, the prompt's included, plus ``--aux`` times the
auxiliary loss of balanced experts. The defaults are those of the released program (p1nksnow/MoICE, e14b5a3):
7 bases of which 7 are kept, 7 steps of 128 conversations, AdamW at a constant 1e-4 without weight decay,
auxiliary coefficient 0.3. With all 7 kept the auxiliary loss is the constant 7 and has no gradient
(:func:`posbench.methods.moice.auxiliary_loss`): the coefficient then changes nothing but the printed loss.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import posbench
from posbench.cli.main import _hydra as compose
from posbench.errors import UserError
from posbench.methods.moice import BASES, Router, auxiliary_loss, mixing, mixture, new_routers, save_routers
from posbench.model import rope
from posbench.model.lm import LM
from posbench.pipeline import config as configs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train; the defaults are published.

    Attributes:
        bases: The N bases theta.
        top_k: Bases that a token and head keeps.
        steps: Updates.
        batch: Texts per update, run one by one.
        lr: Learning rate, constant.
        aux: Coefficient of the auxiliary loss.
        seed: Of the first weights and of the order of the texts.
    """

    bases: tuple[float, ...] = BASES
    top_k: int = len(BASES)
    steps: int = 7
    batch: int = 128
    lr: float = 1e-4
    aux: float = 0.3
    seed: int = 0


def text_loss(lm: LM, ids: Sequence[int]) -> Tensor:
    """Mean cross-entropy in nats of all tokens of a text but the first."""
    tokens = torch.tensor([ids], device=lm.device)
    logits = lm.model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), tokens[0, 1:])


def train(
    lm: LM, rows: Sequence[Sequence[int]], settings: Settings
) -> tuple[dict[int, Router], list[dict[str, float]]]:
    """Train routers on texts.

    Args:
        lm: The model, which is left as it is.
        rows: Token ids of each text, two or more; they come again in another order when all were used.
        settings: How.

    Returns:
        The routers, and per step the mean loss, auxiliary loss and largest weight of a mixture (1 / N: an
        even one).

    Raises:
        UserError: The method does not apply to the model.
    """
    rope.check(lm, "moice", plain=True, by_hand=True)
    torch.manual_seed(settings.seed)
    shuffle, order = random.Random(settings.seed), list[Sequence[int]]()
    routers = new_routers(lm.model, len(settings.bases))
    for router in routers.values():
        router.to(lm.device)
    parameters = [p for router in routers.values() for p in router.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=0.0)
    frozen = [p for p in lm.model.parameters() if p.requires_grad]
    heard: dict[int, Tensor] = {}
    steps = []
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with mixing(lm.model, routers, settings.bases, settings.top_k, heard.__setitem__):
            for _ in range(settings.steps):
                seen = {"loss": 0.0, "aux": 0.0, "largest_weight": 0.0}
                for _ in range(settings.batch):
                    order = order or shuffle.sample(rows, len(rows))
                    loss = text_loss(lm, order.pop())
                    logits = torch.cat([x.flatten(0, 2).to(lm.device) for x in heard.values()])
                    aux = auxiliary_loss(logits, settings.top_k)
                    ((loss + settings.aux * aux) / settings.batch).backward()
                    largest = mixture(logits.detach(), settings.top_k).amax(-1).mean()
                    for name, value in (("loss", loss), ("aux", aux), ("largest_weight", largest)):
                        seen[name] += value.item() / settings.batch
                optimiser.step()
                optimiser.zero_grad()
                steps.append(seen)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return routers, steps


@torch.inference_mode()
def held_out(
    lm: LM, rows: Sequence[Sequence[int]], routers: Mapping[int, Router], settings: Settings
) -> dict[str, list[float]]:
    """Loss of each text under the unmodified model, an even mixture, and the trained one."""
    losses = {"unmodified": [text_loss(lm, row).item() for row in rows]}
    for name, given in (("even mixture", None), ("trained router", routers)):
        with mixing(lm.model, given, settings.bases, settings.top_k if given else len(settings.bases)):
            losses[name] = [text_loss(lm, row).item() for row in rows]
    return losses


def texts(lm: LM, model: str, data: Path | None, overrides: Sequence[str], longest: int) -> list[list[int]]:
    """Token ids of the training texts: lines of a file, or the calibration prompts of a task with their
    answers.

    Args:
        lm: The model.
        model: Its name in ``conf/model``, whose YAML has the task's settings.
        data: JSON lines, each with ``prompt`` and ``answer``; None: the task.
        overrides: As on the command line of posbench: ``task=kv_retrieval``,
            ``task.calibration_examples=960`` ...
        longest: Tokens per text at most; a longer one is cut at its end.

    Raises:
        UserError: A line of the file is not of this form, or there are too few texts.
    """
    pairs = []
    if data is None:
        found: list[configs.Config] = []
        job = [f"model={model}", "method=none", "stages=[evaluate]", *overrides]
        compose(job, lambda config: found.append(configs.check(configs.plain(config))))
        pairs = [(example.prompt, example.answers[0]) for example in found[0].task.examples("calibration")]
    else:
        for number, line in enumerate(data.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                pairs.append((str(row["prompt"]), str(row["answer"])))
            except (ValueError, KeyError, TypeError) as error:
                allowed, hint = "a JSON object with prompt and answer", f"correct line {number} of {data}"
                raise UserError(f"--data, line {number}", line[:60], allowed, hint) from error
    rows = [(prompt + answer)[:longest] for prompt, answer in (lm.answer_ids(*pair) for pair in pairs)]
    if len(rows) < 4:
        raise UserError("--data", len(rows), "4 texts or more", "give more lines or examples")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Train, say what it did to texts that were held out, and save the router."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a name in conf/model")
    parser.add_argument(
        "--data",
        type=Path,
        help="JSON lines with prompt and answer; without it, the calibration prompts of a task",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/moice.safetensors"))
    parser.add_argument("--bases", type=float, nargs="+", default=list(default.bases))
    parser.add_argument("--top-k", type=int, default=default.top_k)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--batch", type=int, default=default.batch)
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--aux", type=float, default=default.aux)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--max-length", type=int, default=4608)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("overrides", nargs="*", help="of the task, such as task.calibration_examples=960")
    given = vars(parser.parse_args(argv))
    settings = Settings(
        bases=tuple(given["bases"]), **{k: given[k] for k in ("top_k", "steps", "batch", "lr", "aux", "seed")}
    )
    try:
        if not 1 <= settings.top_k <= len(settings.bases):
            allowed = f"1 to {len(settings.bases)}, the number of bases"
            raise UserError("--top-k", settings.top_k, allowed, f"--top-k {len(settings.bases)}")
        lm = posbench.load(given["model"], device=given["device"])
        rows = texts(lm, given["model"], given["data"], given["overrides"], given["max_length"])
        part = max(len(rows) // 10, 1)
        routers, steps = train(lm, rows[part:], settings)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    console = Console()
    for number, step in enumerate(steps, 1):
        console.print(
            f"step {number}: " + ", ".join(f"{name} {value:.5f}" for name, value in step.items()),
            highlight=False,
        )
    losses = held_out(lm, rows[:part], routers, settings)
    for name, values in losses.items():
        console.print(f"loss of {part} texts held out, {name}: {sum(values) / part:.5f}", highlight=False)
    source: dict[str, Any] = {
        "model": given["model"],
        "data": str(given["data"].name if given["data"] else "calibration prompts"),
        "overrides": given["overrides"],
        "texts": len(rows) - part,
        "settings": vars(settings),
        "steps": steps,
        "held_out": {name: sum(values) / part for name, values in losses.items()},
        "posbench": posbench.__version__,
    }
    save_routers(routers, given["out"], source)
    console.print(f"wrote {given['out']}", highlight=False)


if __name__ == "__main__":
    main()
