"""Prompts and methods that share prefills: the same files, whatever is shared, killed or swept together."""

import gc
import json
import random
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor

from posbench.methods import Unmodified
from posbench.model.store import PrefixStore, token_bytes
from posbench.pipeline.execute import execute
from posbench.pipeline.prepare import build_run, prepare
from posbench.run.batch_plan import _Prefills
from posbench.run.folder import open_run_dir
from posbench.run.plan import Subject
from posbench.run.replies import plan_replies
from posbench.stats.frames import UNMODIFIED
from posbench.tasks.kv_retrieval import WORDS
from tests.conftest import run_folders
from tests.messages import assert_line_names, assert_names

CHANNEL = ["method.channel=15", "method.factor=-1.0", "method.layers=[1,3]"]
TIMES = {
    "DONE",
    "config.yaml",
    "manifest.json",
    "provenance.json",
    "status.json",
    "report.html",
}
QUIET = Console(quiet=True)


@pytest.fixture
def asked(tmp_path):
    """Overrides of questions of 24 pairs, each asked at five gold positions."""
    lines = []
    for number in range(4):
        words = random.Random(number).sample(WORDS, 48)
        records = [[words[2 * i], words[2 * i + 1]] for i in range(24)]
        lines.append(
            {
                "ordered_kv_records": records,
                "key": records[3][0],
                "value": records[3][1],
            }
        )
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [
        f"task.path={file}",
        "task.prompt=compact",
        "task.pairs=24",
        "task.limit=4",
        "task.max_new_tokens=1",
    ]
    given += [
        "task.positions=[0,6,12,18,23]",
        "runtime.threads=1",
        "stages=[intervene,evaluate]",
    ]
    return [
        *given,
        "runtime.intervene_examples=1",
        "runtime.resamples=100",
        "runtime.batch_size=4",
    ]


def config(*overrides):
    from posbench.pipeline.compose import compose_one

    return prepare(compose_one(*overrides)).config


