"""Finds where text ends among the token IDs of an answer, by asking an engine to decode them."""

import asyncio
import re
from collections.abc import Sequence

import msgspec

from app.continuation.answer import Answer, Tail
from app.continuation.replay import end_candidates, is_end
from engines.base import Engine, EngineError, EngineNotReady, EngineRequest

_HEADERS = ((b"content-type", b"application/json"),)
# The IDs that are decoded to see how their text ends.
WINDOW = 16
# A few tokens; more is no answer to the question.
MAX_BYTES = 64 * 1024
# Seconds for that answer; an engine that computes other requests gives it all the same.
DECODE_S = 5.0
REPLACEMENT = "\ufffd"  # of bytes that are no whole character
# IDs whose text is surely an answer to the question.
_PIECE = 4096
# Single tokens that end a thought, for the reasoning parsers of vLLM 0.32.
_THOUGHT_ENDS = re.compile(
    r"</(?:mm:|seed:)?think>|\[/THINK\]|<\|END_THINKING\|>|<\|plamo:end_think:plamo\|>"
)
# Single tokens behind which they look for a thought anew: those that begin one, and a turn.
_THOUGHT_BEGINS = re.compile(
    r"<(?:mm:|seed:)?think>|\[THINK\]|<\|START_THINKING\|>|<\|plamo:begin_think:plamo\|>"
    r"|<\|(?:im_start|im_end|system|user|assistant|observation|turn|tool_response)\|?>"
    r"|<seed:(?:bos|eos)>"
)


class _Text(msgspec.Struct):
    prompt: str


_text = msgspec.json.Decoder(_Text)


class IdDecoder:
    """Decodes token IDs by an engine's /detokenize."""

    def __init__(self, engine: Engine, served_name: str) -> None:
        self._engine = engine
        self._served_name = served_name

    async def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of IDs, special tokens included; None: the engine does not say.

        Raises EngineNotReady where it does not answer.
        """
        body = msgspec.json.encode({"model": self._served_name, "tokens": list(ids)})
        try:
            async with asyncio.timeout(DECODE_S):
                status, data = await self._ask(body)
        except (EngineError, TimeoutError) as error:
            raise self._failure() from error
        if status >= 500:
            raise self._failure()
        try:
            return _text.decode(data).prompt if status == 200 else None
        except msgspec.DecodeError:
            return None

    def _failure(self) -> EngineNotReady:
        return EngineNotReady(f"engine {self._engine.name} decodes no token IDs now")

    async def _ask(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises EngineError."""
        data = b""
        response = await self._engine.send(EngineRequest("POST", "/detokenize", _HEADERS, body))
        try:
            while not response.ended and len(data) <= MAX_BYTES:
                data += await response.read()
        finally:
            response.close()
        return response.status, data


async def cut_at_text(answer: Answer, decoder: IdDecoder, *, always: bool, all_shown: bool) -> bool:
    """Cut an answer's IDs where the text of its client ends; return whether that is known.

    The last chunk is decoded if it has several IDs, or `always`: a tool parser holds text back that
    may begin a call. `all_shown`: the client has seen every token, so none can be generated again.
    Raises EngineNotReady.
    """
    end = 0 if answer.tail is None else answer.tail.end
    if answer.tail is not None and (always or end - answer.tail.start > 1):
        found = await _find_end(answer, answer.tail, decoder)
        if found is None:
            return False
        if always and await _may_end_before(answer, answer.tail, found, decoder):
            return False
        end = found
    if all_shown and end < len(answer.ids):
        return False
    answer.cut(end)
    return True


async def thinks_again(answer: Answer, decoder: IdDecoder) -> bool:
    """Return whether a thought may begin behind the first; True where that is not known.

    To its client all behind the first is text: vLLM's (0.32) parsers take it so. The parser of a
    replay searches the prompt from its end, and would find a thought that is open.
    Raises EngineNotReady.
    """
    if answer.last_thought is None or not answer.thought_ended:
        return False
    ended = False
    for start in range(answer.last_thought.start, len(answer.ids), _PIECE):
        text = await decoder.decode(answer.ids[start : start + _PIECE])
        if text is None:
            return True
        if not ended:
            end = _THOUGHT_ENDS.search(text)
            ended, text = end is not None, "" if end is None else text[end.end() :]
        if _THOUGHT_BEGINS.search(text) is not None:
            return True
    return False


async def count_thought(answer: Answer, decoder: IdDecoder) -> int:
    """Return the number of an answer's tokens that are reasoning, without the marks around them.

    The marks are in no chunk with text, unless that has several IDs. The first character may have
    begun in a chunk without text.
    """
    first, last = answer.first_thought, answer.last_thought
    if first is None or last is None:
        return 0
    start, end = first.start, last.end
    if last.end - last.start > 1:
        end = await _find_end(answer, last, decoder) or last.end
    if first.end - first.start > 1:
        mark = await decoder.decode(answer.ids[start : start + 1]) or ""
        if not first.text.startswith(mark) and REPLACEMENT not in mark:
            return max(end - start - 1, 0)
    while start and not first.text[0].isascii():
        before = await decoder.decode(answer.ids[start - 1 : start])
        if before is None or REPLACEMENT not in before:
            break
        start -= 1
    return end - start


async def _find_end(answer: Answer, chunk: Tail, decoder: IdDecoder) -> int | None:
    """Return the number of IDs after which a chunk's text ends; None: it was not found."""
    for end in end_candidates(chunk):
        text = await decoder.decode(answer.ids[max(end - WINDOW, 0) : end])
        if text is not None and is_end(chunk, text):
            return end
    return None


async def _may_end_before(answer: Answer, chunk: Tail, end: int, decoder: IdDecoder) -> bool:
    """Return whether a chunk's text may end one ID before `end` as well.

    Of two equal tokens in a row a tool parser may have sent the first and held back the second.
    Blanks begin no call.
    """
    if end < 2 or not chunk.text.strip():
        return False
    text = await decoder.decode(answer.ids[max(end - 1 - WINDOW, 0) : end - 1])
    return text is not None and is_end(chunk, text)
