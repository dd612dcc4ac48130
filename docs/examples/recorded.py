"""A backend: replies that were recorded before, such as those of an engine that posbench does not speak to."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from posbench.backends import Backend
from posbench.backends.base import Prompt
from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.model.answers import Reply


@dataclass(frozen=True, kw_only=True)
class Recorded(Backend):
    """Replies from a JSON-lines file, each line with the ``prompt`` and the ``reply``.

    Args:
        file: The file.
    """

    file: str

    def files(self) -> tuple[Source, ...]:
        """The file, whose content is part of what identifies a run."""
        return (Source(kind="path", id=self.file, field="model.backend.file"),)

    @cached_property
    def _replies(self) -> dict[str, str]:
        with open(self.file, encoding="utf-8") as lines:
            return {row["prompt"]: row["reply"] for row in map(json.loads, lines)}

    def generate(
        self, prompt: Prompt, max_tokens: int, stop: Sequence[str] = ()
    ) -> Reply:
        """The recorded reply; refused where there is none."""
        reply = self._replies.get(str(prompt))
        if reply is None:
            allowed = "a file with a reply to each prompt"
            hint = f"record one for {str(prompt)[:80]!r} ..."
            raise UserError("model.backend.file", self.file, allowed, hint)
        return Reply(reply, finish="stop")
