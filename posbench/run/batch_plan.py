"""The requests of a stage to a model in process, in batches that share prefills where they can."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from posbench.late import torch
from posbench.measure.replies import BatchShape, generation_budget
from posbench.methods import Method
from posbench.methods.packed import (
    can_pack,
    continuation_of,
    packed,
    prompt_copies,
)
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.model.prefix import Prefix
from posbench.model.store import (
    PrefixStore,
    build_prefix_trie,
    computed_spans,
    group_by_prefix,
    reason_not_shareable,
    segment_batches,
    token_bytes,
)
from posbench.run.base import Run
from posbench.run.cost import WorkEstimate
from posbench.run.plan import Plan, Prompts, Request, Subject, subjects_of
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    Decoding,
    computation_digest,
    decoding_of,
    request_digest,
)
from posbench.run.rows import is_out_of_memory
from posbench.run.runtime import Runtime
from posbench.tasks import Example

log = logging.getLogger(__name__)

BATCHES_PER_GROUP = 2
"""Most tokens of a group, in full batches: a killed run repeats one group's prefill, and processes share out groups."""


MIN_SAVED_SHARE = 0.1
"""Smallest share of tokens that a shared prefill must save: storing and gathering costs about the same time as
computing them."""


class PrefillGroup(NamedTuple):
    """Examples that share a prefill.

    Attributes:
        examples: The examples.
        prefill_method: The method under which they are prefilled; None: nothing is shared.
        methods: The methods that go on from there.
    """

    examples: Sequence[Example]
    prefill_method: Method | None
    methods: Sequence[Method]


