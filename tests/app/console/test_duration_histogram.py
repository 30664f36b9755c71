"""The histogram of durations: its bars, and the filters that they lead to."""

from urllib.parse import parse_qsl, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from app.console.duration_histogram import BOUNDS_S, HEIGHT, DurationHistogram, duration_histogram
from app.console.requests_query import RequestsQuery
from app.usage import RequestFilter

PAGE = "/console/requests"


def histogram(*durations: float, page: str = PAGE, **chosen: str) -> DurationHistogram:
    found = duration_histogram(durations, page, **chosen)
    assert found is not None
    return found


@given(st.lists(st.floats(0, 1e4) | st.sampled_from(BOUNDS_S), min_size=2, max_size=50))
def test_each_bar_leads_to_the_requests_that_it_counts(durations: list[float]) -> None:
    found = histogram(*durations)
    assert sum(bar.count for bar in found.bars) == len(durations)
    for bar in found.bars:
        query = RequestsQuery.model_validate(dict(parse_qsl(urlsplit(bar.path).query)))
        chosen = query.chosen(RequestFilter())
        low, high = chosen.slower_than_s, chosen.at_most_s
        fits = [
            one
            for one in durations
            if (low is None or one > low + 1e-9) and (high is None or one <= high + 1e-9)
        ]
        assert len(fits) == bar.count
        assert bar.y <= HEIGHT
        assert (bar.y == HEIGHT) == (bar.count == 0)


def test_bars_keep_the_other_filters_and_the_chosen_one_leads_back() -> None:
    page = f"{PAGE}?model=demo"
    bars = histogram(1.5, 3.0, page=page, slower_s="1", at_most_s="2").bars
    paths = {bar.title: bar.path for bar in bars if bar.count}
    assert paths == {
        "1.0 s to 2.0 s": page,
        "2.0 s to 5.0 s": f"{page}&slower_than_s=2&at_most_s=5",
    }
    assert [bar.title for bar in bars if bar.current] == ["1.0 s to 2.0 s"]


def test_quantiles_are_of_all_requests() -> None:
    found = histogram(*range(1, 101))
    assert (found.median_s, found.p95_s, found.total) == (50, 95, 100)


def test_one_request_is_no_histogram() -> None:
    assert duration_histogram([1.0], PAGE) is None
