"""The benchmark runs every method that applies, and its ratios are those of the seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode

import posbench
from posbench import paths
from posbench.errors import choices
from posbench.methods import Unmodified
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.base import Method
from posbench.methods.choice import all_choices
from posbench.methods.moice import MoICE
from posbench.model.lm import LM
from posbench.studies.cost import timing
from posbench.studies.cost.floors import floors
from posbench.studies.cost.latency import Latency
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_refused
from tests.models import build
from tests.rounding import assert_same, family_noise

ALL = all_choices([paths.CONF], {})
BUCKETS = "4.76 (LPES, Table 5: the row whose name is lost)"
CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
OWN = f"--config-dir={EXAMPLES}"


def examples(lm: LM) -> dict[str, Method]:
    """What the study measures."""
    return timing.applicable_methods(lm, ALL, lambda choice: choice.cls.example(lm))


def ticks(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the works take these seconds, one after the other."""
    clock = iter([time for spent in seconds for time in (0.0, spent)])
    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: next(clock))


def test_every_method_is_measured_where_it_applies() -> None:
    lm = posbench.load(build("llama"))
    names = set(choices(paths.CONF / "method"))
    # Here a method that rewrites prompts would count as the unmodified model, of its time, too.
    assert names - set(examples(lm)) == {"attention_sorting"} | {
        name
        for name, choice in all_choices([paths.CONF], {}).items()
        if choice.changes_prompts_alone
    }
    rotating = {
        "attention_buckets",
        "dca",
        "layer_scaling",
        "moice",
        "ms_poe",
        "position_interpolation",
        "rerope",
        "self_extend",
        "string_shift",
    }
    without = set(examples(posbench.load(build("mpt"))))
    assert {"none", "scale_channel"} <= without and not without & rotating
    assert next(iter(examples(posbench.load(build("llama"))))) == "none"
    printed = pd.read_csv(paths.EXPERIMENTS / "reference" / "latency.csv")
    assert set(printed["method"]) <= names


def test_rows_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks(monkeypatch, 1, 1, 2, 3, 4, 4)
    lm = posbench.load(build("llama"))
    methods = {name: examples(lm)[name] for name in ("none", "attention_buckets")}
    rows = Latency(repeats=2).generation(lm, methods, 8, 2)
    front = {"work": "8 + 2 tokens", "base": "none", "n": 2, "tokens": 8}
    assert rows == [
        {
            **front,
            "way": "none",
            "seconds": 3,
            "ratio": 1,
            "ratio_min": 1,
            "ratio_max": 1,
            "paper": "",
        },
        {**front, "way": "attention_buckets", "seconds": 3.5}
        | {"ratio": 1.25, "ratio_min": 1, "ratio_max": 1.5, "paper": BUCKETS},
    ]


def test_a_papers_ratio_is_held_against_times_of_its_own_length() -> None:
    row = {"way": "scale_channel", "work": "w", "tokens": 3300, "n": 2}
    row |= {"ratio": 1.44, "ratio_min": 1.43, "ratio_max": 1.45}
    study = Latency(claims_of="Yu et al. 2025")
    findings = study.findings({"generation": pd.DataFrame([row])})
    verdicts = {f.claim.split(", ")[-1]: f.verdict for f in findings}
    assert verdicts == {
        "3300 tokens)": "contradicted",
        "10000 tokens)": "not testable",
    }


@pytest.mark.parametrize(
    ("kind", "found"), [("ratio", (2, 1, 3)), ("speedup", (0.5, 1 / 3, 1))]
)
def test_ratios_are_taken_round_by_round(
    monkeypatch: pytest.MonkeyPatch, kind: str, found: tuple[float, ...]
) -> None:
    ticks(monkeypatch, 1, 1, 1, 2, 3, 9, 4, 4)
    works = {"base": lambda: None, "way": lambda: None}
    _, row = Latency(repeats=3).compared("work", works, CPU, faster=kind == "speedup")
    assert tuple(row[f"{kind}{end}"] for end in ("", "_min", "_max")) == pytest.approx(
        found
    )


