"""The maximum output of a model for a request's body, as vLLM 0.32 reads it. Pure.

A token is one character, so that its bytes do not give away more of it than a real one's.
"""

import json
from collections.abc import Iterator
from typing import Any

BATCH = "/v1/chat/completions/batch"
PROMPT_TOKENS = 3
# vLLM's default for completions. It reads null as that too; versions before 0.32 as no bound, which
# is what is played here.
COMPLETION_TOKENS = 16
PATHS = (
    "/v1/chat/completions",
    BATCH,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)


class Writing:
    """One answer of a model that writes until it may not go on."""

    def __init__(self, path: str, body: dict[str, Any], longest: int, *, tells: bool) -> None:
        """`tells`: usage is told, where vLLM would. Raises ValueError for what vLLM refuses."""
        from tests.fakes.writing_bodies import BODIES  # dear to import

        read = BODIES[path].model_validate(body)
        self._path = path
        self._tells = tells
        self.stream = bool(read.stream) and path != BATCH
        room = longest - PROMPT_TOKENS
        self.each = room if read.wanted is None else min(read.wanted, room)
        self.answers = 1 if path in ("/v1/responses", "/v1/messages") else read.answers
        options = read.stream_options if path.endswith("completions") else None
        if options is not None and not self.stream:
            raise ValueError("stream options can only be defined when `stream=True`")
        self._in_stream = bool(options and options.include_usage)

    @property
    def tokens(self) -> int:
        return self.each * self.answers

    def whole(self) -> bytes:
        """Return a plain answer."""
        usage = {"usage": self._usage(self.tokens)} if self._tells else {}
        return json.dumps({"choices": "x" * self.tokens, **usage}).encode()

    def events(self) -> Iterator[tuple[bytes, int]]:
        """Return the events of a stream, and how many tokens each brings."""
        match self._path:
            case "/v1/chat/completions":
                for n in range(self.answers):
                    yield _data({"choices": [{"index": n, "delta": {"role": "assistant"}}]}), 0
                yield from self._choices("delta")
            case "/v1/completions":  # nothing opens the stream
                yield from self._choices("text")
            case "/v1/responses":
                yield _data({"response": {"usage": None}}, "response.created"), 0
                for _ in range(self.each):
                    yield _data({"delta": "x"}, "response.output_text.delta"), 1
                usage = self._usage(self.each) if self._tells else None
                yield _data({"response": {"usage": usage}}, "response.completed"), 0
            case "/v1/messages":
                usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": 0} if self._tells else None
                yield _data({"message": {"usage": usage}}, "message_start"), 0
                for _ in range(self.each):
                    delta = {"type": "text_delta", "text": "x"}
                    yield _data({"delta": delta}, "content_block_delta"), 1
                usage = self._usage(self.each) if self._tells else None
                yield _data({"delta": {}, "usage": usage}, "message_delta"), 0
                yield _data({}, "message_stop"), 0
        if self._path.endswith("completions"):
            yield b"data: [DONE]\n\n", 0

    def _choices(self, name: str) -> Iterator[tuple[bytes, int]]:
        """One event for each token of each choice, the choices in turn."""
        for at in range(self.each):
            finish = "length" if at == self.each - 1 else None
            for n in range(self.answers):
                text = {"content": "x"} if name == "delta" else "x"
                yield _data({"choices": [{"index": n, name: text, "finish_reason": finish}]}), 1
        if self._in_stream and self._tells:
            yield _data({"choices": [], "usage": self._usage(self.tokens)}), 0

    def _usage(self, tokens: int) -> dict[str, int]:
        if self._path in ("/v1/responses", "/v1/messages"):
            return {"input_tokens": PROMPT_TOKENS, "output_tokens": tokens}
        total = PROMPT_TOKENS + tokens
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": total,
            "completion_tokens": tokens,
        }


def writes(path: str) -> bool:
    """Return whether a model writes anything at an endpoint."""
    return path in PATHS


def embedded(body: dict[str, Any]) -> int:
    """Return the prompt tokens of a request for embeddings: each input has PROMPT_TOKENS."""
    return PROMPT_TOKENS * max(elements(body.get("input")), 1)


def elements(value: object) -> int:
    """Return the number of prompts in a value: a list of tokens is one."""
    if value is None or value == "":
        return 0
    if not isinstance(value, list):
        return 1
    return 1 if value and isinstance(value[0], int) else len(value)


def _data(value: dict[str, Any], event: str | None = None) -> bytes:
    data = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data
