"""Search for what will be shipped: weights scaled by hand, plain loops, and searches that are killed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import posbench as package
from posbench.export import base as export
from posbench.methods import ScaleChannel
from posbench.model.lm import LM
from posbench.schema import instantiate
from posbench.search import deploy
from posbench.tasks import Task
from tests.conftest import Result, config_of, run_folders

FACTORS, WIDTH = (-6.0, 6.0), 8
SMALL = ["search=exhaustive", f"search.factors=[{FACTORS[0]},{FACTORS[1]}]", "search.layers=[0,1]"]
SMALL += ["search.strings=4", "search.length=24", "search.window=3", "search.skip=1", "search.alphabet=tokens"]
SMALL += ["task.prompt=compact", "task.records=words", "task.pairs=3", "task.limit=1", "task.positions=[0]"]
SMALL += ["task.calibration_pairs=3", "task.calibration_examples=8", "runtime.device=cpu", "runtime.threads=1"]
SMALL += ["method=scale_channel", "model=hf", "model.dtype=float32", "stages=[search]", "search.held_back=2"]


def words(result: Result) -> str:
    return " ".join(result.out.split())


@cache
def random_model(seed: int, folder: Path) -> Path:
    """A random Llama of 2 layers and 8 channels that reads letters, one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["</s>", *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    window = {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.6, **sizes, **window)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "choices.jsonl"
    rows = [{"question": f"Which is {n}?", "choices": ["one", "two", "ten"], "gold": n % 3} for n in range(7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("random")
    return lambda seed: random_model(seed, folder / str(seed))


def by_hand(lm: LM, pairs: list[tuple[str, str]], channel: int = 0, factor: float = 1.0) -> np.ndarray:
    """Loss of each answer, by one pass over prompt and answer of a model with scaled weights."""
    model, out = copy.deepcopy(lm.model), []
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight[:, channel] *= factor
        for prompt, answer in pairs:
            ids, right = (lm.tokenizer(text)["input_ids"] for text in (prompt, answer))
            nats = -model(torch.tensor([ids + right])).logits[0].log_softmax(-1)
            out.append(float(sum(nats[len(ids) - 1 + i, token] for i, token in enumerate(right))) / len(right))
    return np.array(out)


@cache
def plain(path: Path, questions: Path) -> tuple[dict[Any, Any], ...]:
    """Per candidate, and None for the unmodified model: losses with the last token alone, with scaled weights,
    and of the right letter of the questions."""
    lm = package.load(path, dtype="float32")
    task: Any = config_of(*SMALL, f"model.path={path}").task
    pairs = [(e.prompt, e.answers[0]) for e in task.examples("calibration")]
    lines = [json.loads(line) for line in questions.read_text().splitlines()]
    letters = [(f"{row['question']}\nA. one\nB. two\nC. ten\nAnswer:", f" {'ABC'[row['gold']]}") for row in lines]
    last, every, side = dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()
    for tried in [None, *product(range(WIDTH), FACTORS)]:
        channel, factor = tried or (0, 1.0)
        with ScaleChannel(channel=channel, factor=factor, layers=(0, 1)).applied(lm):
            last[tried] = np.array([lm.answer_loss([prompt], [answer]).item() for prompt, answer in pairs])
        every[tried], side[tried] = (by_hand(lm, each, channel, factor) for each in (pairs, letters))
    return last, every, side


# Of these models: nothing exceeds; the best exceeds; nothing is left; a short list.
@pytest.mark.parametrize(("seed", "short", "limit"), [(0, 16, 9.0), (0, 16, 0.02), (3, 1, 0.02), (2, 5, 0.02)])
def test_what_is_shipped_is_the_best_of_a_plain_loop(
    seed: int,
    short: int,
    limit: float,
    models: Callable[[int], Path],
    questions: Path,
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    path = models(seed)
    last, every, side = plain(path, questions)
    order = sorted((tried for tried in last if tried), key=lambda tried: last[tried].mean())
    rise = {tried: (side[tried] - side[None]).mean() for tried in side}
    allowed = [tried for tried in (None, *order[:short]) if rise[tried] <= limit]
    won = min(allowed, key=lambda tried: every[tried].mean())

    call = [*SMALL, f"model.path={path}", "search.deploy=lora", f"search.shortlist={short}"]
    call += ["search.side_task=own_data", f"search.side_task.path={questions}", f"search.side_rise={limit}"]
    result = posbench(*call)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    block = yaml.safe_load((folder / "found.yaml").read_text())["scale_channel"]
    assert (block["channel"], block["factor"]) == (won or (None, None)) and block["last"] == "all"
    assert block["loss"] == pytest.approx(every[won].mean(), abs=2e-5)

    table = pd.read_csv(folder / "deploy.csv").set_index("rank")
    assert list(table.index) == list(range(short + 1)) and (table["candidates"] == len(order)).all()
    for rank, tried in enumerate([None, *order[:short]]):
        row = table.loc[rank]
        assert row["loss_last_1"] == pytest.approx(last[tried].mean(), abs=2e-5)
        assert row["loss"] == pytest.approx(every[tried].mean(), abs=2e-5)
        assert row["price"] == pytest.approx((every[tried] - last[order[0]]).mean(), abs=2e-5)
        assert row["side_rise"] == pytest.approx(rise[tried], abs=2e-5)
        assert (row["allowed"], row["selected"]) == (tried in allowed, tried == won)
    # Never worse than the optimum of the last token alone, folded, unless that one exceeds the budget.
    if order[0] in allowed:
        assert block["loss"] <= table.loc[1, "loss"]
    facts, gaps = block["deploy"], every[won] - last[order[0]]
    draws = np.random.default_rng(1).choice(gaps, (4000, len(gaps))).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    assert facts["price_ci_low"] < low < high < facts["price_ci_high"]  # of eight prompts a bootstrap is too sure
    assert facts["price_ci_high"] - facts["price_ci_low"] < 2 * (high - low)
    assert facts["loss_last_1"] == pytest.approx(last[order[0]].mean(), abs=2e-5)
    assert (facts["tried"], facts["exceed"], facts["side_n"]) == (short, short + 1 - len(allowed), 7)
    for line in deploy.words(facts):
        assert line in words(result)
    assert ("nothing is left to ship" in words(result)) == (won is None)