@pytest.mark.figures
def test_the_command(posbench: Callable[..., Result], outputs: Path) -> None:
    """Both ways of the search give equal losses, or it stops."""
    small = [
        "study.methods_at=[8]",
        "study.prompts=[8]",
        "study.search_tokens=8",
        "study.candidates=2",
    ]
    result = posbench(
        "study=latency",
        "study.methods=[moice]",
        "study.floors=true",
        "study.repeats=1",
        *small,
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    ways = pd.read_csv(folder / "generation.csv", keep_default_na=False)["way"].tolist()
    least = ["moice: 7 kernel calls alone", "moice: own kernel alone"]
    assert ways == ["none", "moice", *least, "scale_channel", "re-projection"]
    assert pd.read_csv(folder / "search.csv")["work"].unique().tolist() == [
        "2 candidates, 8 + 4 tokens"
    ]
    assert (folder / "figures" / "search.svg").is_file()
    refused = posbench("study=latency", "study.methods=[ms_po]")
    assert refused.status == 2 and "study.methods = 'ms_po'" in refused.err
    refused = posbench("study=latency", "study.floors=true", "study.new_tokens=[1,8]")
    assert refused.status == 2 and "study.new_tokens=[1]" in refused.err
    # The window of shape small holds 32,768 tokens, with the one that is generated.
    for field in ("methods_at=[32768]", "prompts=[9,1000000]", "search_tokens=40000"):
        refused = posbench("study=latency", f"study.{field}")
        name = f"study.{field.partition('=')[0]}"
        assert refused.status == 2 and f"{name} = " in refused.err
        assert "32,767" in refused.err and "Traceback" not in refused.err


def test_a_method_of_ones_own_is_measured_and_tells_runs_apart(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    small = [
        "study.methods_at=[8]",
        "study.prompts=[]",
        "study.search_tokens=0",
        "study.repeats=1",
    ]
    for own in ([], [OWN]):
        args = ("study=latency", "stages=[study]", *own, *small)
        assert posbench(*args).status == 0
    found = [
        set(pd.read_csv(run / "generation.csv")["way"]) for run in run_folders(outputs)
    ]
    own_methods = {file.stem for file in (EXAMPLES / "method").glob("*.yaml")}
    assert len(found) == 2
    # It rewrites prompts, which are left as they are here.
    own_methods.remove("reorder")
    assert set.union(*found) - set.intersection(*found) == own_methods


@pytest.mark.parametrize(("model", "strength"), [("tiny", None), ("tiny_damped", 0.25)])
def test_its_constants_are_those_of_the_model(
    model: str, strength: float | None
) -> None:
    config = config_of(OWN, "study=precision", f"model={model}")
    assert config.all_methods["damp"].values == {"strength": strength, "layers": None}
    assert (
        config.all_methods["ms_poe"]
        == config_of("study=precision").all_methods["ms_poe"]
    )
    assert not config_of(OWN, "study=rollout").all_methods


def test_floors_do_all_that_the_bases_need_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("posbench.studies.cost.floors.TILE_QUERIES", 8)
    lm = posbench.load(build("llama-gqa"))
    ids = torch.arange(1, 21)[None]
    buckets = AttentionBuckets(batch_tokens=1)
    chosen = {
        "none": Unmodified(),
        "attention_buckets": buckets,
        **floors({"m": MoICE(), "a": buckets}),
    }
    products = dict[str, int]()
    kernels = dict[str, int]()
    logits = dict[str, torch.Tensor]()
    for name, method in chosen.items():
        with (
            torch.no_grad(),
            method.applied(lm),
            FlopCounterMode(display=False) as counter,
            patch.object(
                F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
            ) as kernel,
        ):
            logits[name] = lm.model(ids).logits
        # Matrix products alone: older versions of torch also count some of what an attention kernel does.
        products[name] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
        kernels[name] = kernel.call_count
    first = lm.model.model.layers[0].self_attn
    config = lm.model.config
    shared = sum(
        2 * 20 * layer.weight.numel()
        for layer in (first.q_proj, first.k_proj, first.v_proj)
    )
    tiles = (
        2
        * (8 * 8 + 8 * 16 + 4 * 20)
        * first.head_dim
        * config.num_attention_heads
        * lm.layers
    )
    plain = products["none"]
    added = {name: n - products["none"] for name, n in products.items()}
    assert [n for n, each in added.items() if not each] == [
        "none",
        "m: 7 kernel calls alone",
    ]
    assert (
        added["m: own kernel alone"] == 8 * tiles
    )  # seven scores and one product with values
    assert (
        added["a: 7 forwards alone"]
        == added["attention_buckets"]
        == 6 * (plain - shared)
    )
    assert added["a: one batch"] == 6 * plain
    assert kernels == dict.fromkeys(kernels, 7 * lm.layers) | {
        "none": lm.layers,
        "m: own kernel alone": 0,
        "a: one batch": lm.layers,
    }
    for name, found in logits.items():
        other = "attention_buckets" if name.startswith("a") else "none"
        assert_same(found, logits[other], family_noise("llama-gqa"), "logits")


def test_soft_capped_scores_get_a_kernel_that_caps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Older versions of transformers offer sdpa for Gemma 2, which leaves the cap out."""
    monkeypatch.setattr(transformers.Gemma2ForCausalLM, "_supports_sdpa", True)
    lm = timing.random_model("check_gemma2", CPU)
    assert lm.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["study.methods=[attention_sorting]"], "study.methods"),
        (["study.methods=[documents_twice]"], "study.methods"),
        (
            ["study.methods_at=[]", "study.prompts=[]", "study.search_tokens=0"],
            "study.prompts",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused(
    settings: list[str], field: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("study=latency", *settings)
    assert result.status == 2 and not run_folders(outputs)
    assert_refused(result.err, field)


def test_a_length_in_both_lists_is_one_work(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    lengths = [
        "study.methods_at=[16]",
        "study.prompts=[16,16]",
        "study.search_tokens=0",
    ]
    result = posbench(
        "study=latency", "study.methods=[scale_channel]", "study.repeats=1", *lengths
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    rows = pd.read_csv(folder / "generation.csv", keep_default_na=False)
    assert rows["way"].tolist() == ["none", "scale_channel", "re-projection"]
    assert "one round" in result.out and "over rounds" not in result.out