class _Prefills:
    """The shared prefills of a plan, of which one is in memory at a time, and the prefix of the latest batch.

    Args:
        lm: The model.
        runtime: Sizes of the batches of a prefill.
        encoded: Prompts by the id of their example.
    """

    def __init__(
        self, lm: LM, runtime: Runtime, encoded: Mapping[str, Encoded]
    ) -> None:
        self._lm = lm
        self._runtime = runtime
        self._encoded = encoded
        self._group: PrefillGroup | None = None
        self._store: PrefixStore | None = None
        self._prefix_ids: list[str] = []
        self._prefix: Prefix | None = None

    def prompts(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of prompts without their last token, which is not part of a shared prefill."""
        return [self._encoded[e.id].ids[:-1] for e in examples]

    def prefix(self, group: PrefillGroup, ids: list[str]) -> Prefix | None:
        """Return the prefix of some examples of a group, prefilled if it is new; None if nothing is shared."""
        if self._group is not group:
            self._group = None
            self._store = None
            self._forget_prefix()
            if group.prefill_method:
                self._store = self._prefill(group, group.prefill_method)
            self._group = group
        if self._prefix_ids != ids:
            self._forget_prefix()
            if self._store:
                rows = {e.id: row for row, e in enumerate(group.examples)}
                self._prefix = self._store.prefix(self._lm, [rows[i] for i in ids])
            self._prefix_ids = ids
        return self._prefix

    def _forget_prefix(self) -> None:
        """Free the memory of the latest prefix before another one takes its place."""
        self._prefix_ids = []
        self._prefix = None

    def _prefill(self, group: PrefillGroup, method: Method) -> PrefixStore | None:
        """The prefill of a group; None where the memory is too small for it."""
        channels = set[int]()
        layers = set[int]()
        for method_of_group in group.methods:
            method_channels, method_layers = method_of_group.records()
            channels.update(method_channels)
            layers.update(method_layers)
        prompts = self.prompts(group.examples)
        store = PrefixStore(prompts, sorted(channels), sorted(layers))
        runtime = self._runtime
        try:
            with method.applied(self._lm):
                store.fill(self._lm, runtime.batch_size, runtime.batch_tokens)
            return store
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = "out of memory with a prefill of %d tokens: not shared"
            log.warning(message, store.layout.size)
        del store
        torch.cuda.empty_cache()  # only behind the handler are its tensors free
        return None


class BatchPlan(Plan):
    """Examples under methods, batch by batch.

    A batch is of one method, or of several that are decoded together (:attr:`packs`). Batches depend on examples,
    methods, model and runtime alone, so that a resumed run forms the same ones.

    Args:
        subjects: The methods.
        examples: The examples, each of which is asked under each method.
        encoded: Prompts by the id of their example.
        round_questions: Questions of a round; None: the runtime's.

    Attributes:
        packs: Whether methods that go on from one prefill share a batch.
        run: The run that the batches are sized for: the first of several.
        lm: The model.
        runtime: Sizes of batches, and memory for shared prefills.
        encoded: As given.
        notes: Which methods share no prefill, and why.
        requested_tokens: Prompt tokens of the batches that were run.
    """

    packs = False

    def __init__(
        self,
        subjects: Sequence[Subject],
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        round_questions: int | None = None,
    ) -> None:
        super().__init__(subjects, examples, encoded, round_questions)
        self.run = subjects[0].run
        self.lm = self.run.lm
        self.runtime = self.run.runtime
        self.notes: list[str] = []
        self.requested_tokens = 0
        self._packs_methods = self.packs and can_pack(self.lm.model)
        self._prefills = _Prefills(self.lm, self.runtime, encoded)
        self._groups: list[PrefillGroup] = []
        # By the id() of a subject and by decoding: subjects have no hash.
        self._computations: dict[tuple[int, Decoding], str] = {}
        # The same for every subject that rewrites none, so that its batches are made once.
        self._prompts: dict[int, Prompts] = {
            id(subject): self._prompts_of(subject) for subject in subjects
        }
        for number, questions in enumerate(self.rounds):
            self._add_round(number, questions)
        self.notes = list(dict.fromkeys(self.notes))

    @abstractmethod
    def make_batches(
        self, examples: Sequence[Example], prompts: Prompts, shape: BatchShape
    ) -> list[list[Example]]:
        """Return examples, given their prompts, grouped into batches."""

    def _prompts_of(self, subject: Subject) -> Prompts:
        """The prompts that a subject asks, by the id of the example."""
        rewritten = self._rewritten.get(id(subject))
        if rewritten is None:
            return self.encoded
        return {name: prompt.encoded for name, prompt in rewritten.items()}

    def rows_in_order(self, examples: Sequence[Example]) -> list[Request]:
        """See :meth:`posbench.run.plan.Plan.rows_in_order`."""
        order = []
        # Most subjects ask the same prompts.
        batches_of_prompts = dict[int, list[list[Example]]]()
        for subject in self._subjects:
            prompts = self._prompts[id(subject)]
            if id(prompts) not in batches_of_prompts:
                batches_of_prompts[id(prompts)] = self._batches_of(subject, examples)
            for batch in batches_of_prompts[id(prompts)]:
                order += [Request(subject, example) for example in batch]
        return order

    def _add_round(self, number: int, examples: Sequence[Example]) -> None:
        """Add the batches of a round of questions, under all methods."""
        groups, batch_tokens = self._shareable_groups(examples)
        by_prefill = dict[str, list[Subject]]()
        for index, subject in enumerate(self._subjects):
            if id(subject) in self._rewritten:
                for batch in self._batches_of(subject, examples):
                    group = PrefillGroup(batch, None, [subject.method])
                    self._add_group(number, group, [subject], [batch])
            else:
                prefill_method = subject.method.prefill() if groups else None
                members = by_prefill.setdefault(repr(prefill_method or index), [])
                members.append(subject)
        single_batches = self.make_batches(examples, self.encoded, BatchShape())
        for members in by_prefill.values():
            methods = [subject.method for subject in members]
            prefill_method = methods[0].prefill() if groups else None
            if prefill_method:
                in_groups = set[str]()
                for shared in groups:
                    if self._saves_tokens(shared, len(methods)):
                        group = PrefillGroup(shared, prefill_method, methods)
                        self._add_shared_group(number, group, members, batch_tokens)
                        in_groups.update(example.id for example in shared)
                different = [e for e in examples if e.id not in in_groups]
                for batch in self.make_batches(different, self.encoded, BatchShape()):
                    group = PrefillGroup(batch, None, methods)
                    self._add_group(number, group, members, [batch])
                continue
            if groups:
                self.notes.append(
                    f"{members[0].name} reads each prompt as one, and shares no prefill"
                )
            for batch in single_batches:
                group = PrefillGroup(batch, None, methods)
                self._add_group(number, group, members, [batch])

    def _batches_of(
        self, subject: Subject, examples: Sequence[Example]
    ) -> list[list[Example]]:
        """Examples in batches of the size and the length of replies that a subject's own prompts need."""
        prompts = self._prompts[id(subject)]
        rewritten = self._rewritten.get(id(subject))
        if rewritten is None:
            return self.make_batches(examples, prompts, BatchShape())
        by_id = {example.id: example for example in examples}
        asked = [rewritten[example.id].example for example in examples]
        return [
            [by_id[example.id] for example in batch]
            for batch in self.make_batches(asked, prompts, BatchShape())
        ]

    def _saves_tokens(self, examples: Sequence[Example], num_methods: int) -> bool:
        """Whether a shared prefill reads so much less than each prompt under each method that it is worth a store."""
        if num_methods > 1:
            return True
        prompts = self._prefills.prompts(examples)
        num_asked = sum(map(len, prompts))
        return build_prefix_trie(prompts).size <= (1 - MIN_SAVED_SHARE) * num_asked

    def _add_group(
        self,
        round_number: int,
        group: PrefillGroup,
        members: Sequence[Subject],
        batches: Sequence[Sequence[Example]],
    ) -> None:
        """Add the batches of a group of examples, each under each of its methods."""
        self._groups.append(group)
        for batch in batches:
            for subject in members:
                self._add_batch(round_number, [subject], batch)

    def _add_batch(
        self, round_number: int, members: Sequence[Subject], batch: Sequence[Example]
    ) -> None:
        """Add a batch of the latest group: examples under methods, method by method."""
        group_number = len(self._groups) - 1
        self.batches.append(
            [Request(s, e, group_number, round_number) for s in members for e in batch]
        )

    def _add_shared_group(
        self,
        round_number: int,
        group: PrefillGroup,
        members: Sequence[Subject],
        max_tokens: int | None,
    ) -> None:
        """Add the batches of examples that share a prefill: of several methods where those can be decoded together."""
        replied = [example for example in group.examples if not example.choices]
        chosen = [example for example in group.examples if example.choices]
        packs = self._packs(members, replied, max_tokens)
        in_packs = {id(subject) for pack in packs for subject in pack}
        self._groups.append(group)
        for pack in packs:
            shape = BatchShape(max_tokens, len(pack), self._prompt_copies(pack))
            for batch in self.make_batches(replied, self.encoded, shape):
                self._add_batch(round_number, pack, batch)
        alone = [subject for subject in members if id(subject) not in in_packs]
        shape = BatchShape(max_tokens)
        for subjects, examples in ((alone, replied), (members, chosen)):
            if subjects and examples:
                for batch in self.make_batches(examples, self.encoded, shape):
                    for subject in subjects:
                        self._add_batch(round_number, [subject], batch)

    def _packs(
        self,
        members: Sequence[Subject],
        examples: Sequence[Example],
        max_tokens: int | None,
    ) -> list[Sequence[Subject]]:
        """Divide the methods that can decode together into the fewest packs that fit a batch on the longest prompt.

        Args:
            members: Methods that continue from one prefill.
            examples: The prompts.
            max_tokens: Tokens of a batch; None: no limit.

        Returns:
            The packs; methods in none, such as all where the list is empty, are decoded alone.
        """
        if not self._packs_methods or not examples:
            return []
        packable = [s for s in members if continuation_of(s.method) is not None]
        length = max(len(self.encoded[example.id].ids) for example in examples)
        reply = max(self._reply_tokens(Request(members[0], e)) for e in examples)
        num_packs = 1
        while True:
            size = -(-len(packable) // num_packs)
            if size < 2:
                return []
            packs = [packable[i : i + size] for i in range(0, len(packable), size)]
            tokens = max(self._prompt_copies(p) * length + size * reply for p in packs)
            if size <= self.runtime.batch_size and (
                max_tokens is None or tokens <= max_tokens
            ):
                return [pack for pack in packs if len(pack) > 1]
            num_packs += 1

    def _prompt_copies(self, members: Sequence[Subject]) -> int:
        """Return how many copies of its prompts' memory a batch of several methods needs."""
        continuations = [continuation_of(subject.method) for subject in members]
        return prompt_copies(self.lm.model, [c for c in continuations if c is not None])

    def proof(self, request: Request) -> dict[str, str]:
        """See :meth:`posbench.run.plan.Plan.proof`."""
        subject = request.subject
        asked = self.asked_prompt(request)
        decoding = decoding_of(subject.run.task, asked.example)
        cached = (id(subject), decoding)
        if cached not in self._computations:
            computation = computation_digest(subject.run, subject.method, decoding)
            self._computations[cached] = computation
        return {
            REQUEST: request_digest(asked.encoded.ids, request.example.choices),
            COMPUTATION: self._computations[cached],
        }

    def size(self, request: Request) -> int:
        """Return the tokens of a request's prompt."""
        return len(self.asked_prompt(request).encoded.ids)

    def _shareable_groups(
        self, examples: Sequence[Example]
    ) -> tuple[list[list[Example]], int | None]:
        """Return groups of examples that share a prefill, and the tokens of a batch; no groups if sharing is not
        possible."""
        share = self.runtime.share
        if not share or not examples:
            return [], None
        reason = reason_not_shareable(self.lm.model)
        if reason:
            self.notes.append(f"{self.lm.name} shares no prefill: {reason}")
            return [], None
        prompts = self._prefills.prompts(examples)
        token_size = token_bytes(self.lm)
        capacity = self.runtime.shared_bytes // token_size
        longest = max(map(len, prompts)) + 1
        max_tokens = self.runtime.batch_tokens or capacity
        batch_tokens = max(min(max_tokens, capacity // 2), longest)
        if capacity - batch_tokens < longest:
            needed_mib = -(-2 * longest * token_size // 2**20)
            self.notes.append(
                f"prompts share no prefill: runtime.share={share} is too small for the longest prompt, "
                f"set {needed_mib}MiB or more"
            )
            return [], None
        group_tokens = min(capacity - batch_tokens, BATCHES_PER_GROUP * max_tokens)
        groups = [
            [examples[index] for index in group]
            for group in group_by_prefix(prompts, group_tokens)
        ]
        return groups, batch_tokens

    def estimate(self, stage: str, answered: bool) -> WorkEstimate:
        """Estimate in advance the work that the plan asks of the model.

        Its computed tokens equal the later count in :attr:`LM.tokens_read`.

        Args:
            stage: The stage.
            answered: Whether prompts are answered.
        """
        runtime = self.runtime
        # Of each forward of a prompt, the tokens before the first computed one, and those up to the last.
        spans = list[tuple[int, int]]()
        prefix_tokens = list[int]()
        for group in self._groups:
            shared = group.examples if group.prefill_method else ()
            prompts = self._prefills.prompts(shared)
            trie = build_prefix_trie(prompts)
            prefix_tokens.append(trie.size)
            for batch in segment_batches(
                prompts, trie.segments, runtime.batch_size, runtime.batch_tokens
            ):
                spans += computed_spans(prompts, batch)
        # Of each prompt, its length, and the tokens of its reply that are read again.
        decodings = list[tuple[int, int]]()
        # Tokens of each batch, and of the prefill that it continues.
        memory = [(0, 0)]
        decode_steps = 0
        for requests in self.batches:
            prefix = prefix_tokens[requests[0].group]
            lengths = [self.size(request) for request in requests]
            replies = [self._reply_tokens(r) if answered else 0 for r in requests]
            spans += [(length - 1 if prefix else 0, length) for length in lengths]
            decodings += [
                (length, max(reply - 1, 0))
                for length, reply in zip(lengths, replies, strict=True)
            ]
            members = subjects_of(requests)
            copies = 1 if len(members) == 1 else self._prompt_copies(members)
            num_prompts = len(requests) // len(members)
            padded_tokens = num_prompts * copies * max(lengths)
            padded_tokens += len(requests) * max(replies)
            memory.append((padded_tokens, prefix))
            decode_steps += max(replies)
        batch_tokens, batch_prefix = max(memory, key=sum)
        first, end = np.array(spans, np.int64).reshape(-1, 2).T
        length, decoded = np.array(decodings, np.int64).reshape(-1, 2).T
        pairs_twice = (end * (end + 1) - first * (first + 1)).sum()
        decoded_pairs = (decoded * length + decoded * (decoded + 1) // 2).sum()
        return WorkEstimate(
            stage,
            prompts=len(decodings),
            tokens=int(length.sum()),
            computed_tokens=int((end - first).sum()),
            attention_pairs=int(pairs_twice) // 2,
            decode_steps=decode_steps,
            decoded_tokens=int(decoded.sum()),
            decoded_pairs=int(decoded_pairs),
            batch_tokens=batch_tokens,
            prefix_tokens=batch_prefix,
        )

    def _reply_tokens(self, request: Request) -> int:
        """Tokens that a reply may have; none where a choice is scored."""
        asked = self.asked_prompt(request).example
        if asked.choices:
            return 0
        return generation_budget(self.lm, request.subject.run.task, asked)

    def parts(self, batch: Sequence[Request]) -> list[Sequence[Request]]:
        """A batch in the parts that :meth:`applied` takes: whole, or method by method where these cannot share it.

        That is so where the memory was too small for the prefill, or for the batch, which then was split.
        """
        members = subjects_of(batch)
        if len(members) == 1:
            return [batch]
        by_method = [
            [request for request in batch if request.subject is subject]
            for subject in members
        ]
        ids = [request.example.id for request in by_method[0]]
        is_grid = all([r.example.id for r in part] == ids for part in by_method)
        if is_grid:
            prefix = self._prefills.prefix(self._groups[batch[0].group], ids)
            if prefix is not None and prefix.tokens:
                return [batch]
        return list(by_method)

    @contextmanager
    def applied(self, batch: Sequence[Request]) -> Iterator[Prefix | None]:
        """Apply the methods of a batch to the model; yield the prefill that its rows go on from.

        Args:
            batch: Requests of one method, or of several as :meth:`parts` gives them.
        """
        group = self._groups[batch[0].group]
        members = subjects_of(batch)
        ids = [r.example.id for r in batch[: len(batch) // len(members)]]
        prefix = self._prefills.prefix(group, ids)
        self.requested_tokens += sum(self.size(request) for request in batch)
        if len(members) == 1:
            with members[0].method.applied(self.lm):
                yield prefix
            return
        assert prefix is not None, "parts() takes methods apart that share no prefill"
        methods = [subject.method for subject in members]
        for method in methods:
            method.check(self.lm)
        with packed(self.lm, prefix, methods) as prefix_of_rows:
            yield prefix_of_rows

    @contextmanager
    def _announce(self, run: Run, stage: str) -> Iterator[None]:
        """Print which methods share no prefill, and after the block the number of tokens that sharing saved."""
        tokens_before = self.lm.tokens_read
        for note in self.notes:
            run.console.print(f"{stage}: {note}")
        yield
        computed = self.lm.tokens_read - tokens_before
        if computed < self.requested_tokens:
            message = f"{computed:,} of {self.requested_tokens:,} prompt tokens computed, the others shared"
            run.console.print(f"{stage}: {message}")
