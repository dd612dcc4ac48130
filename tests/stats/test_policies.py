"""Policies compared on the same questions, against simulations and closed forms."""

import numpy as np
import pytest
from scipy.stats import binom

from posbench.stats.policies import (
    CANNOT_DO,
    CANNOT_TELL,
    LEAVE,
    MARGIN,
    MAX_MISSING,
    USE,
    PolicyRace,
    detectable_difference,
)
from posbench.stats.sequential import FIRST_QUESTIONS

BASE = "as_is"


def scores_of(values):
    return {f"q{i}": float(v) for i, v in enumerate(values)}


def log_of(questions, right, gain, changing, policies, seed):
    """Scores of the base policy, and of some policies that change a share of them, with a mean gain."""
    rng = np.random.default_rng(seed)
    base = rng.random(questions) < right
    scores = {BASE: scores_of(base)}
    for number in range(policies):
        up = (changing + gain) / 2 / (1 - right)
        down = (changing - gain) / 2 / right
        draws = rng.random(questions)
        scores[f"p{number}"] = scores_of(np.where(base, draws >= down, draws < up))
    return scores


def names_of(scores):
    return tuple(name for name in scores if name != BASE)


def test_differences_are_those_of_the_questions_that_both_answered():
    scores = {BASE: {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0}, "p": {"b": 1.0, "c": 0.0}}
    standing = PolicyRace(BASE, ("p",)).standings(scores)["p"]
    assert standing.difference.value == 0.5
    assert standing.difference.n == 2
    assert standing.flips == 0.5


def test_intervals_of_all_policies_hold_together_at_every_number_of_questions():
    """Of 60 logs without any difference, hardly one shows a difference of any policy, ever."""
    num_wrong = 0
    for seed in range(60):
        scores = log_of(120, 0.6, 0.0, 0.3, 4, seed)
        race = PolicyRace(BASE, names_of(scores))
        for count in (20, 40, 80, 120):
            some = {n: dict(list(s.items())[:count]) for n, s in scores.items()}
            standings = race.standings(some)
            if any(
                standings[n].difference.ci_low > 0
                or standings[n].difference.ci_high < 0
                for n in race.policies
            ):
                num_wrong += 1
                break
    # 5 % of 60 logs are 3; more than 8 has a probability below 0.01.
    assert binom.sf(8, 60, 0.05) < 0.01
    assert num_wrong <= 8


def test_a_gain_is_used_and_a_flat_reader_is_not_sent_anywhere():
    scores = log_of(400, 0.5, 0.25, 0.3, 1, 0) | {
        "q": log_of(400, 0.5, 0, 0.2, 1, 0)["p0"]
    }
    race = PolicyRace(BASE, names_of(scores))
    assert race.verdict(scores, "p0").name == USE
    equal = dict.fromkeys((BASE, "a", "b"), scores[BASE])
    verdict = PolicyRace(BASE, ("a", "b")).verdict(equal, BASE)
    assert (verdict.name, verdict.policy) == (LEAVE, BASE)


def test_a_gain_that_is_not_there_on_held_back_questions_is_not_used():
    from posbench.stats.bootstrap import Estimate

    scores = log_of(400, 0.5, 0.25, 0.3, 1, 0)
    race = PolicyRace(BASE, ("p0",))
    verdict = race.verdict(scores, "p0", Estimate(-0.01, -0.1, 0.1, 100))
    assert verdict.name == CANNOT_TELL
    assert "on held-back questions -1.0" in verdict.reason


def test_a_leader_that_others_overtook_is_not_called_the_best():
    """Held-back questions put it behind another policy, or behind the prompts as they are."""
    answers = [1, 0] * 20
    changes = {BASE: (), "a": (21, 31), "b": (25,), "c": (20,)}
    scores = {
        name: scores_of([a ^ (n in changed) for n, a in enumerate(answers)])
        for name, changed in changes.items()
    }
    race = PolicyRace(BASE, ("a", "b", "c"))
    for leader, words in (("a", "the best is a"), ("b", "led by b"), ("c", "led by c")):
        assert words in race.verdict(scores, leader).reason


def test_a_model_that_answers_nothing_cannot_do_the_task():
    nothing = {name: scores_of([0] * 100) for name in (BASE, "a")}
    assert PolicyRace(BASE, ("a",)).verdict(nothing, BASE).name == CANNOT_DO


def test_too_few_questions_cannot_tell_and_say_how_many_would():
    scores = log_of(60, 0.5, 0.2, 0.25, 1, 3)
    verdict = PolicyRace(BASE, ("p0", *"abcdefgh")).verdict(scores, "p0")
    assert verdict.name == CANNOT_TELL
    assert verdict.needed and verdict.needed > 60


