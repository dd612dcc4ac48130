"""Training the router of MoICE: gradients against finite differences, and what a search leaves."""

import json

import pandas as pd
import pytest
import torch
import yaml
from safetensors import safe_open

import posbench as package
from posbench.methods.moice import MoICE, load_routers, mixed_attention, new_routers
from posbench.search.router import RouterSearch, text_loss
from tests.conftest import run_folders
from tests.models import build
from tests.rounding import EPSILON, assert_same

APART = (10000.0, 20.0, 300.0)
ROWS = torch.randint(
    1, 250, (6, 24), generator=torch.Generator().manual_seed(2)
).tolist()


def test_gradients_equal_finite_differences():
    lm = package.load(build("llama-gqa", dtype=torch.float64))
    torch.manual_seed(0)
    routers = new_routers(lm.model, len(APART))
    parameters = [
        p for router in routers.values() for p in router.double().parameters()
    ]
    for parameter in parameters:
        parameter.data.normal_(std=0.7)

    def loss():
        with mixed_attention(lm.model, routers, APART, 3):
            return text_loss(lm, ROWS[0])

    loss().backward()
    for parameter in parameters[:6]:
        direction = torch.randn_like(parameter)
        slope = (parameter.grad * direction).sum().item()
        ends = []
        for sign in (1, -1):
            # The tables and the loss are float32: a step large enough to stand out of their rounding.
            parameter.data += sign * 1e-3 * direction
            with torch.no_grad():
                ends.append(loss().item())
            parameter.data -= sign * 1e-3 * direction
        assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=0.05, abs=2e-4)


def test_it_learns_and_leaves_the_model_as_it_was():
    lm = package.load(build("llama-gqa"))
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    search = RouterSearch(steps=25, batch=2, learning_rate=0.05)
    method = MoICE(bases=APART, top_k=3)
    routers, steps = search.train(lm, ROWS[:2], method, lambda n: None)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    losses = search.held_out(lm, ROWS[:2], routers, method)
    assert sum(losses["trained router"]) < sum(losses["even mixture"])
    assert all(
        torch.equal(value, before[name])
        for name, value in lm.model.state_dict().items()
    )
    assert all(p.requires_grad and p.grad is None for p in lm.model.parameters())
    again, _ = search.train(lm, ROWS[:2], method, lambda n: None)
    assert all(
        torch.equal(a, b)
        for i in routers
        for a, b in zip(routers[i].parameters(), again[i].parameters(), strict=True)
    )


@pytest.mark.parametrize(("top_k", "matters"), [(3, False), (1, True)])
def test_the_auxiliary_coefficient_matters_only_below_all_experts(top_k, matters):
    lm = package.load(build("llama-gqa"))
    found = []
    for aux in (0.0, 1.0):
        search = RouterSearch(steps=2, batch=3, learning_rate=1e-2, aux=aux)
        routers, steps = search.train(
            lm, ROWS, MoICE(bases=APART, top_k=top_k), lambda n: None
        )
        found.append(
            torch.cat(
                [
                    p.flatten()
                    for router in routers.values()
                    for p in router.parameters()
                ]
            )
        )
        if top_k == len(APART):
            assert_same(
                [step["aux"] for step in steps], [3.0] * 2, 3 * EPSILON, "losses"
            )
    assert bool((found[0] - found[1]).abs().max() > 1e-3) == matters


SEARCH = [
    "model=tiny",
    "search=router",
    "method=moice",
    "stages=[search]",
    "search.steps=1",
    "search.batch=2",
]
WORDS = ("kop", "dip", "gel", "bal")


def test_a_search_leaves_a_router_that_the_method_reads(posbench, outputs, tmp_path):
    """From the task's calibration prompts, and from the lines of a file."""
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"bal {w}", "answer": " gel"}) + "\n" for w in WORDS
        )
    )
    given = ["task.calibration_examples=12", "task.calibration_pairs=4"]
    result = posbench(*SEARCH, *given, "stages=[search,evaluate]", "task.limit=1")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    block = yaml.safe_load((folder / "found.yaml").read_text())["moice"]
    assert block["texts"] == 11 and set(block["held_out"]) == {
        "unmodified",
        "even mixture",
        "trained router",
    }
    assert (
        json.loads((folder / "method.json").read_text())["weights"] == block["weights"]
    )
    assert set(load_routers(package.load("tiny"), block["weights"], 7)) == {0, 1, 2, 3}
    with safe_open(block["weights"], "pt") as file:
        assert list(file.metadata()) == ["training"], (
            "of several entries the order is one of chance"
        )
        metadata = json.loads(file.metadata()["training"])
    assert (
        metadata["search"]["learning_rate"] == 1e-4
        and metadata["held_out"] == block["held_out"]
    )
    # An even start: no base has more than a little over a seventh.
    steps = pd.read_csv(folder / "search.csv")
    assert list(steps["step"]) == [1] and 1 / 7 < steps["largest_weight"][0] < 0.16
    assert steps["aux"][0] == pytest.approx(7, abs=1e-4)
    result = posbench(*SEARCH, f"search.data={data}")
    assert result.status == 0 and "3" in result.out, result.err
    found = [
        yaml.safe_load(f.read_text())["moice"]["texts"]
        for f in outputs.glob("*/v*/*/found.yaml")
    ]
    assert sorted(found) == [3, 11]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["search.data={bad}"],
            ["search.data", "line 1", 'a field "prompt" (str, not empty)'],
        ),
        (["search.data={half}"], ["search.data", "line 1", "UTF-8 text"]),
        (["search.data=/nowhere/x.jsonl"], ["search.data = '/nowhere/x.jsonl'"]),
        (["search.data=''"], ["search.data"]),
        (["search.data={few}"], ["search.data = 1", "4 texts or more"]),
        (["method.top_k=9"], ["method.top_k = 9", "1 to 7"]),
        (["model=tiny_nope"], ["method = 'moice'", "has none"]),
        (["search.longest=1"], ["search.longest = 1", "from 2 to 1000000"]),
        (
            ["method.weights=uniform"],
            ["method.weights = 'uniform'", "stages=[evaluate,report]"],
        ),
    ],
)
def test_refusals(args, words, posbench, outputs, tmp_path):
    texts = {"bad": '{"prompt": 1}', "few": '{"prompt": "bal", "answer": "kop"}'}
    texts["half"] = r'{"prompt": "\ud800", "answer": "kop"}'
    files = {name: str(tmp_path / name) for name in texts}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n")
    result = posbench(*SEARCH, *(a.format(**files) for a in args))
    assert result.status == 2 and len(result.err.splitlines()) == 1
    assert all(word in result.err for word in words), result.err
    assert not run_folders(outputs)
