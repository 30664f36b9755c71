"""The parts of events, in the shapes of several versions of vLLM."""

import json

import pytest

from app.continuation import event_parts
from app.continuation.event_parts import read_chunk
from app.continuation.parts import Part
from tests.app.continuation.streams import NAMES, as_by_vllm_0_33, event_of, recorded

CHOICES = [name for name in NAMES if name.startswith(("chat", "completions"))]


def parts_of(event: bytes) -> list[Part]:
    data = event.removeprefix(b"data: ").strip()
    return [] if data == b"[DONE]" else read_chunk(data)


@pytest.mark.parametrize("name", CHOICES)
def test_chunks_of_a_newer_vllm_have_the_same_parts_and_are_read_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_parts, "_take_unknown", lambda document: pytest.fail(str(document)))
    events = recorded(name)
    newer = [as_by_vllm_0_33(event) for event in events]
    assert newer != events
    assert list(map(parts_of, newer)) == list(map(parts_of, events))


@pytest.mark.parametrize("member", ["kv_transfer_params", "weight_versions", "unheard_of"])
def test_a_value_that_the_client_has_is_a_part(member: str) -> None:
    in_choice = {member: [{"label": "a"}]} if member == "weight_versions" else {}
    in_chunk = {} if in_choice else {member: {"remote_port": 1}}
    chunk = {"choices": [{"index": 0, "text": "", **in_choice}], **in_chunk}
    [part] = read_chunk(json.dumps(chunk).encode())
    assert part.kind.startswith(member)
    assert parts_of(event_of({"choices": [{"index": 0, "text": "", member: None}]})) == []
