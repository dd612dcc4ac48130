"""How many questions each part of a diagnosis asks, within what its budget leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from posbench.backends.base import text_encoder
from posbench.diagnose.allowance import DEFAULT_BUDGET
from posbench.diagnose.runs import Runs
from posbench.measure.replies import encode_prompt
from posbench.model.encode import Encoder
from posbench.pipeline.served import ASSUMED_TOKENS_PER_CHARACTER, REPLY_OVERHEAD_TOKENS
from posbench.run.budget import Budget
from posbench.schema import MAX_COUNT
from posbench.tasks.base import num_questions

MAX_QUESTIONS = 1000
"""Most questions at each position of the shape; a model without a bias needs fewer (docs/metrics.md)."""
ROUND_QUESTIONS = 5
"""Questions at each position of a round."""
END_SHARES = {
    "pilot": 0.2,
    "source": 0.55,
    "structure": 0.65,
    "prompts": 0.77,
    "remedies": 0.88,
}
"""Largest share of the budget spent by the end of each part; the rest is for held-back questions."""
RACE_PROMPTS = 48
"""Calibration prompts of the race of methods, in a default budget."""
LAST_SHARE = 0.95
"""Share of the budget that is spent when the last question is answered."""


class Sizes:
    """Sizes of the parts of a diagnosis.

    Args:
        runs: Its runs, with the current task and what the parts so far took.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.allowance = runs.allowance
        self.diagnosis = runs.diagnosis

    @cached_property
    def available_questions(self) -> int:
        """Questions at each position that the task has."""
        task = self.runs.task
        if not task.files():
            return MAX_COUNT  # they are made as they are asked
        return num_questions(replace(task, limit=MAX_COUNT).evaluation())

    def typed_limit(self, most: int) -> int:
        """The smallest of ``most``, the typed limit and the number of questions in the task."""
        typed = self.runs.typed_number("task.limit") or most
        return min(most, typed, self.available_questions)

    def shape_limit(self) -> int:
        """Largest number of questions at each position of the shape: the typed limit, else :data:`MAX_QUESTIONS`."""
        limit = self.runs.typed_number("task.limit") or MAX_QUESTIONS
        return min(limit, self.available_questions)

    def race_prompts(self, factor: float = 1.0) -> int:
        """Calibration prompts of the race of methods, if the data hold them: more in more time.

        Args:
            factor: Of the budget.
        """
        seconds = self.allowance.budget.seconds
        count = RACE_PROMPTS
        if seconds is not None:
            default = Budget.parse(DEFAULT_BUDGET).size
            count = round(RACE_PROMPTS * max(factor * seconds / default, 1.0))
        typed = self.runs.typed_number("task.calibration_examples")
        return min(count, typed) if typed else count

    def affordable(
        self, part: str, most: int, prompts_per_question: int, in_process: bool = False
    ) -> int:
        """Return the number of questions of a part at each position that the budget holds, at most ``most``.

        A budget of time is enforced by the run.

        Args:
            part: The part.
            most: The largest number.
            prompts_per_question: Prompts that a question takes.
            in_process: Whether the part runs on the checkpoint although the model is served.
        """
        if self.allowance.is_time:
            return most
        left = self.allowance.left(END_SHARES.get(part, LAST_SHARE))
        per_question = prompts_per_question * self.cost_of_prompt(in_process)
        return min(most, int(left / max(per_question, 1e-12)))

    def round_questions(
        self, measured_part: str, prompts_per_question: int, share: float
    ) -> int:
        """Questions of a round: fewer than :data:`ROUND_QUESTIONS` where a first one would overrun the time.

        Args:
            measured_part: The part before, whose seconds and prompts give the time of a prompt.
            prompts_per_question: Prompts of a question.
            share: Share of the rest of the budget that the round may take.
        """
        prompts = self.diagnosis.prompts.get(measured_part)
        if not self.allowance.is_time or not prompts:
            return ROUND_QUESTIONS
        cost = self.diagnosis.seconds[measured_part] / prompts * prompts_per_question
        left = share * self.allowance.left(LAST_SHARE)
        return min(max(int(left / max(cost, 1e-9)), 1), ROUND_QUESTIONS)

    def questions_in_time(self, positions: int) -> int:
        """Questions that a server can answer in all the time that is left, by its probe."""
        seconds = self.seconds_of_prompt()
        if not self.allowance.is_time or not seconds:
            return MAX_QUESTIONS
        return int(self.allowance.left(1.0) / (positions * seconds))

    def seconds_of_prompt(self) -> float:
        """Seconds that a prompt takes a server, by its probe; 0 for a model in process."""
        server = self.runs.config.server
        if server is None or server.speed is None:
            return 0.0
        length = max(len(example.prompt) for example in self.runs.task.evaluation())
        concurrency = self.runs.config.model.concurrency
        return server.speed.seconds_of_requests(
            1, length, REPLY_OVERHEAD_TOKENS, concurrency
        )

    def measured_cost_of_prompt(self) -> float:
        """Cost of a prompt in the unit of the budget: measured on the attention part, else on the shape part."""
        if not self.allowance.is_time:
            return self.cost_of_prompt(in_process=True)
        part = "attention" if "attention" in self.runs.seconds_of_run else "shape"
        return self.runs.seconds_of_run[part] / max(self.diagnosis.prompts[part], 1)

    def cost_of_prompt(self, in_process: bool = False) -> float:
        """Cost of a prompt in the unit of a budget that is not a time; in-process prompts cost no money."""
        if in_process and self.allowance.budget.usd is not None:
            return 0.0
        example = self.runs.task.evaluation()[0]
        encoder: Encoder = (
            text_encoder(self.runs.config.model)
            if self.runs.is_served
            else self.runs.lm
        )
        encoded = encode_prompt(encoder, self.runs.task, example)
        read = len(encoded.ids) or ASSUMED_TOKENS_PER_CHARACTER * len(example.prompt)
        return self.allowance.cost_of_prompt(read, self.runs.task.max_new_tokens)
