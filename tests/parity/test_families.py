"""scale_channel on every family against two full attentions without cache, which know nothing of the family table."""

import inspect
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import posbench
from posbench import arch
from posbench.hooks import replaced
from posbench.methods import ScaleChannel
from tests.models import BUILDERS, VOCABULARY, attentions, build

PROMPT, STEPS = 33, 12
TIGHT = 5e-5
SETTINGS = [((5,), 0.0, (0, 3)), ((0, 17, 47), -1.0, (1, 2)), ((5, 41), 2.0, (1, 1))]


class Memory:
    """Stands in for a cache: remembers the keys and values of one call, or gives them back in another."""

    is_sliding = False

    def __init__(self, give=()):
        self.give, self.kept = dict(give), {}

    def update(self, key, value, layer, *_, **__):
        self.kept = {"key": key, "value": value}
        return self.give.get("key", key), self.give.get("value", value)

    def get_seq_length(self, *_):
        return 0


@torch.no_grad()
def double_forward(model, ids, mask, *, first_row, channels, factor, layers, scale_keys=True, scale_values=False):
    """Logits [B, T, V]: each chosen attention runs on its input and on the scaled input with the values of the first run."""

    def twice(forward):
        parameters = inspect.signature(forward).parameters
        place = "layer_past" if "layer_past" in parameters else "past_key_values"

        def call(*args, **kwargs):
            bound = inspect.signature(forward).bind(*args, **kwargs)
            arguments = {k: v for k, v in bound.arguments.items() if k != "kwargs"} | bound.arguments.get("kwargs", {})
            first, hidden = Memory(), arguments["hidden_states"]
            base = forward(**arguments | {place: first})
            scaled = hidden.clone()
            scaled[..., list(channels)] *= factor
            kept = {} if scale_values else {"value": first.kept["value"]}
            if not scale_keys:
                kept["key"] = first.kept["key"]
            second = forward(**arguments | {place: Memory(kept), "hidden_states": scaled})
            return (torch.cat([base[0][:, :first_row], second[0][:, first_row:]], dim=1), *base[1:])

        return call

    with ExitStack() as stack:
        for module in attentions(model)[layers[0] : layers[1] + 1]:
            stack.enter_context(replaced(module, "forward", twice(module.forward)))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def prompts(padded, batch=4):
    torch.manual_seed(1)
    ids, mask = torch.randint(1, VOCABULARY - 1, (batch, PROMPT)), torch.ones(batch, PROMPT, dtype=torch.long)
    for row, pads in enumerate([7, 0, PROMPT - 1, 1][:batch] if padded else []):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return ids, mask


@torch.no_grad()
def through_posbench(model, method, ids, mask, steps=STEPS):
    """Logits of the prompt, of each greedy step, and all tokens, through stock Hugging Face calls."""
    lm = posbench.load(model)
    with method.applied(lm):
        prefill = lm.logits(ids, mask)
        out = lm.model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return prefill, torch.stack(out.logits, dim=1), out.sequences


def errors(model, method, *, padded, steps=STEPS, **wrong):
    """Largest difference to the two attentions in the prompt and in the generated tokens, and the size of the effect."""
    ids, mask = prompts(padded)
    prefill, generated, tokens = through_posbench(model, method, ids, mask, steps)
    whole = torch.cat([mask, torch.ones(len(ids), steps, dtype=torch.long)], dim=1)
    first_row = 0 if method.last == "all" else PROMPT - method.last
    setting = dict(channels=method.channels, factor=method.factor, layers=method.layers, first_row=first_row) | wrong
    expected = double_forward(model, tokens, whole, **setting)
    plain = double_forward(model, tokens, whole, **setting | dict(first_row=tokens.shape[1]))
    seen = mask.bool()
    return (
        (prefill - expected[:, :PROMPT])[seen].abs().max().item(),
        (generated - expected[:, PROMPT - 1 : -1]).abs().max().item(),
        (expected - plain)[:, PROMPT - 1 :].abs().max().item(),
    )


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize("name", BUILDERS)
def test_prefill_and_cached_decoding_equal_two_attentions(name, padded):
    model = build(name)
    for channels, factor, layers in SETTINGS:
        method = ScaleChannel(channel=channels, factor=factor, layers=layers)
        prompt, generated, effect = errors(model, method, padded=padded)
        assert prompt < TIGHT and generated < TIGHT
        assert effect > 0.005, "the setting has no effect to test"
