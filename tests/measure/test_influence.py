"""Influence of tokens against whole attention maps, theory, and gradients taken another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import posbench
from posbench.measure.influence import FIXED_SHARES, influence, without_scores
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.moice import MoICE
from posbench.model import families
from posbench.model.hooks import count_hooks
from posbench.theory import masks, residual
from tests.models import WINDOW, build

N = 31
FAMILIES = [
    "llama-gqa",
    "mistral-window",
    "qwen2",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_neox",
    "mpt",
    "falcon",
    "falcon-7b",
    "falcon-alibi",
    "olmo2",
    "cohere2",
]
ALTERNATING = {"gemma2", "gemma3", "cohere2"}
"""Models whose even layers have a sliding window."""
CLOSE = 2e-6
"""Two ways to compute a float64 model's weights, of which the library rounds some to float32."""


def ids_of(seed: int = 1, n: int = N) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 250, (n,), generator=generator).tolist()


@contextmanager
def silent_mlp(layer: torch.nn.Module) -> Iterator[None]:
    """Let the feedforward block of a layer add nothing."""
    blocks = [
        m
        for name, m in layer.named_children()
        if name in ("mlp", "ffn") or "moe" in name
    ]
    assert len(blocks) == 1

    def silence(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        # MPT's block adds the stream itself.
        return args[1] if "Mpt" in type(module).__name__ else torch.zeros_like(output)

    with blocks[0].register_forward_hook(silence):
        yield


def shares_by_hand(model: Any, ids: list[int]) -> list[float]:
    """Share of attention by layer: what each layer adds once its feedforward block is silent."""
    calls: list[tuple[Any, ...]] = []

    def keep(layer: Any, args: Any, kwargs: Any) -> None:
        calls.append((layer, args, kwargs))

    layers = families.decoder_layers(model)
    handles = [
        layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers
    ]
    shares = []
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        for layer, args, kwargs in calls:
            stream = args[0] if args else kwargs["hidden_states"]
            with silent_mlp(layer):
                output = layer(*args, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
            added = (output - stream).norm(dim=-1)
            shares.append(float((added / (added + stream.norm(dim=-1))).mean()))
    return shares


def structure_by_theory(family: str, layers: int) -> list[np.ndarray]:
    """Attention of each layer by mask and ALiBi, from the family's published rules."""
    causal, window = masks.causal(N), masks.window(N, WINDOW)
    if family in ALTERNATING:
        return [masks.uniform(window if t % 2 == 0 else causal) for t in range(layers)]
    slopes = np.zeros(1)
    if family in ("mpt", "falcon-alibi"):
        slopes = residual.alibi_slopes(4)
    if family == "falcon-alibi":
        slopes = slopes / np.sqrt(12)  # scaled with the scores, by the head's size
    mask = window if family == "mistral-window" else causal
    return [residual.structural_attention(mask, slopes)] * layers


@pytest.mark.parametrize("family", FAMILIES)
def test_influence_is_that_of_whole_maps_and_of_theory(family: str) -> None:
    model = build(family, dtype=torch.float64)
    lm = posbench.load(model)
    ids = ids_of()
    kernel = model.config._attn_implementation
    with torch.no_grad():
        before = model(torch.tensor([ids])).logits
    found = influence(lm, ids, np.eye(N))
    assert model.config._attn_implementation == kernel and not count_hooks(model)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, before)

    shares = shares_by_hand(model, ids)
    assert np.abs(found.shares - shares).max() < CLOSE
    by_theory = structure_by_theory(family, lm.layers)
    with lm.eager() if not families.family_of(model).interface else eager(model):
        maps = model(torch.tensor([ids]), output_attentions=True).attentions
    own = [weights[0].mean(0).double().detach().numpy() for weights in maps]
    for index, fixed in enumerate((None, *FIXED_SHARES)):
        by_layer = shares if fixed is None else [fixed] * lm.layers
        for attention, rows in ((by_theory, found.structure), (own, found.attention)):
            wanted = residual.rollout(attention, by_layer)[-1][-1]
            assert np.abs(rows[index] - wanted).max() < CLOSE

    embedded = model.get_input_embeddings()(torch.tensor([ids])).detach()
    embedded.requires_grad_()
    model(inputs_embeds=embedded).logits[0, -1].softmax(-1).max().backward()
    lengths = embedded.grad[0].norm(dim=-1).numpy()
    assert np.abs(found.gradient - lengths / lengths.sum()).max() < CLOSE


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """A model with eager attention, which returns its weights."""
    kernel = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(kernel)


def test_targets_are_sums_over_tokens() -> None:
    lm = posbench.load(build("llama"))
    by_token = influence(lm, ids_of(), np.eye(N))
    targets = np.random.default_rng(0).random((N, 5))
    found = influence(lm, ids_of(), targets)
    for name in ("structure", "attention", "gradient"):
        wanted = getattr(by_token, name) @ targets
        assert np.abs(getattr(found, name) - wanted).max() < 1e-6
        assert getattr(by_token, name).sum(-1) == pytest.approx(1, abs=1e-6)


def test_gradient_does_not_vanish_where_the_model_is_sure() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight *= 50
    lm = posbench.load(model)
    with torch.no_grad():
        logits = model(torch.tensor([ids_of()])).logits[0, -1]
    assert logits.softmax(-1).max() == 1
    found = influence(lm, ids_of(), np.eye(N))
    assert found.gradient.sum() == pytest.approx(1) and (found.gradient > 0).all()


def test_without_scores_restores_the_model_after_an_exception() -> None:
    lm = posbench.load(build("falcon"))
    with pytest.raises(RuntimeError, match="inside"), without_scores(lm):
        raise RuntimeError("inside")
    assert not count_hooks(lm.model)


def test_influence_under_methods_that_attend_more_than_once() -> None:
    """Bases equal to the model's own change nothing, however often a method attends."""
    lm = posbench.load("tiny")
    ids = lm.encode("bal kop dip gel").ids * 4
    targets = np.eye(len(ids))
    plain = influence(lm, ids, targets)
    for method in (
        MoICE(weights="uniform", bases=(None, None), top_k=2),
        AttentionBuckets(bases=(None, None)),
    ):
        with method.applied(lm):
            found = influence(lm, ids, targets)
        for before, after in zip(plain, found, strict=True):
            assert np.abs(before - after).max() < 1e-4
    with AttentionBuckets(bases=(None, 500.0)).applied(lm):
        changed = influence(lm, ids, targets)
    assert np.abs(changed.attention - plain.attention).max() > 1e-4
    # Shares aside, the structure does not know of rotary bases.
    assert np.abs(changed.structure[1:] - plain.structure[1:]).max() < 1e-9


def jacobian(model: Any, ids: list[int], draws: int) -> np.ndarray:
    """Estimate of the Frobenius norm of the last hidden state's derivative by each embedding, with sum 1."""
    embedded = model.get_input_embeddings()(torch.tensor([ids])).detach()
    embedded.requires_grad_()
    last = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state[0, -1]
    square = 0.0
    for _ in range(draws):
        scalar = (last * torch.randn_like(last)).sum()
        (slope,) = torch.autograd.grad(scalar, embedded, retain_graph=True)
        square = square + slope[0].norm(dim=-1).numpy() ** 2
    lengths = np.sqrt(square)
    return np.asarray(lengths / lengths.sum())


@pytest.mark.parametrize("seed", [0, 1])
def test_before_training_paths_add_as_squares(seed: int) -> None:
    """30 layers of random weights: the rollout puts far too much on the first token, random values do not."""
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=200,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=30,
        num_attention_heads=3,
        num_key_value_heads=1,
    )
    model = hf.LlamaForCausalLM(config).eval()
    lm = posbench.load(model)
    n = 145
    prompts = [torch.randint(0, 200, (n,)).tolist() for _ in range(2)]
    measured = np.mean([jacobian(model, ids, draws=4) for ids in prompts], axis=0)
    shares = influence(lm, prompts[0], np.ones((n, 1))).shares
    layers = [masks.uniform(masks.causal(n))] * lm.layers
    rollout = residual.rollout(layers, shares)[-1][-1]
    squares = residual.random_value_influence(n, shares)
    far, near = (np.abs(row - measured).sum() / 2 for row in (rollout, squares))
    assert near < far / 2
    assert rollout[0] > 2 * measured[0]
