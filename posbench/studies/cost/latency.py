"""What the methods and the channel search cost, measured side by side on random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import PreTrainedModel, inference_mode, pd, torch, transformers
from posbench.measure.losses import candidate_losses
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.methods.scale_channel import share
from posbench.model import families
from posbench.model.hooks import replaced
from posbench.model.lm import LM
from posbench.model.load import torch_device
from posbench.run.base import Run
from posbench.schema import Count, Whole
from posbench.stats import reference
from posbench.stats.frames import UNMODIFIED
from posbench.studies.cost.floors import floors
from posbench.studies.cost.timing import Shape, Timed, applicable, random_model, table

ANSWER = 4  # tokens whose loss the search measures


@dataclass(frozen=True, kw_only=True)
class Latency(Timed):
    """Prefill and decoding under every method, scale_channel and its direct way, and the channel search."""

    all_methods: ClassVar[bool] = True
    caption: ClassVar[str] = (
        "What methods and the channel search cost, on random weights."
    )

    shape: Shape = "small"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    methods_at: tuple[Count, ...] = (
        2048,
    )  # prompt lengths at which all methods run side by side
    prompts: tuple[Count, ...] = (
        4096,
    )  # prompt lengths of scale_channel and its direct way
    new_tokens: tuple[Count, ...] = (1,)  # generated; 1 measures the prefill
    search_tokens: Whole = 2048  # prompt length of the search; 0 leaves it out
    candidates: Count = 40  # of the search
    methods: tuple[
        str, ...
    ] = ()  # these only, with the unmodified model; empty: all that apply
    floors: bool = (
        False  # also what moice and attention_buckets cannot leave out of a prompt
    )

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if self.floors and set(self.new_tokens) != {1}:
            raise UserError(
                "study.floors", True, "a prompt alone", "study.new_tokens=[1]"
            )
        for name in sorted(set(self.methods) - set(run.all_methods)):
            raise UserError(
                "study.methods",
                name,
                ", ".join(run.all_methods),
                "posbench ls methods shows them",
            )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``generation`` (a way is a method; with the papers' ratios) and ``search``."""
        torch.manual_seed(0)
        lm = random_model(self.shape, torch_device(run.runtime.device), self.dtype)
        # Stopping early would compare different amounts of work; MPT's own default is to go without a cache.
        lm.model.generation_config = copy.copy(lm.model.generation_config)
        lm.model.generation_config.update(eos_token_id=None, use_cache=True)
        methods = applicable(
            lm, run.all_methods, lambda choice: choice.cls.example(lm), run.console.out
        )
        asked = (UNMODIFIED, *(self.methods or run.all_methods))
        example = ScaleChannel.example(lm)
        chosen = {name: method for name, method in methods.items() if name in asked}
        chosen |= floors(chosen) if self.floors else {}
        direct = {
            "scale_channel": example,
            "re-projection": Reprojection(**vars(example)),
        }
        plan = [(tokens, chosen) for tokens in self.methods_at]
        plan += [
            (tokens, {UNMODIFIED: Unmodified(), **direct}) for tokens in self.prompts
        ]
        rows: dict[str, list[Row]] = {"generation": [], "search": []}
        with run.progress(
            "works", len(plan) * len(self.new_tokens) + bool(self.search_tokens)
        ) as advance:
            for (tokens, methods), new in product(plan, self.new_tokens):
                rows["generation"] += self.generation(lm, methods, tokens, new)
                advance(1)
            rows["search"] += self.search(lm) if self.search_tokens else []
        return {name: table(each) for name, each in rows.items() if each}

    @inference_mode
    def generation(
        self, lm: LM, methods: Mapping[str, Method], tokens: int, new: int
    ) -> list[Row]:
        """Rows of prefill and greedy decoding of one prompt, and the papers' ratios in ``paper``."""
        ids = torch.randint(
            5, lm.model.config.vocab_size, (1, tokens), device=lm.device
        )
        fixed = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "pad_token_id": 0,
        }

        def generate(method: Method) -> None:
            with method.applied(lm):
                lm.model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)

        ways = {name: partial(generate, method) for name, method in methods.items()}
        rows = self.compared(f"{tokens} + {new} tokens", ways, lm.device, faster=False)
        printed = reference.table("latency.csv", "method", "ratio", "source").groupby(
            "method"
        )
        told = {
            m: "; ".join(f"{r.ratio} ({r.source})" for r in part.itertuples())
            for m, part in printed
        }
        return [{**row, "paper": told.get(row["way"], "")} for row in rows]

    @inference_mode
    def search(self, lm: LM) -> list[Row]:
        """Rows of a forward for each candidate and of one prefill for all, their losses equal bit by bit."""
        width = lm.model.config.hidden_size
        layers = share((10, 25), lm.layers)
        settings = product(range(0, width, width // 10), (0.5, 0.0, -0.5, -1.0))
        tried = [ScaleChannel(channel=c, factor=f, layers=layers) for c, f in settings][
            : self.candidates
        ]
        prompt = torch.randint(
            5, lm.model.config.vocab_size, (self.search_tokens + ANSWER,)
        ).tolist()
        pair = prompt[: self.search_tokens], prompt[self.search_tokens :]

        def shared() -> list[float]:
            return candidate_losses(lm, [pair], tried)[1:, 0].tolist()

        def apart() -> list[float]:
            found, (inputs, targets) = [], lm.pad_with_answers([pair])
            for each in tried:
                with replace(each, last=ANSWER).applied(lm):
                    found.append(
                        lm.answer_nats(
                            lm.model(**inputs, logits_to_keep=ANSWER).logits, targets
                        )
                    )
            return torch.cat(found).double().tolist()

        ways = {"one forward per candidate": apart, "one shared prefill": shared}
        what = f"{len(tried)} candidates, {self.search_tokens} + {ANSWER} tokens"
        return replace(self, repeats=max(1, self.repeats // 2)).compared(
            what, ways, lm.device
        )


class Reprojection(ScaleChannel):
    """scale_channel the direct way, the yardstick; batches without padding only.

    The prompt runs in one pass, each chosen attention module once as it is and once on scaled queries and
    keys; the last row comes from the second run, whose keys stay in the cache.
    """

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """See :meth:`Method.applied`."""
        attentions = families.attention_modules(lm.model)
        with ExitStack() as stack:
            for index in self.layer_indices:
                twice = partial(self._twice, lm.model, index, attentions[index].forward)
                stack.enter_context(replaced(attentions[index], "forward", twice))
            yield lm

    def _twice(
        self,
        model: PreTrainedModel,
        index: int,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Both runs of one attention module, joined."""
        name = "layer_past" if "layer_past" in kwargs else "past_key_values"
        cache = kwargs.pop(name)
        prompt = families.attention_input(args, kwargs).shape[1] > 1
        base = (
            forward(*args, **{name: transformers.DynamicCache()}, **kwargs)
            if prompt
            else None
        )
        with ExitStack() as stack:
            for handle in families.on_query_key_input(model, index, self.scale):
                stack.callback(handle.remove)
            scaled = forward(*args, **{name: cache}, **kwargs)
        return (
            scaled
            if base is None
            else (torch.cat([base[0][:, :-1], scaled[0][:, -1:]], dim=1), scaled[1])
        )
