"""Streams of the fake's model with and without token IDs, in any grouping of tokens and chunks."""

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fakes.completion_events import Reply, chat_events, completion_events
from tests.fakes.generation import Generation, generate

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONGEST = 4096

# Text that looks like what surrounds it, and characters of two tokens.
WORDS = st.sampled_from(
    ["the ", "lamp", "灯", "塔", "😀", '"token_ids":[1,2]', 'token_ids":null', "\n", "\\", "]", " "]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=30).map("".join)
THOUGHTS = st.none() | st.lists(WORDS, max_size=10).map("".join)
WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Return what a model says, maybe after a thought."""
    thought, text = draw(THOUGHTS), draw(TEXTS)
    return text if thought is None else f"<think>{thought}</think>{text}"


def body_of(said: str, **fields: Any) -> dict[str, Any]:
    """Return a request that makes the fake's model say something."""
    return {"model": "demo", "messages": [], "prompt": "hi", "fake": f"say:{said}", **fields}


def made_by(endpoint: str, body: dict[str, Any]) -> Generation:
    return generate(endpoint, body, LONGEST, knows_ids=True)


def events_of(
    endpoint: str, made: Generation, *, ids: bool, widths: Sequence[int] = (1,), **options: Any
) -> list[bytes]:
    """Return the events of a stream as vLLM writes them."""
    reply = Reply("demo", ids=ids, widths=widths, **options)
    write = completion_events if endpoint == COMPLETIONS else chat_events
    return [event for event, _ in write(reply, made) if event]


def grouped(events: Sequence[bytes], sizes: Iterable[int]) -> list[bytes]:
    """Put neighboring events together, as a socket does; `sizes` are repeated."""
    chunks: list[bytes] = []
    start, turns = 0, list(sizes)
    while start < len(events):
        size = turns[len(chunks) % len(turns)]
        chunks.append(b"".join(events[start : start + size]))
        start += size
    return chunks
