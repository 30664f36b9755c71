"""The job of an offline batch: the command writes it as a line of JSON, and the worker reads it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from engines.offline.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One batch. `engine` holds flags of vLLM's engine as (name, value)."""

    model: str
    prompts: tuple[Prompt, ...]
    engine: tuple[tuple[str, str], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    # None: the chat template is used if the model has one.
    chat: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncate_prompt_tokens: int | None = None
    # `auto`, `none` or the name of one of vLLM's parsers.
    reasoning_parser: str = "auto"

    def to_line(self) -> bytes:
        """Return the job as a line of JSON."""
        fields = asdict(self) | {"prompts": [prompt.to_json() for prompt in self.prompts]}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return the job of a line that `to_line` wrote."""
        fields = json.loads(line)
        prompts = tuple(Prompt.from_json(prompt) for prompt in fields.pop("prompts"))
        engine = tuple((name, value) for name, value in fields.pop("engine"))
        return cls(prompts=prompts, engine=engine, **fields)
