"""What is recorded of a stream, and in which way it can go on at each of its moments."""

from collections.abc import Callable, Sequence

import pytest

from app.continuation import CannotGoOn, Diverged, Origin, Recording, Repeat, Way, Ways
from app.routing import ContinuationTerms
from engines.base import EngineFacts
from tests.app.continuation.generated import CHAT, body_of, events_of, made_by

BOTH = Ways(replay=True, verify=True)
REPLAY = Ways(replay=True)
VERIFY = Ways(verify=True, reason="stop")
NEITHER = Ways(reason="stop")
ORIGIN = Origin("demo-0", "demo", None, EngineFacts())
SAID = "<think>one</think>two three"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def events(said: str = SAID, *, ids: bool = True) -> list[bytes]:
    return events_of(CHAT, made_by(CHAT, body_of(said)), ids=ids, id="chatcmpl-1")


def recording(
    ways: Ways, sent: Sequence[bytes] = (), *, max_tokens: int = 1000, tools: bool = False
) -> Recording:
    one = Recording(CHAT, ways, ContinuationTerms(max_tokens=max_tokens), ORIGIN, calls_tools=tools)
    for event in sent:
        one.pass_on(event)
    return one


def begin_verify(one: Recording, on_resumed: Callable[[], None] = lambda: None) -> None:
    assert one.sent is not None
    one.begin_verify(one.sent, on_resumed)


def way(one: Recording) -> tuple[Way, str]:
    found = one.next_way(begun=True)
    return found.way, found.reason if isinstance(found, CannotGoOn) else ""


def test_recorded_stream_has_the_bytes_of_a_direct_call() -> None:
    for ways in (BOTH, REPLAY):
        one = recording(ways)
        assert b"".join(map(one.pass_on, events())) == b"".join(events(ids=False))


def test_stream_that_is_only_verified_passes_unchanged() -> None:
    one = recording(VERIFY)
    for event in events(ids=False):
        assert one.pass_on(event) is event


def test_ids_stay_for_a_client_that_asked_for_them() -> None:
    one = Recording(CHAT, REPLAY, ContinuationTerms(), ORIGIN, with_ids=True)
    for event in events():
        assert one.pass_on(event) is event


def test_replay_is_preferred() -> None:
    assert way(recording(BOTH, events()[:4])) == (Way.REPLAY, "")
    assert way(recording(REPLAY, events()[:4])) == (Way.REPLAY, "")
    assert way(recording(VERIFY, events(ids=False)[:4])) == (Way.VERIFY, "")


def test_stream_without_a_way_ends_with_its_reason() -> None:
    one = recording(NEITHER, events(ids=False)[:4])
    assert way(one) == (Way.NONE, "stop")
    assert not one.can_go_on()
    assert not one.active


@pytest.mark.parametrize("ways", [BOTH, REPLAY])
def test_text_is_recorded_only_where_ids_do_not_do(ways: Ways) -> None:
    """Memory of a stream is its IDs, as long as no tool call or second thought may begin."""
    long = "word " * 40
    assert recording(ways, events(long)).sent is None
    assert (recording(ways, events(f"<think>one</think>{long}")).sent is None) is not ways.verify
    assert (recording(ways, events(long), tools=True).sent is None) is not ways.verify


@pytest.mark.parametrize(("ways", "expected"), [(BOTH, Way.VERIFY), (REPLAY, Way.NONE)])
def test_tool_call_that_has_begun_is_verified(ways: Ways, expected: Way) -> None:
    stream = events(f"hm {CALL}")
    first = next(n for n, event in enumerate(stream) if b"tool_calls" in event)
    before = recording(ways, stream[:first], tools=True)
    assert way(before) == (Way.REPLAY, "")
    after = recording(ways, stream[: first + 1], tools=True)
    assert way(after) == (expected, "" if expected is Way.VERIFY else "tool_call")


