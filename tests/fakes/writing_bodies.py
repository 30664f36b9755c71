"""Bodies of requests as vLLM 0.32 reads them, for `tests.fakes.writing`.

In a module of their own: pydantic takes longer to import than all else of the fake, which most
processes of it never need.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tests.fakes.writing import BATCH, COMPLETION_TOKENS, elements


class _StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    stream: bool | None = False
    n: int | None = Field(1, ge=1, le=16_384)
    cache_salt: str | None = Field(None, min_length=1)
    stream_options: _StreamOptions | None = None

    @property
    def wanted(self) -> int | None:
        """Return the maximum tokens of a response; None: up to the model's length."""
        raise NotImplementedError

    @property
    def answers(self) -> int:
        return self.n or 1


class _Chat(_Body):
    messages: list[Any]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class _Batch(_Chat):
    messages: list[Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)
    n: Literal[1] | None = 1
    stream: Any = None  # it is accepted, and nothing streams

    @property
    def answers(self) -> int:
        return len(self.messages)


class _Completion(_Body):
    n: int = Field(1, ge=1, le=16_384)
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    prompt_embeds: bytes | list[bytes] | None = None
    max_tokens: int | None = Field(COMPLETION_TOKENS, ge=1)

    @property
    def wanted(self) -> int | None:
        return self.max_tokens

    @property
    def answers(self) -> int:
        """As many as choices times prompts; embeddings of prompts come with the texts."""
        prompts = elements(self.prompt_embeds) + elements(self.prompt)
        if not prompts:
            raise ValueError("either prompt or prompt_embeds must be provided")
        return prompts * self.n


class _Response(_Body):
    input: str | list[Any]
    n: Any = None  # it is nothing here
    max_output_tokens: int | None = Field(None, ge=1)

    @property
    def wanted(self) -> int | None:
        return self.max_output_tokens


class _Message(_Body):
    messages: list[Any]
    n: Any = None
    stream_options: Any = None
    max_tokens: int = Field(ge=1)

    @property
    def wanted(self) -> int | None:
        return self.max_tokens

    @field_validator("n", mode="before")
    @classmethod
    def _nothing(cls, value: object) -> None:
        return None


BODIES: dict[str, type[_Body]] = {
    "/v1/chat/completions": _Chat,
    BATCH: _Batch,
    "/v1/completions": _Completion,
    "/v1/responses": _Response,
    "/v1/messages": _Message,
}
