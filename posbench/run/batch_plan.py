"""What a stage asks: every example under every method, in batches that share prefills where they can."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
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
from posbench.run.budget import Deadline
from posbench.run.cost import WorkEstimate
from posbench.run.folder import RowKey
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    Decoding,
    computation_digest,
    decoding_of,
    request_digest,
)
from posbench.run.rows import Stop, go_on, is_out_of_memory
from posbench.run.runtime import Runtime
from posbench.run.sequential import ShapeRule
from posbench.run.shards import finished_keys, merge_rows
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example
from posbench.tasks.base import num_questions, split_into_rounds

log = logging.getLogger(__name__)

Prompts = Mapping[str, Encoded]
"""Prompts by the id of their example."""

MakeBatches = Callable[[Sequence[Example], Prompts, BatchShape], list[list[Example]]]
"""Groups examples, given their prompts, into batches."""

Compute = Callable[[Sequence["Request"]], list[Row]]
"""The rows of a batch, without what identifies them."""

BATCHES_PER_GROUP = 2
"""A group has at most the tokens of so many batches: a killed run repeats one group's prefill, and groups are
what processes share out."""


MIN_SAVED_SHARE = 0.1
"""Prompts under one method share a prefill where that saves this share of their tokens: keeping and gathering what is
shared takes about as long as computing so much."""


class Subject(NamedTuple):
    """A method under test in a run; its rows go to the run's folder under this name."""

    run: Run
    name: str
    method: Method


def subjects(runs: Sequence[Run]) -> list[Subject]:
    """Return the methods of runs that differ in them alone.

    The unmodified model is the first run's, from which the others copy.
    """
    compared = []
    for run in runs:
        for name, method in run.methods().items():
            if run is runs[0] or name != UNMODIFIED:
                compared.append(Subject(run, name, method))
    return compared


class Request(NamedTuple):
    """An example under a method.

    Attributes:
        subject: The method.
        example: The example.
        group: Number of the prefill group: its requests share a prefill, and belong to one process.
        round: Number of the round of questions: see :func:`posbench.tasks.base.split_into_rounds`.
    """

    subject: Subject
    example: Example
    group: int = 0
    round: int = 0

    @property
    def key(self) -> dict[str, str]:
        """The fields that identify its row."""
        return {"method": self.subject.name, "id": self.example.id}


def _request_key(request: Request) -> dict[str, str]:
    return request.key


def _subjects_of(requests: Sequence[Request]) -> list[Subject]:
    """The methods of requests, in their order."""
    return list({id(r.subject): r.subject for r in requests}.values())


class AskedPrompt(NamedTuple):
    """An example as it is asked under a method, which may have rewritten its prompt."""

    example: Example
    encoded: Encoded


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


def _rewritten_prompts(
    subject: Subject, examples: Sequence[Example]
) -> dict[str, AskedPrompt]:
    """Rewrite the prompts of examples for a method; return them by the id of their example."""
    batcher = subject.run.prompts
    rewritten = batcher.rewrite(examples, subject.method)
    encoded = batcher.encode(rewritten)
    return {e.id: AskedPrompt(e, encoded[e.id]) for e in rewritten}


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
        """The prefix of some examples of a group, which is prefilled where it is a new one; None: nothing is shared."""
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