def test_finished_answer_is_not_replayed() -> None:
    assert way(recording(REPLAY, events()[:-1])) == (Way.NONE, "finished")


@pytest.mark.parametrize("ways", [REPLAY, VERIFY])
def test_stream_over_the_bound_does_not_go_on(ways: Ways) -> None:
    stream = events("word " * 200, ids=ways.replay)
    one = recording(ways, stream[:150], max_tokens=20)
    assert way(one) == (Way.NONE, "too_long")
    one.pass_on(stream[150])  # and is forwarded as before


def test_stream_of_an_engine_without_ids_says_so() -> None:
    """Its version says that it knows the flag, and it does not."""
    assert way(recording(REPLAY, events(ids=False)[:4])) == (Way.NONE, "version")


class TestBeforeTheFirstEvent:
    @pytest.mark.parametrize("ways", [BOTH, REPLAY, VERIFY, NEITHER])
    def test_request_is_repeated(self, ways: Ways) -> None:
        assert recording(ways).next_way(begun=False) == Repeat()

    def test_stored_response_is_not_repeated(self) -> None:
        one = recording(Ways(reason="stored"))
        assert one.next_way(begun=False) == CannotGoOn("stored")

    @pytest.mark.parametrize("ways", [BOTH, REPLAY, VERIFY, NEITHER])
    def test_repeated_request_is_the_whole_answer(self, ways: Ways) -> None:
        one = recording(ways)
        one.next_way(begun=False)
        resumed: list[bool] = []
        one.begin_again(lambda: resumed.append(True))
        assert one.active
        stream = events(ids=one.answer is not None)
        assert b"".join(map(one.pass_on, stream)) == b"".join(events(ids=False))
        assert resumed == [True]

    @pytest.mark.parametrize("ways", [BOTH, REPLAY, VERIFY, NEITHER])
    def test_repeated_request_goes_on_in_the_same_way_once_it_has_begun(self, ways: Ways) -> None:
        """A sampled answer is another one at every engine: comparing it would end it."""
        one = recording(ways)
        one.next_way(begun=False)
        one.begin_again(lambda: None)
        for event in events(ids=one.answer is not None)[:4]:
            one.pass_on(event)
        assert way(one) == way(recording(ways, events(ids=ways.replay)[:4]))


class TestSeam:
    def test_first_new_bytes_are_noted_once(self) -> None:
        stream = events(ids=False)
        one = recording(VERIFY, stream[:4])
        resumed: list[bool] = []
        way(one)
        begin_verify(one, lambda: resumed.append(True))
        assert b"".join(map(one.pass_on, stream[:4])) == b""
        assert resumed == []
        assert b"".join(map(one.pass_on, stream[4:])) == b"".join(stream[4:])
        assert resumed == [True]

    def test_verified_stream_can_be_verified_again(self) -> None:
        stream = events(ids=False)
        one = recording(VERIFY, stream[:3])
        for end in (5, 6):
            way(one)
            begin_verify(one)
            for event in stream[:end]:
                one.pass_on(event)
        assert way(one) == (Way.VERIFY, "")
        begin_verify(one)
        assert b"".join(map(one.pass_on, stream)) == b"".join(stream[6:])

    def test_second_interruption_before_it_has_caught_up_changes_nothing(self) -> None:
        stream = events(ids=False)
        one = recording(VERIFY, stream[:5])
        for end in (2, 4):
            way(one)
            begin_verify(one)
            assert b"".join(map(one.pass_on, stream[:end])) == b""
        way(one)
        begin_verify(one)
        assert b"".join(map(one.pass_on, stream)) == b"".join(stream[5:])

    def test_other_answer_is_refused(self) -> None:
        one = recording(VERIFY, events(ids=False)[:5])
        way(one)
        begin_verify(one)
        with pytest.raises(Diverged):
            b"".join(map(one.pass_on, events("<think>other</think>two", ids=False)))
