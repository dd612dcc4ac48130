"""What goes out as code computes the method, in a process and with files that know nothing of posbench."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from posbench.errors import UserError
from posbench.export.base import Fix, difference, find_format, next_token
from posbench.export.transformers import CODE, Export, next_token_job, run_jobs
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.base import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.moice import MoICE, new_routers, save_routers
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.rope_base import RopeBase
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import LM
from posbench.model.load import load
from tests.conftest import Result, few
from tests.messages import refused
from tests.models import BUILDERS, VOCABULARY, build
from tests.rounding import assert_same, family_noise, log_probabilities

METHODS: dict[str, Method] = {
    "last token": ScaleChannel(channel=3, factor=-1.0, layers=(1, 2)),
    "last three": ScaleChannel(channel=(3, 5), factor=0.5, layers=(1, 3), last=3),
    "all tokens": ScaleChannel(channel=3, factor=-1.0, layers=(1, 2), last="all"),
    "last, own keys": ScaleChannel(
        channel=3, factor=-1.0, layers=(1, 2), tokens="last"
    ),
    "earlier keys": ScaleChannel(
        channel=3, factor=-1.0, layers=(1, 2), tokens="earlier"
    ),
    "layers": LayerScaling(scales=(1.2, 1.8, 1.0, 1.6)),
    "one scale": PositionInterpolation(scale=1.5),
    "heads": MsPoE(first_layer=1),
    "heads, official": MsPoE(first_layer=1, variant="official", alpha=2.0),
    "heads, reversed": MsPoE(first_layer=1, order="reversed"),
    "bases": AttentionBuckets(bases=(None, 13000.0, 25000.0)),
    "bases, probabilities": AttentionBuckets(
        bases=(10000.0, 25000.0), mixture="probabilities"
    ),
    "another base": RopeBase(base=500.0),
    "even mixture": MoICE(weights="uniform", bases=(10000.0, None, 25000.0), top_k=3),
}
SAMPLE = ("llama", "gemma3", "phi3-longrope", "falcon-7b", "mpt-clip")
"""Apart, normed per kind of layer, fused in blocks with partial rotation, fused in groups, without RoPE."""
PROMPTS = [
    torch.randint(
        1, VOCABULARY - 2, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    for length in (40, 9)  # one beyond every window, one within
]


def fix_of(lm: LM, method: Method) -> Fix:
    return Fix(lm, method, "unused", lambda: lm)


def export(lm: LM, method: Method, folder: Path) -> Path:
    fix = fix_of(lm, method)
    Export().check(fix)
    folder.mkdir()
    Export().write(fix, folder)
    return folder


def fits(method: Method, lm: LM) -> bool:
    try:
        method.check(lm)
    except UserError:
        return False
    return True


@pytest.mark.slow
def test_every_method_in_a_process_without_posbench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check_models(SAMPLE, Path())


@pytest.mark.slow
def test_the_command(
    posbench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    call = [
        "export",
        "model=tiny",
        "method=scale_channel",
        "task.limit=4",
        "--to",
        "transformers",
    ]
    assert posbench(*call, "--out", "fix", verb=True).status == 0
    assert posbench("verify", "fix", verb=True).status == 0
    # Code that computes something else is found.
    code = tmp_path / "fix" / "modeling_posbench.py"
    text = code.read_text()
    code.write_text(text.replace('*= constants["factor"]', "*= 1"))
    assert code.read_text() != text and posbench("verify", "fix", verb=True).status == 2


@pytest.mark.slow
def test_every_family(tmp_path: Path) -> None:
    check_models([name for name in BUILDERS if name not in SAMPLE], tmp_path)


def check_models(names: Any, folder: Path) -> None:
    """One process for all models, since its start takes seconds."""
    jobs = []
    cases = []
    for model in names:
        lm = load(build(model))
        plain = next_token(lm, PROMPTS)
        for what, method in METHODS.items():
            if fits(method, lm):
                written = export(
                    lm, method, folder / f"{model}-{what}".replace(" ", "_")
                )
                with method.applied(lm):
                    cases.append((f"{model}, {what}", next_token(lm, PROMPTS), plain))
                jobs.append(next_token_job(lm, written, PROMPTS))
    assert len(jobs) >= 5 * len(names)
    for (what, wanted, plain), got in zip(cases, run_jobs(jobs), strict=True):
        noise = family_noise(what.split(",")[0], log_probabilities)
        assert_same(difference(wanted, got), 0.0, noise, "an export")
        assert difference(plain, got) > 1e-2, (
            f"{what}: the unmodified model answers the same"
        )


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Load what was written, as its users do."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return lambda folder: transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )


@pytest.mark.parametrize("model", ["mistral-window", "gpt_neox"])
@pytest.mark.parametrize("what", few(METHODS, 5))
def test_generation(
    served: Callable[[Path], Any], model: str, what: str, tmp_path: Path
) -> None:
    """Greedy tokens and their scores from a batch with left padding, with a cache, are those in process."""
    lm = load(build(model))
    method = METHODS[what]
    inputs = lm.pad(PROMPTS)
    inputs.pop("position_ids")
    how = dict(
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with method.applied(lm):
        wanted = lm.model.generate(**inputs, **how)
    plain = lm.model.generate(**inputs, **how)
    got = served(export(lm, method, tmp_path / "out")).generate(**inputs, **how)
    assert torch.equal(got.sequences, wanted.sequences)
    for ours, theirs in zip(got.logits, wanted.logits, strict=True):
        assert_same(ours, theirs, family_noise(model), "an export")
    assert (got.logits[0] - plain.logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("what", ["last token", "layers", "heads", "bases"])
def test_a_copy_stands_alone(
    served: Callable[[Path], Any], what: str, tmp_path: Path
) -> None:
    """No part of a copied model works on the model that it was copied from, nor on another of its code."""
    lm = load(build("llama-gqa"))
    method = METHODS[what]
    model = served(export(lm, method, tmp_path / "out"))
    other = served(export(load(build("llama-gqa", seed=1)), method, tmp_path / "other"))
    copied = copy.deepcopy(model)
    wanted = next_token(LM(copied, None, "copy", 512), PROMPTS)
    served_model = next_token(LM(model, None, "served", 512), PROMPTS)
    # Kernels may round by where weights lie: those of a file are mapped elsewhere than copied ones.
    assert_same(
        wanted, served_model, family_noise("llama-gqa", log_probabilities), "an export"
    )
    for spoiled in (model, other):
        with torch.no_grad():
            for parameter in spoiled.parameters():
                parameter.zero_()
        spoiled(input_ids=torch.tensor([PROMPTS[1]]))
    assert torch.equal(next_token(LM(copied, None, "copy", 512), PROMPTS), wanted)


def test_a_trained_router_goes_along(
    served: Callable[[Path], Any], tmp_path: Path
) -> None:
    lm = load(build("gemma"))
    torch.manual_seed(1)
    routers = new_routers(lm.model, 3)
    with torch.no_grad():
        for router in routers.values():
            for parameter in router.parameters():
                parameter.normal_()
    save_routers(routers, tmp_path / "router.safetensors", {})
    bases = (10000.0, 17500.0, 25000.0)
    method = MoICE(weights=str(tmp_path / "router.safetensors"), bases=bases, top_k=2)
    with method.applied(lm):
        wanted = next_token(lm, PROMPTS)
    with MoICE(weights="uniform", bases=bases, top_k=3).applied(lm):
        even = next_token(lm, PROMPTS)
    got = next_token(
        LM(served(export(lm, method, tmp_path / "out")), None, "served", 512), PROMPTS
    )
    assert_same(got, wanted, family_noise("gemma", log_probabilities), "an export")
    assert difference(even, got) > 1e-2


def test_rows_labels_and_cuts(served: Callable[[Path], Any], tmp_path: Path) -> None:
    """All logits, the last ones, and the loss of a plain call are those in process."""
    lm = load(build("llama-gqa"))
    method = METHODS["last three"]
    model = served(export(lm, method, tmp_path / "out"))
    inputs = lm.pad([PROMPTS[0]])
    for more in ({}, {"logits_to_keep": 5}, {"labels": inputs["input_ids"]}):
        with method.applied(lm), torch.inference_mode():
            wanted = lm.model(**inputs, **more)
        with torch.inference_mode():
            got = model(**inputs, **more)
        assert_same(got.logits, wanted.logits, family_noise("llama-gqa"), "an export")
        if more.get("labels") is not None:
            assert_same(
                got.loss,
                wanted.loss,
                family_noise("llama-gqa", log_probabilities),
                "an export",
            )


@pytest.mark.parametrize("what", ["last token", "last three"])
def test_a_prompt_in_several_calls_is_refused(
    served: Callable[[Path], Any], what: str, tmp_path: Path
) -> None:
    """Which tokens of a prompt are its last ones shows only at its end."""
    lm = load(build("llama-gqa"))
    model = served(export(lm, METHODS[what], tmp_path / "out"))
    ids = torch.tensor([PROMPTS[0]])
    whole = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    one_call = "filled cache.* one call"
    cache = model(ids[:, :30]).past_key_values
    with pytest.raises(ValueError, match=one_call):
        model(ids[:, 30:], past_key_values=cache)
    for length in (30, 39):
        cache = model(ids[:, :length]).past_key_values
        with pytest.raises(ValueError, match=one_call):
            model.generate(**whole, past_key_values=cache, max_new_tokens=2)
        with pytest.raises(ValueError, match=one_call):
            model.generate(**whole, prefill_chunk_size=length, max_new_tokens=2)


def test_where_all_tokens_are_scaled_a_prompt_may_come_in_several_calls(
    served: Callable[[Path], Any], tmp_path: Path
) -> None:
    lm = load(build("llama-gqa"))
    method = METHODS["all tokens"]
    model = served(export(lm, method, tmp_path / "out"))
    ids = torch.tensor([PROMPTS[0]])
    cache = model(ids[:, :30]).past_key_values
    got = model(ids[:, 30:], past_key_values=cache).logits[:, -1]
    with method.applied(lm):
        wanted = lm.model(ids).logits[:, -1]
    assert_same(got, wanted, family_noise("llama-gqa"), "an export")


@pytest.mark.parametrize("what", ["last token", "last three"])
def test_candidates_of_speculation_are_generated_tokens(
    served: Callable[[Path], Any], what: str, tmp_path: Path
) -> None:
    """Neither those that come with the prompt nor those on a filled cache change the reply."""
    lm = load(build("llama-gqa"))
    model = served(export(lm, METHODS[what], tmp_path / "out"))
    for length in (8, 16, 24):
        # Prompts that repeat themselves, so that candidates are found.
        ids = torch.tensor([PROMPTS[0][:4] * (length // 4)])
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        # transformers 5.6 looks prompts up only where there is an end of a text, here one that no model writes.
        how = dict(max_new_tokens=16, do_sample=False, eos_token_id=10**6)
        wanted = model.generate(**inputs, **how)
        got = model.generate(**inputs, **how, prompt_lookup_num_tokens=3)
        assert torch.equal(got, wanted)


def test_never_loaded_as_the_unmodified_model(checkpoint: Path, tmp_path: Path) -> None:
    lm = load(str(checkpoint), dtype="float32")
    folder = export(lm, LayerScaling(scales=(1.0, 2.0, 1.0, 1.0)), tmp_path / "out")
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False
        )
    ids = transformers.AutoTokenizer.from_pretrained(folder)("the")["input_ids"]
    assert ids == lm.need_tokenizer()("the")["input_ids"]


@pytest.mark.parametrize("file", sorted(CODE.glob("*.py")), ids=lambda file: file.stem)
def test_code_that_goes_out_needs_transformers_alone(file: Path) -> None:
    named = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        named |= {name.split(".")[0] for name in names}
        named |= (
            {str(node.module).split(".")[0]}
            if isinstance(node, ast.ImportFrom)
            else set()
        )
    known = {
        "torch",
        "transformers",
        "inspect",
        "contextlib",
        "functools",
        "sys",
        "typing",
    }
    assert named <= (
        {"vllm", "math", "typing"} if file.stem.startswith("vllm") else known
    )


def test_refusals() -> None:
    lm = load(build("llama"))
    with refused(
        "--to",
        "transformers",
        allowed=("unmodified", "scale_channel"),
        hint="--to checkpoint",
    ):
        Export().check(fix_of(lm, Unmodified()))
    with torch.device("meta"):
        bare = BUILDERS["llama"]()
    with refused(
        "--to", "transformers", allowed=("bare", "offloaded"), hint="--to lora"
    ):
        Export().check(fix_of(LM(bare, None, "bare", 64), METHODS["layers"]))
    assert isinstance(find_format("transformers"), Export)