class BatchPlan:
    """Examples under methods, batch by batch: a stage of a run, or of several runs that differ in their methods alone.

    A batch is of one method, or of several that are decoded together (``packs``). Batches depend on examples,
    methods, model and runtime alone, so that a resumed run forms the same ones.

    Args:
        subjects: The methods.
        examples: The examples, each of which is asked under each method.
        encoded: Prompts by the id of their example.
        make_batches: Groups examples into batches.
        packs: Whether methods that continue one prefill share batches where prompts have replies: see
            :func:`posbench.methods.packed.packed`.

    Attributes:
        lm: The model.
        runtime: Sizes of batches, and memory for shared prefills.
        encoded: As given.
        batches: The requests, batch by batch.
        order: The requests in the order of rows in a file: method by method.
        notes: What shares no prefill, and why.
        requested_tokens: Prompt tokens of the batches that were run.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        make_batches: MakeBatches,
        packs: bool = False,
    ) -> None:
        run = subjects[0].run
        self.lm = run.lm
        self.runtime = run.runtime
        self.encoded = encoded
        self.batches: list[list[Request]] = []
        self.notes: list[str] = []
        self.requested_tokens = 0
        self._subjects = subjects
        self._examples = examples
        self._make_batches = make_batches
        self._packs_methods = packs and can_pack(self.lm.model)
        self._prefills = _Prefills(self.lm, self.runtime, encoded)
        self._groups: list[PrefillGroup] = []
        # By the id() of a subject and by decoding: subjects have no hash.
        self._computations: dict[tuple[int, Decoding], str] = {}
        # By the id() of a subject whose method rewrites prompts, what it asks, by the id of the example.
        self._rewritten: dict[int, dict[str, AskedPrompt]] = {}
        for subject in subjects:
            if subject.method.rewrites and self.lm.device.type != "meta":
                self._rewritten[id(subject)] = _rewritten_prompts(subject, examples)
        # The same for every subject that rewrites none, so that its batches are made once.
        self._prompts: dict[int, Prompts] = {
            id(subject): self._prompts_of(subject) for subject in subjects
        }
        self.order = self._rows_in_order(subjects, examples)
        self._rounds = split_into_rounds(examples, self.runtime.round_questions)
        for number, questions in enumerate(self._rounds):
            self._add_round(number, questions)
        self.notes = list(dict.fromkeys(self.notes))

    def _prompts_of(self, subject: Subject) -> Prompts:
        """The prompts that a subject asks, by the id of the example."""
        rewritten = self._rewritten.get(id(subject))
        if rewritten is None:
            return self.encoded
        return {name: prompt.encoded for name, prompt in rewritten.items()}

    def _rows_in_order(
        self, subjects: Sequence[Subject], examples: Sequence[Example]
    ) -> list[Request]:
        """The requests in the order of rows, which is the same in how many rounds they are asked."""
        order = []
        # Most subjects ask the same prompts.
        batches_of_prompts = dict[int, list[list[Example]]]()
        for subject in subjects:
            prompts = self._prompts[id(subject)]
            if id(prompts) not in batches_of_prompts:
                batches = self._make_batches(examples, prompts, BatchShape())
                batches_of_prompts[id(prompts)] = batches
            for batch in batches_of_prompts[id(prompts)]:
                order += [Request(subject, example) for example in batch]
        return order

    def _add_round(self, number: int, examples: Sequence[Example]) -> None:
        """Add the batches of a round of questions, under all methods."""
        groups, batch_tokens = self._shareable_groups(examples)
        by_prefill = dict[str, list[Subject]]()
        for index, subject in enumerate(self._subjects):
            if id(subject) in self._rewritten:
                prompts = self._prompts[id(subject)]
                for batch in self._make_batches(examples, prompts, BatchShape()):
                    group = PrefillGroup(batch, None, [subject.method])
                    self._add_group(number, group, [subject], [batch])
            else:
                prefill_method = subject.method.prefill() if groups else None
                members = by_prefill.setdefault(repr(prefill_method or index), [])
                members.append(subject)
        single_batches = self._make_batches(examples, self.encoded, BatchShape())
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
                for batch in self._make_batches(different, self.encoded, BatchShape()):
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
            for batch in self._make_batches(replied, self.encoded, shape):
                self._add_batch(round_number, pack, batch)
        alone = [subject for subject in members if id(subject) not in in_packs]
        shape = BatchShape(max_tokens)
        for subjects, examples in ((alone, replied), (members, chosen)):
            if subjects and examples:
                for batch in self._make_batches(examples, self.encoded, shape):
                    for subject in subjects:
                        self._add_batch(round_number, [subject], batch)

    def _packs(
        self,
        members: Sequence[Subject],
        examples: Sequence[Example],
        max_tokens: int | None,
    ) -> list[Sequence[Subject]]:
        """The methods that decode examples together, in packs whose longest prompt fits into a batch."""
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
        """How many times a batch of several methods needs the memory of its prompts."""
        continuations = [continuation_of(subject.method) for subject in members]
        return prompt_copies(self.lm.model, [c for c in continuations if c is not None])

    def asked_prompt(self, request: Request) -> AskedPrompt:
        """Return the example of a request as its method asks it."""
        rewritten = self._rewritten.get(id(request.subject))
        if rewritten:
            return rewritten[request.example.id]
        return AskedPrompt(request.example, self.encoded[request.example.id])

    def proof(self, request: Request) -> dict[str, str]:
        """Return what the row of a request proves itself by: what was asked, and what answered."""
        subject = request.subject
        asked = self.asked_prompt(request)
        decoding = decoding_of(subject.run.task, request.example)
        cached = (id(subject), decoding)
        if cached not in self._computations:
            computation = computation_digest(subject.run, subject.method, decoding)
            self._computations[cached] = computation
        return {
            REQUEST: request_digest(asked.encoded.ids, request.example.choices),
            COMPUTATION: self._computations[cached],
        }

    def _proofs_of(self, run: Run) -> dict[RowKey, dict[str, str]]:
        """What the rows of a run prove themselves by, by method and id."""
        return {
            tuple(request.key.values()): self.proof(request)
            for request in self.order
            if request.subject.run is run
        }

    def _num_tokens(self, request: Request) -> int:
        return len(self.asked_prompt(request).encoded.ids)

    def _shareable_groups(
        self, examples: Sequence[Example]
    ) -> tuple[list[list[Example]], int | None]:
        """Groups of examples that share a prefill, and the tokens of a batch; no groups where that cannot be."""
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
        """Estimate, before any of it is done, what the plan asks of the model.

        :attr:`LM.tokens_read` will count as many computed tokens.

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
        # Of each batch, its tokens, and those of the prefill that it goes on from.
        memory = [(0, 0)]
        decode_steps = 0
        for requests in self.batches:
            prefix = prefix_tokens[requests[0].group]
            lengths = [self._num_tokens(request) for request in requests]
            replies = [self._reply_tokens(r) if answered else 0 for r in requests]
            spans += [(length - 1 if prefix else 0, length) for length in lengths]
            decodings += [
                (length, max(reply - 1, 0))
                for length, reply in zip(lengths, replies, strict=True)
            ]
            members = _subjects_of(requests)
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
        if request.example.choices:
            return 0
        return generation_budget(self.lm, request.subject.run.task, request.example)

    def parts(self, batch: Sequence[Request]) -> list[Sequence[Request]]:
        """A batch in the parts that :meth:`applied` takes: whole, or method by method where these cannot share it.

        That is so where the memory was too small for the prefill, or for the batch, which then was split.
        """
        members = _subjects_of(batch)
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
        members = _subjects_of(batch)
        ids = [r.example.id for r in batch[: len(batch) // len(members)]]
        prefix = self._prefills.prefix(group, ids)
        self.requested_tokens += sum(self._num_tokens(request) for request in batch)
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

    def complete(
        self,
        run: Run,
        file: str,
        stage: str,
        compute: Compute,
        deadline: Deadline | None = None,
        shape_rule: ShapeRule | None = None,
    ) -> list[Row]:
        """Compute every row that a file of the run lacks, and return all rows.

        Of a shard, only its own rows are computed and returned. See
        :meth:`posbench.run.rows.ResumableRows.complete`.

        Args:
            run: The run.
            file: Name of the JSON-lines file in its folder.
            stage: The stage.
            compute: Rows of a batch.
            deadline: When to stop, at the end of a round of questions.
            shape_rule: What tells that enough questions were asked, at the end of a round.
        """
        proofs = self._proofs_of(run)
        merge_rows(run.out, file, proofs)
        with self._sharing_reported(run, stage):
            if run.main_out or run.workers:
                shard_rows = self._complete_shard(run, file, stage, compute)
                if run.main_out:
                    run.out.mark(file, done=True)
                    return shard_rows
            if run.workers:
                run.workers.wait(file)
                merge_rows(run.out, file, proofs)
            stop: Stop = go_on
            if deadline or shape_rule:
                stop = self._stop_between_rounds(run, file, deadline, shape_rule)
            rows = run.rows.complete(
                file,
                stage,
                self.batches,
                _request_key,
                compute,
                self.order,
                self.proof,
                stop,
            )
            if shape_rule and shape_rule.stopped:
                kept = self._examples_before(shape_rule.stopped_round)
            elif deadline and deadline.stopped:
                kept = self._examples_of_whole_rounds(rows)
                counts = (num_questions(kept), num_questions(self._examples))
                deadline.stopped = counts
            else:
                return rows
            return self._keep_examples(kept, run, file, rows)

    def _stop_between_rounds(
        self,
        run: Run,
        file: str,
        deadline: Deadline | None,
        shape_rule: ShapeRule | None,
    ) -> Stop:
        """Stop before the first round of questions that is not needed, or no longer fits; the first is always made."""
        tokens = Counter[int]()
        for batch in self.batches:
            for request in batch:
                tokens[request.round] += self._num_tokens(request)
        current: int | None = None

        def stop(batch: Sequence[Request]) -> bool:
            nonlocal current
            number = batch[0].round
            if number == current:
                return False
            current = number
            ending: ShapeRule | Deadline | None = None
            if number and shape_rule and shape_rule.is_decided(rows_before(number)):
                ending = shape_rule
            elif number and deadline and not deadline.fits(tokens[number]):
                ending = deadline
            if ending:
                num_asked = num_questions(self._examples_before(number))
                ending.stop(number, num_asked, num_questions(self._examples))
                return True
            if deadline:
                deadline.begin(tokens[number])
            return False

        def rows_before(number: int) -> list[Row]:
            ids = {example.id for example in self._examples_before(number)}
            return [row for row in run.out.rows(file) if row["id"] in ids]

        return stop

    def _examples_before(self, number: int) -> list[Example]:
        """The examples of the rounds before one, in the order in which the task gives them."""
        ids = {example.id for made in self._rounds[:number] for example in made}
        return [example for example in self._examples if example.id in ids]

    def _examples_of_whole_rounds(self, rows: Sequence[Row]) -> list[Example]:
        """The examples of the rounds that lack no row: a row that failed may be missing in one before the last."""
        made = {(row["method"], row["id"]) for row in rows}
        ids = {
            example.id
            for examples in self._rounds
            if all((s.name, e.id) in made for s in self._subjects for e in examples)
            for example in examples
        }
        return [example for example in self._examples if example.id in ids]

    def _keep_examples(
        self, examples: Sequence[Example], run: Run, file: str, rows: Sequence[Row]
    ) -> list[Row]:
        """The rows of some examples, as a run of these alone orders them; the file keeps no others.

        Args:
            examples: The examples.
            run: The run.
            file: Name of the JSON-lines file in its folder.
            rows: The rows that were made, or copied from another run.
        """
        by_key = {(row["method"], row["id"]): row for row in rows}
        kept_rows = [
            by_key[request.subject.name, request.example.id]
            for request in self._rows_in_order(self._subjects, examples)
        ]
        run.out.write_rows(file, kept_rows)
        return kept_rows

    def _complete_shard(
        self, run: Run, file: str, stage: str, compute: Compute
    ) -> list[Row]:
        """Compute the rows of this process's shard, while the workers of the run make the others."""
        out = run.main_out or run.out
        finished = finished_keys(out, file, self._proofs_of(run))
        missing = [
            batch
            for batch in self.batches
            if any(tuple(request.key.values()) not in finished for request in batch)
        ]
        shard = run.shard
        own_batches = [
            batch for batch in missing if batch[0].group % shard.count == shard.index
        ]
        if run.workers and missing:
            message = "too few groups of prompts to share out: one process makes all"
            if len(own_batches) < len(missing):
                run.workers.start(run.method.found_parameters)
                message = f"{shard.count} processes share out the prompts; below, what this one makes"
            run.console.print(f"{stage}: {message}", markup=False)
        if not own_batches:
            return []
        return run.rows.complete(
            file, stage, own_batches, _request_key, compute, proof=self.proof
        )

    def fill(self, run: Run, file: str, stage: str, compute: Compute) -> None:
        """Compute the rows that the runs of the plan lack, and append each to the folder of its run.

        What fails is logged, and left to the run that it belongs to. A shard of one run is completed.

        Args:
            run: The run that shows progress.
            file: Name of the JSON-lines file in each run's folder.
            stage: The stage.
            compute: Rows of a batch.
        """
        if run.main_out:
            self.complete(run, file, stage, compute)
            return
        finished = dict[Path, set[RowKey]]()
        for subject in self._subjects:
            subject_run = subject.run
            out = subject_run.out
            if out.path not in finished:
                proofs = self._proofs_of(subject_run)
                finished[out.path] = finished_keys(out, file, proofs)

        def is_missing(request: Request) -> bool:
            row_key = tuple(request.key.values())
            return row_key not in finished[request.subject.run.out.path]

        pending = [batch for batch in self.batches if any(map(is_missing, batch))]
        failed = set[int]()
        total = sum(map(len, self.batches))
        num_pending = sum(map(len, pending))
        with (
            self._sharing_reported(run, stage),
            run.progress(stage, total, total - num_pending) as advance,
        ):
            for batch in pending:
                members = [s for s in _subjects_of(batch) if id(s) not in failed]
                if members:
                    try:
                        rows = compute(batch)
                    except (RuntimeError, UserError) as error:
                        message = "%s: %s; left to a run of its own"
                        for subject in members:
                            name = subject.run.out.path.name
                            log.warning(message, name, error)
                            failed.add(id(subject))
                    else:
                        for subject in members:
                            missing_rows = [
                                {**request.key, **row, **self.proof(request)}
                                for request, row in zip(batch, rows, strict=True)
                                if request.subject is subject and is_missing(request)
                            ]
                            subject.run.out.append(file, missing_rows)
                advance(len(batch))

    @contextmanager
    def _sharing_reported(self, run: Run, stage: str) -> Iterator[None]:
        """Print what shares no prefill, and after the block how many tokens sharing saved."""
        tokens_before = self.lm.tokens_read
        for note in self.notes:
            run.console.print(f"{stage}: {note}", soft_wrap=True, markup=False)
        yield
        computed = self.lm.tokens_read - tokens_before
        if computed < self.requested_tokens:
            message = f"{computed:,} of {self.requested_tokens:,} prompt tokens computed, the others shared"
            run.console.print(f"{stage}: {message}", soft_wrap=True, markup=False)
