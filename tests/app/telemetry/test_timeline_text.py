"""Timelines as text."""

from hypothesis import given
from hypothesis import strategies as st

from app.telemetry import RequestTimeline, Step, timeline_of_text, timeline_to_text
from app.telemetry.timeline_text import MAX_STEPS

STARTED = 1000.0
MOMENTS = st.integers(0, 10**12).map(lambda us: STARTED + us / 1e6)
MAYBE = st.none() | MOMENTS
NAMES = st.none() | st.text(max_size=20)
STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["queue", "attempt", "load_wait", "continuation"]),
        MOMENTS,
        engine=NAMES,
        end=MAYBE,
        fault=NAMES,
        position=st.none() | st.integers(1, 10**6),
        answered=MAYBE,
        status=st.none() | st.integers(100, 599),
        resumed=MAYBE,
    ),
    max_size=5,
)


def chained(steps: list[Step]) -> Step | None:
    """Return the last of steps that know their previous ones."""
    last: Step | None = None
    for step in steps:
        step.previous = last
        last = step
    return last


def whole(timeline: RequestTimeline) -> list[object]:
    """Return all that a timeline holds, moments in whole microseconds."""
    moments = ("started", "authenticated", "limits_began", "asked", "start", "end", "answered")
    found: list[object] = []
    for one in (timeline, *timeline.steps()):
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if name in (*moments, "resumed") and value is not None:
                value = round((value - STARTED) * 1e6)
            found.append(None if name in ("previous", "last", "span_id") else value)
    return found


@given(
    st.builds(
        RequestTimeline,
        st.just(STARTED),
        authenticated=MAYBE,
        limits_began=MAYBE,
        engine=NAMES,
        asked=MAYBE,
        status=st.none() | st.integers(100, 599),
        requested_model=NAMES,
    ),
    STEPS,
)
def test_text_holds_the_whole_timeline(timeline: RequestTimeline, steps: list[Step]) -> None:
    timeline.last = chained(steps)
    again = timeline_of_text(timeline_to_text(timeline), STARTED)
    assert whole(again) == whole(timeline)


def test_text_of_a_plain_request_is_short() -> None:
    timeline = RequestTimeline(
        STARTED, limits_began=STARTED + 1e-4, engine="demo-0", asked=STARTED + 2e-4, status=200
    )
    assert timeline_to_text(timeline) == '[null,100,"demo-0",200,200,null,[]]'


def test_text_of_very_many_attempts_is_bounded() -> None:
    steps = [Step("attempt", STARTED + number, engine=str(number)) for number in range(10_000)]
    timeline = RequestTimeline(STARTED, last=chained(steps))
    again = timeline_of_text(timeline_to_text(timeline), STARTED)
    assert [one.engine for one in again.steps()[1:]] == [str(n) for n in range(10_000)[-MAX_STEPS:]]
