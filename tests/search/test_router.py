"""Training the router of MoICE: gradients against finite differences, a frozen model, and what the command
writes."""

import json

import pytest
import torch
from safetensors import safe_open

import posbench
from posbench.methods.moice import load_routers, mixing, new_routers
from posbench.search.moice_train import Settings, held_out, main, text_loss, train
from tests.models import build

APART = (10000.0, 20.0, 300.0)
ROWS = torch.randint(1, 250, (6, 24), generator=torch.Generator().manual_seed(2)).tolist()


def test_gradients_equal_finite_differences():
    lm = posbench.load(build("llama-gqa", dtype=torch.float64))
    torch.manual_seed(0)
    routers = new_routers(lm.model, len(APART))
    parameters = [p for router in routers.values() for p in router.double().parameters()]
    for parameter in parameters:
        parameter.data.normal_(std=0.7)

    def loss():
        with mixing(lm.model, routers, APART, 3):
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
    lm = posbench.load(build("llama-gqa"))
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    settings = Settings(bases=APART, top_k=3, steps=25, batch=2, lr=0.05)
    routers, steps = train(lm, ROWS[:2], settings)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    losses = held_out(lm, ROWS[:2], routers, settings)
    assert sum(losses["trained router"]) < sum(losses["even mixture"])
    assert all(torch.equal(value, before[name]) for name, value in lm.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in lm.model.parameters())
    again, _ = train(lm, ROWS[:2], settings)
    assert all(
        torch.equal(a, b)
        for i in routers
        for a, b in zip(routers[i].parameters(), again[i].parameters(), strict=True)
    )


@pytest.mark.parametrize(("top_k", "matters"), [(3, False), (1, True)])
def test_the_auxiliary_coefficient_matters_only_below_all_experts(top_k, matters):
    lm = posbench.load(build("llama-gqa"))
    found = []
    for aux in (0.0, 1.0):
        settings = Settings(bases=APART, top_k=top_k, steps=2, batch=3, lr=1e-2, aux=aux)
        routers, steps = train(lm, ROWS, settings)
        found.append(torch.cat([p.flatten() for router in routers.values() for p in router.parameters()]))
        if top_k == len(APART):
            assert [step["aux"] for step in steps] == pytest.approx([3.0] * 2, abs=1e-5)
    assert bool((found[0] - found[1]).abs().max() > 1e-3) == matters


def test_command(tmp_path, capsys):
    out, data = tmp_path / "router.safetensors", tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"prompt": f"bal {word}", "answer": " gel"}) for word in ("kop", "dip", "gel", "bal")
        )
    )
    main(["--data", str(data), "--out", str(out), "--steps", "1", "--batch", "2"])
    assert "held out, trained router" in capsys.readouterr().out
    assert set(load_routers(posbench.load("tiny"), str(out), 7)) == {0, 1, 2, 3}
    with safe_open(out, "pt") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
    assert metadata["model"] == "tiny"
    assert metadata["texts"] == 3
    assert metadata["settings"]["lr"] == 1e-4
    main(
        [
            "--out",
            str(out),
            "--steps",
            "1",
            "--batch",
            "1",
            "task.calibration_examples=12",
            "task.calibration_pairs=4",
        ]
    )
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 1}\n')
    for arguments, said in (
        (["--data", str(bad)], "line 1"),
        (["--top-k", "9"], "1 to 7"),
        (["--model", "tiny_nope"], "has none"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--out", str(tmp_path / "no.safetensors")])
        assert end.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "no.safetensors").exists()