def test_only_sure_losers_drop_out_and_the_base_never_does():
    better = scores_of([1] * 60)
    worse = scores_of([0] * 60)
    scores = {BASE: worse, "good": better, "bad": worse, "new": scores_of([1] * 5)}
    race = PolicyRace(BASE, ("good", "bad", "new"))
    assert race.remaining(scores, list(scores)) == [BASE, "good", "new"]
    few = {n: dict(list(s.items())[: FIRST_QUESTIONS - 1]) for n, s in scores.items()}
    assert race.remaining(few, list(few)) == list(few)


def test_of_equally_good_policies_the_cheapest_leads_and_one_without_answers_never():
    scores = {
        BASE: scores_of([0] * 40),
        "dear": scores_of([1] * 40),
        "cheap": scores_of([1] * 40),
    }
    race = PolicyRace(BASE, ("dear", "cheap"))
    tokens = {BASE: 1.0, "dear": 3.0, "cheap": 2.0}
    assert race.leader(scores, list(scores), tokens, {}) == "cheap"
    silent = {"cheap": MAX_MISSING + 0.01}
    assert race.leader(scores, list(scores), tokens, silent) == "dear"


def test_a_sure_gain_leads_before_a_larger_one_that_is_not_sure():
    base = scores_of([0, 1] * 50)
    sure = scores_of([1, 1] * 40 + [0, 1] * 10)
    unsure = scores_of([1] * 12)
    scores = {BASE: base, "sure": sure, "unsure": unsure}
    race = PolicyRace(BASE, ("sure", "unsure"))
    standings = race.standings(scores)
    assert (
        standings["sure"].difference.ci_low > 0 > standings["unsure"].difference.ci_low
    )
    assert race.leader(scores, list(scores), dict.fromkeys(scores, 1.0), {}) == "sure"


def test_a_policy_without_any_score_neither_decides_nor_leads():
    scores = {BASE: scores_of([0, 1] * 20), "good": scores_of([1, 1] * 20), "cut": {}}
    race = PolicyRace(BASE, ("good", "cut"))
    assert race.is_decided(scores, list(scores)) in (True, False)
    assert race.leader(scores, list(scores), dict.fromkeys(scores, 1.0), {}) == "good"


def test_a_policy_that_dropped_out_leaves_no_possible_gain():
    equal = scores_of([0, 1] * 100)
    scores = {BASE: equal, "same": equal, "dropped": scores_of([0, 1] * 5)}
    race = PolicyRace(BASE, ("same", "dropped"))
    assert race.standings(scores)["dropped"].difference.ci_high > MARGIN
    assert race.verdict(scores, BASE, None, ["same"]).name == LEAVE


def test_a_policy_without_enough_answers_leaves_the_verdict_open():
    """It cannot be recommended, and may be the best all the same."""
    base = scores_of([0, 1] * 100)
    scores = {BASE: base, "cut": scores_of([1] * 180), "same": base}
    race = PolicyRace(BASE, ("cut", "same"))
    for names in ([BASE], [BASE, "same"]):
        verdict = race.verdict(scores, BASE, None, names, ["cut"])
        assert (
            verdict.name == CANNOT_TELL and "under cut are no answers" in verdict.reason
        )
    # So does one without any answer.
    none = scores | {"cut": {}}
    assert race.verdict(none, BASE, None, [BASE, "same"], ["cut"]).name == CANNOT_TELL
    # One that is surely worse does not.
    scores["cut"] = scores_of([0] * 180)
    assert race.verdict(scores, BASE, None, [BASE], ["cut"]).name == LEAVE
    alone = PolicyRace(BASE, ()).verdict({BASE: base}, BASE)
    assert alone.name == LEAVE and "no other policy changes" in alone.reason


def test_the_race_ends_when_one_policy_is_left_that_gains_or_none_can():
    gains = {BASE: scores_of([0] * 60), "good": scores_of([1] * 60)}
    race = PolicyRace(BASE, ("good",))
    assert race.is_decided(gains, [BASE, "good"])
    assert race.is_decided(gains, [BASE])
    open_race = log_of(40, 0.5, 0.1, 0.3, 2, 1)
    assert not PolicyRace(BASE, names_of(open_race)).is_decided(
        open_race, list(open_race)
    )


@pytest.mark.parametrize(("questions", "policies"), [(40, 1), (200, 14)])
def test_more_questions_or_fewer_policies_detect_less(questions, policies):
    least = detectable_difference(questions, policies)
    assert 0 < detectable_difference(4 * questions, policies) < least
    assert detectable_difference(questions, policies + 20) >= least


def test_a_detectable_difference_is_detected_in_most_logs():
    least = detectable_difference(150, 5)
    num_found = 0
    for seed in range(40):
        scores = log_of(150, 0.5, least, max(0.1, least), 1, 100 + seed)
        race = PolicyRace(BASE, ("p0", "a", "b", "c", "d"))
        num_found += race.standings(scores)["p0"].difference.ci_low > 0
    # 80 % are promised.
    assert num_found >= binom.ppf(0.005, 40, 0.8)