def files(folder):
    """What a run holds, without where and when it was made, and rows without their run."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.endswith(".jsonl"):
            found[name] = [json.dumps(row) for row in open_run_dir(folder).rows(name)]
        elif name not in TIMES:
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize("method", [CHANNEL, ["method=layer_scaling"]])
def test_all_files_are_the_same_whether_prefills_are_shared_or_not(
    asked, method, tmp_path
):
    found = {}
    read = {}
    for share in ("1MiB", "4GiB", "null"):
        own = [
            *asked,
            *method,
            "model.dtype=float64",
            f"runtime.outputs={tmp_path / share}",
        ]
        folder = execute(
            config(*own, f"runtime.share={share}"), command="test", console=QUIET
        )
        found[share] = files(folder)
        read[share] = open_run_dir(folder).status()["spent"]["evaluate"][
            "prompt_tokens"
        ]
    assert found["4GiB"] == found["null"] == found["1MiB"]
    assert 1.2 * read["4GiB"] < read["null"] and 1.1 * read["1MiB"] < read["null"]
    assert read["4GiB"] < read["1MiB"], "a small memory shares less"


def run_of(*overrides):
    one = config(*overrides)
    return build_run(one, QUIET)


def plan_of(run, methods):
    encoded = run.prompts.encode(run.evaluation)
    return plan_replies([Subject(run, *each) for each in methods.items()], encoded)


def test_the_batches_of_a_method_do_not_depend_on_the_others_where_choices_are_scored(
    asked,
):
    run = run_of(*asked, *CHANNEL)
    run.evaluation = [
        replace(example, choices=(*example.answers, "other"))
        for example in run.evaluation
    ]
    methods = {UNMODIFIED: Unmodified(), "scale": run.method.build()}
    both = plan_of(run, methods)
    for name, method in methods.items():
        alone = plan_of(run, {name: method})
        own = [batch for batch in both.batches if batch[0].subject.name == name]
        assert [[a.example.id for a in batch] for batch in own] == [
            [a.example.id for a in batch] for batch in alone.batches
        ]
        assert [batch[0].group for batch in own] == [
            batch[0].group for batch in alone.batches
        ]


def several_methods(run):
    """The unmodified model, two factors, and a method that decodes alone."""
    scale = run.method.build()
    return {
        UNMODIFIED: Unmodified(),
        "-1": scale,
        "2": replace(scale, factor=2.0),
        "all": replace(scale, last="all"),
    }


def test_methods_that_continue_one_prefill_share_batches(asked):
    run = run_of(*asked, *CHANNEL, "runtime.batch_size=7")
    plan = plan_of(run, several_methods(run))
    asked_keys = [tuple(r.key.values()) for batch in plan.batches for r in batch]
    assert sorted(asked_keys) == sorted(tuple(r.key.values()) for r in plan.order)
    for batch in plan.batches:
        names = [request.subject.name for request in batch]
        ids = [request.example.id for request in batch]
        assert len({request.group for request in batch}) == 1
        if names[0] == "all":
            assert set(names) == {"all"}
        else:
            # Method by method, the same examples of each: 2 prompts are 6 of 7 rows.
            together = [UNMODIFIED, "-1", "2"]
            assert names == [name for name in together for _ in ids[::3]]
            assert ids == ids[: len(ids) // 3] * 3 and len(ids) <= 6


@pytest.mark.parametrize("batch_tokens", [700, 400])
def test_a_batch_of_several_methods_keeps_to_its_tokens(asked, batch_tokens):
    run = run_of(*asked, *CHANNEL, "task.max_new_tokens=40", "runtime.batch_size=64")
    run.runtime = replace(run.runtime, batch_tokens=batch_tokens)
    methods = several_methods(run) | {
        f"{n}": replace(run.method.build(), factor=float(n)) for n in range(3, 9)
    }
    plan = plan_of(run, methods)
    sizes = []
    for batch in plan.batches:
        lengths = {r.example.id: len(plan.encoded[r.example.id].ids) for r in batch}
        assert len(lengths) * max(lengths.values()) + 40 * len(batch) <= batch_tokens
        sizes.append(len({r.subject.name for r in batch}))
    assert max(sizes) > 1
    estimated = plan.estimate("evaluate", answered=True)
    assert estimated.batch_tokens <= batch_tokens


def test_a_batch_that_was_split_gives_the_same_replies(asked):
    run = run_of(*asked, *CHANNEL, "task.max_new_tokens=2", "runtime.batch_size=6")
    plan = plan_of(run, several_methods(run))
    batches = [batch for batch in plan.batches if len(batch) == 6][::3]
    # Of the second method one prompt, which cannot be decoded with two of the first.
    assert [len(part) for part in plan.parts(batches[0][:3])] == [2, 1]
    assert [len(part) for part in plan.parts(batches[0][2:])] == [4]
    outputs = []
    for batch in batches:
        whole = [row["output"] for row in plan.answer(batch)]
        for end in (3, 4):
            parts = batch[:end], batch[end:]
            assert [
                row["output"] for part in parts for row in plan.answer(part)
            ] == whole
        outputs += whole
    assert len(set(outputs)) > 1, "equal replies would test nothing"


def test_prompts_with_nothing_in_common_are_read_as_if_nothing_were_shared(asked):
    few = [*asked, "task.positions=[0]", "task.max_new_tokens=2"]
    shared = plan_of(run_of(*few, *CHANNEL), {UNMODIFIED: Unmodified()})
    apart = plan_of(
        run_of(*few, *CHANNEL, "runtime.share=null"), {UNMODIFIED: Unmodified()}
    )
    assert not any(group.prefill_method for group in shared._groups)
    assert not shared.notes, "the method could share, and the reader has nothing to do"
    rows = [row for batch in shared.batches for row in shared.answer(batch)]
    assert rows == [row for batch in apart.batches for row in apart.answer(batch)]
    assert shared.lm.tokens_read == apart.lm.tokens_read == shared.requested_tokens
    # Under two methods each is read once, and at five positions the beginnings are.
    run = run_of(*few, *CHANNEL)
    two = plan_of(run, several_methods(run))
    assert all(group.prefill_method for group in two._groups[:-1])
    five = plan_of(run_of(*asked, *CHANNEL), {UNMODIFIED: Unmodified()})
    assert all(group.prefill_method for group in five._groups)


def live():
    """Bytes of all tensors that Python can see, each storage once.

    A model that another test compiled leaves fake ones, without bytes.
    """
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # isinstance would ask deprecated objects, which warn.
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_what_is_shared_keeps_to_its_memory(asked, monkeypatch):
    run = run_of(*asked, *CHANNEL, "runtime.share=600KiB", "runtime.batch_tokens=null")
    plan = plan_of(run, {"scale": run.method.build()})
    sharing = [b for b in plan.batches if plan._groups[b[0].group].prefill_method]
    assert len(sharing) > 3, "this memory is enough to share"
    plan.lm.generate([[5, 6, 7]], max_new_tokens=1)
    before = live()
    peak = [0]
    gathered = PrefixStore.prefix

    def measured(self, lm, rows):
        prefix = gathered(self, lm, rows)
        peak[0] = max(peak[0], live() - before)
        return prefix

    monkeypatch.setattr(PrefixStore, "prefix", measured)
    for batch in sharing[:3]:
        plan.answer(batch)
    budget = run.runtime.shared_bytes
    assert 0.2 * budget < peak[0] <= budget, (peak[0], budget, token_bytes(plan.lm))


def test_one_that_is_killed_in_a_group_goes_on_to_the_same_bytes(
    asked, tmp_path, monkeypatch
):
    whole = execute(
        config(*asked, *CHANNEL, f"runtime.outputs={tmp_path / 'a'}"),
        command="",
        console=QUIET,
    )
    prefix_of = _Prefills.prefix
    left = [0]

    def killed(self, group, ids):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return prefix_of(self, group, ids)

    monkeypatch.setattr(_Prefills, "prefix", killed)
    one = config(*asked, *CHANNEL, f"runtime.outputs={tmp_path / 'b'}")
    stops = 0
    for after in (2, 5, 3, 7, 4, 6, 100):
        left[0] = after
        try:
            folder = execute(one, command="", console=QUIET)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops > 3 and files(folder) == files(whole)


def test_jobs_of_a_sweep_leave_what_runs_of_their_own_leave(
    asked, posbench, outputs, tmp_path, monkeypatch
):
    factors = ("1", "-1")
    own = [*asked, "method.channel=15", "method.layers=[1,3]"]
    fills = []
    real = PrefixStore.fill
    monkeypatch.setattr(
        PrefixStore,
        "fill",
        lambda self, *args: (fills.append(self.layout.size), real(self, *args)),
    )
    result = posbench("-m", f"method.factor={','.join(factors)}", *own)
    assert result.status == 0, result.err
    together, fills[:] = len(fills), []
    apart = {}
    for factor in factors:
        one = config(
            f"method.factor={factor}", *own, f"runtime.outputs={tmp_path / 'apart'}"
        )
        folder = execute(one, command="", console=QUIET)
        apart[folder.name] = files(folder)
    assert {folder.name: files(folder) for folder in run_folders(outputs)} == apart
    assert together < len(fills), "one pass over the prompts, not one for each job"
    assert_line_names(result.out, "2 runs", "methods")
    # All is there: the same command reads no prompt.
    fills.clear()
    assert (
        posbench("-m", f"method.factor={','.join(factors)}", *own).status == 0
        and not fills
    )


def test_what_shares_nothing_is_said(asked, capsys):
    run = run_of(*asked, "method=ms_poe")
    plan = plan_of(run, {"ms_poe": run.method.build()})
    (note,) = plan.notes
    assert_names(note, "ms_poe", "no prefill")
    run = run_of(*asked, *CHANNEL, "runtime.share=10KiB")
    plan = plan_of(run, {"scale_channel": run.method.build()})
    (note,) = plan.notes
    assert_names(note, "runtime.share=10KiB")
    assert not any(group.prefill_method for group in plan._groups)
