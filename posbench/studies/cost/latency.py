"""Time of the methods and of the channel search, measured side by side on random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from posbench.methods.scale_channel import scale_layer_range
from posbench.model import families
from posbench.model.hooks import cache_name, replace_attribute
from posbench.model.lm import LM
from posbench.model.load import torch_device
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, Whole
from posbench.stats import reference
from posbench.stats.findings import Finding
from posbench.stats.frames import UNMODIFIED
from posbench.studies.base import Tables
from posbench.studies.cost.floors import floors
from posbench.studies.cost.timing import (
    Shape,
    TimingStudy,
    applicable_methods,
    random_model,
    shape_config,
    with_environment,
)

LOSS_TOKENS = 4  # whose loss the search measures
RATIO_TOLERANCE = 0.05  # relative, of a measured ratio of times to a paper's


@dataclass(frozen=True, kw_only=True)
class Latency(TimingStudy):
    """Prefill and decoding under every method, scale_channel and its direct way, and the channel search.

    Attributes:
        shape: Shape of the model.
        dtype: Of its weights.
        methods_at: Prompt lengths at which all methods run side by side.
        prompts: Prompt lengths of scale_channel and its direct way.
        new_tokens: Generated tokens; 1 measures the prefill.
        search_tokens: Prompt length of the search; 0 leaves it out.
        candidates: Of the search.
        methods: These only, with the unmodified model; empty for all that apply.
        claims_of: The paper whose ratios of times are judged.
        floors: Whether to measure also the least work of moice and attention_buckets for a prompt.
    """

    all_methods: ClassVar[bool] = True
    caption: ClassVar[str] = "What methods cost, on random weights."

    shape: Shape = "small"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    methods_at: tuple[Count, ...] = (2048,)
    prompts: tuple[Count, ...] = (4096,)
    new_tokens: tuple[Count, ...] = (1,)
    search_tokens: Whole = 2048
    candidates: Count = 40
    methods: tuple[str, ...] = ()
    claims_of: Literal["LPES", "Yu et al. 2025"] | None = None
    floors: bool = False

    def check(self, run: Run) -> None:
        """Refuse floors of replies longer than one token, prompts beyond the window, and methods that it cannot time.

        Raises:
            UserError: A field does not fit.
        """
        if self.floors and set(self.new_tokens) != {1}:
            raise UserError(
                "study.floors",
                True,
                "true only with study.new_tokens=[1]",
                "set study.new_tokens=[1]",
            )
        window = families.context_window(shape_config(self.shape))
        longest = window - max(self.new_tokens)
        lengths = {"prompts": self.prompts, "methods_at": self.methods_at}
        lengths["search_tokens"] = (self.search_tokens,)
        for name, tokens in lengths.items():
            if max(tokens, default=0) > longest:
                allowed = f"at most {longest:,} tokens: shape {self.shape} reads {window:,} with the reply"
                value = getattr(self, name)
                hint = f"lower study.{name}, or choose another study.shape"
                raise UserError(f"study.{name}", value, allowed, hint)
        if not (self.methods_at or self.prompts or self.search_tokens):
            allowed = "a length here, in study.methods_at or in study.search_tokens"
            hint = "leave one of the three at its default"
            raise UserError("study.prompts", [], allowed, hint)
        timed = [
            name
            for name, choice in run.all_methods.items()
            # On these prompts of random tokens a change of the prompt would count as the unmodified model.
            if choice.changed_part != "prompt"
        ]
        for name in sorted(set(self.methods) - set(timed)):
            hint = "posbench ls methods shows them; study=remedies times changes of the prompt, too"
            raise UserError("study.methods", name, ", ".join(timed), hint)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Time a model with random weights: prefill and generation under each method, and the search.

        Returns:
            Tables ``generation`` (a row for each method and length, with the papers' ratios) and ``search``.
        """
        torch.manual_seed(0)
        lm = random_model(self.shape, torch_device(run.runtime.device), self.dtype)
        # Stopping early would compare different amounts of work; MPT's own default is to go without a cache.
        lm.model.generation_config = copy.copy(lm.model.generation_config)
        lm.model.generation_config.update(eos_token_id=None, use_cache=True)

        methods = self._chosen_methods(run, lm)
        example = ScaleChannel.example(lm)
        direct_ways: dict[str, Method] = {
            UNMODIFIED: Unmodified(),
            "scale_channel": example,
            "re-projection": Reprojection(**vars(example)),
        }
        # A length in both lists is one work.
        plan = dict.fromkeys(self.methods_at, methods)
        for tokens in self.prompts:
            plan[tokens] = plan.get(tokens, {}) | direct_ways
        generation: list[Row] = []
        search: list[Row] = []
        num_works = len(plan) * len(self.new_tokens) + bool(self.search_tokens)
        with run.progress("works", num_works) as advance:
            lengths = product(plan.items(), dict.fromkeys(self.new_tokens))
            for (tokens, ways), new_tokens in lengths:
                generation += self.generation(lm, ways, tokens, new_tokens)
                advance(1)
            if self.search_tokens:
                search += self.search(lm)
        rows = {"generation": generation, "search": search}
        return {name: with_environment(part) for name, part in rows.items() if part}

    def _chosen_methods(self, run: Run, lm: LM) -> dict[str, Method]:
        """Return the methods to time, by name, with the least work each could do (its floor) if that is asked."""
        names = self.methods or run.all_methods
        choices = {
            name: run.all_methods[name] for name in run.all_methods if name in names
        }
        chosen = applicable_methods(
            lm, choices, lambda choice: choice.cls.example(lm), run.console.out
        )
        if self.floors:
            chosen |= floors(chosen)
        return chosen

    @inference_mode
    def generation(
        self, lm: LM, methods: Mapping[str, Method], tokens: int, new_tokens: int
    ) -> list[Row]:
        """Time prefill and greedy decoding of one prompt under each method.

        Args:
            lm: The model.
            methods: Methods by name; the first one is the base.
            tokens: Of the prompt.
            new_tokens: Generated tokens.

        Returns:
            Rows of :meth:`TimingStudy.compared`, and the papers' ratios in ``paper``.
        """
        vocab_size = lm.model.config.vocab_size
        ids = torch.randint(5, vocab_size, (1, tokens), device=lm.device)
        # A method that reads items gets the halves of the prompt.
        half = tokens // 2
        lm.items.add(ids[0].tolist(), [(0, half), (half, tokens)])

        def generate(method: Method) -> None:
            with method.applied(lm):
                lm.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )

        ways = {name: partial(generate, method) for name, method in methods.items()}
        work = f"{tokens} + {new_tokens} tokens"
        rows = self.compared(work, ways, lm.device, faster=False)
        published = _published_ratios(self.claims_of)
        for row in rows:
            shown = published[published["method"] == row["way"]]
            at_this_length = shown["tokens"] == tokens
            if at_this_length.any():
                shown = shown[at_this_length]
            texts = [f"{paper.ratio} ({paper.source})" for paper in shown.itertuples()]
            row |= {"tokens": tokens, "paper": "; ".join(texts)}
        return rows

    def figures(self, tables: Tables) -> Drawn:
        """The ratios of each table; the search's has a caption of its own."""
        figures = {**super().figures(tables)}
        if "search" in figures:
            caption = "What the channel search costs, on random weights."
            figures["search"] = (figures["search"][0], caption)
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Compare each ratio of times in a paper with the one measured at the same prompt length.

        Args:
            tables: Those of :meth:`measure`; ``generation`` has a row for each way to generate and prompt length
                (tokens).

        Returns:
            A finding for each ratio; it says untestable where the way was measured at other lengths only.
        """
        # The user asks for no paper's claims.
        if self.claims_of is None:
            return []
        columns = ["way", "tokens"]
        generation = tables.get("generation", pd.DataFrame(columns=columns))
        findings = []
        for paper in _published_ratios(self.claims_of).itertuples():
            of_method = generation[generation["way"] == paper.method]
            of_length = of_method[of_method["tokens"] == paper.tokens]
            if len(of_method) and of_length.empty:
                measured = ", ".join(map(str, of_method["tokens"].unique()))
                note = f"measured on prompts of {measured} tokens, the paper's have {paper.tokens}"
                claim = _ratio_claim(paper)
                findings.append(Finding.untestable(claim, "time", note))
            for row in of_length.to_dict("records"):
                findings.append(_ratio_finding(row, paper))
        return findings

    @inference_mode
    def search(self, lm: LM) -> list[Row]:
        """Time the losses of candidates of the channel search: a forward for each, against one shared prefill.

        Returns:
            A row for each of the two ways.

        Raises:
            RuntimeError: Their losses differ by more than rounding.
        """
        width = lm.model.config.hidden_size
        layers = scale_layer_range((10, 25), lm.layers)
        settings = product(range(0, width, width // 10), (0.5, 0.0, -0.5, -1.0))
        all_candidates = [
            ScaleChannel(channel=channel, factor=factor, layers=layers)
            for channel, factor in settings
        ]
        # About ten channels, four factors: as many as asked.
        candidates = all_candidates[: self.candidates]
        ids = torch.randint(
            5, lm.model.config.vocab_size, (self.search_tokens + LOSS_TOKENS,)
        ).tolist()
        pair = (ids[: self.search_tokens], ids[self.search_tokens :])

        found: dict[str, torch.Tensor] = {}

        def shared_prefill() -> None:
            # Without the first row, the unmodified model's.
            losses = candidate_losses(lm, [pair], candidates)[1:, 0]
            found["shared"] = torch.from_numpy(losses)

        def separate_forwards() -> None:
            losses = []
            inputs, targets = lm.pad_with_answers([pair])
            for candidate in candidates:
                with replace(candidate, last=LOSS_TOKENS).applied(lm):
                    output = lm.model(**inputs, logits_to_keep=LOSS_TOKENS)
                    losses.append(lm.answer_nats(output.logits, targets))
            found["separate"] = torch.cat(losses).double().cpu()

        ways = {
            "one forward per candidate": separate_forwards,
            "one shared prefill": shared_prefill,
        }
        tokens = f"{self.search_tokens} + {LOSS_TOKENS} tokens"
        work = f"{len(candidates)} candidates, {tokens}"
        # Both ways take long.
        half_as_often = replace(self, repeats=max(1, self.repeats // 2))
        rows = half_as_often.compared(work, ways, lm.device)
        allowed = torch.finfo(lm.model.dtype).eps ** 0.5
        apart = float((found["shared"] - found["separate"]).abs().max())
        if not apart <= allowed:
            raise RuntimeError(f"{work}: the losses lie {apart:.2g} nats apart")
        return rows


def _published_ratios(paper: str | None) -> pd.DataFrame:
    """The ratios of times that the papers print, or one paper: method, tokens of the prompt, ratio, source."""
    columns = ("method", "tokens", "ratio", "source")
    printed = reference.read_table("latency.csv", *columns)
    printed = printed.astype({"tokens": int})
    return printed[printed["source"].str.startswith(paper or "")]


def _ratio_claim(paper: Any) -> str:
    """The claim of a row of ``latency.csv``."""
    return f"{paper.method} takes {paper.ratio} times as long as the unmodified model ({paper.source})"


def _ratio_finding(row: Mapping[str, Any], paper: Any) -> Finding:
    """Compare a measured slowdown with the paper's.

    They agree where all rounds lie within 5 % of the paper's ratio, and differ where all rounds lie farther
    away.

    Args:
        row: A row of the table ``generation``.
        paper: A row of ``latency.csv``.
    """
    low = (1 - RATIO_TOLERANCE) * float(paper.ratio)
    high = (1 + RATIO_TOLERANCE) * float(paper.ratio)
    number = (row["ratio"], row["ratio_min"], row["ratio_max"], row["n"])
    is_inside = low <= row["ratio_min"] and row["ratio_max"] <= high
    is_outside = row["ratio_max"] < low or row["ratio_min"] > high
    statistic = f"time over the unmodified model's, {row['work']}; from the smallest to the largest of the rounds"
    note = "random weights, no interval: this machine and its rounds"
    claim = _ratio_claim(paper)
    finding = Finding.that(is_inside, claim, statistic, number, note)
    finding = replace(finding, holds_if=f"between {low:.3g} and {high:.3g}")
    return finding if is_inside or is_outside else finding.inconclusive()


class Reprojection(ScaleChannel):
    """scale_channel the direct way, the yardstick; batches without padding only.

    The prompt runs in one pass, each chosen attention module once as it is and once on scaled queries and
    keys; the last row comes from the second run, whose keys stay in the cache.
    """

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """Let the attention modules of the method's layers run twice inside the block: as they are, and scaled."""
        attentions = families.attention_modules(lm.model)
        with ExitStack() as stack:
            for index in self.layer_indices:
                attention = attentions[index]
                forward = partial(self._run_twice, lm.model, index, attention.forward)
                stack.enter_context(replace_attribute(attention, "forward", forward))
            yield lm

    def _run_twice(
        self,
        model: PreTrainedModel,
        layer: int,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run an attention module as it is and with scaled queries and keys, and join the outputs.

        Args:
            model: The model.
            layer: Index of the module.
            forward: The module's own forward.
            *args: Its arguments.
            **kwargs: Its arguments, among them the cache.

        Returns:
            Output [B, T, D] and the module's other outputs.
        """
        name = cache_name(kwargs)
        cache = kwargs.pop(name)
        is_prompt = families.attention_input(args, kwargs).shape[1] > 1
        if is_prompt:
            # The unscaled keys must not enter the cache.
            scratch = {name: transformers.DynamicCache()}
            base, *_ = forward(*args, **scratch, **kwargs)
        with ExitStack() as stack:
            for handle in families.on_query_key_input(model, layer, self.scale):
                stack.callback(handle.remove)
            scaled = forward(*args, **{name: cache}, **kwargs)
        if not is_prompt:
            return scaled
        # All tokens of a prompt but the last are unscaled.
        return torch.cat([base[:, :-1], scaled[0][:, -1:]], dim=1), scaled[1]
