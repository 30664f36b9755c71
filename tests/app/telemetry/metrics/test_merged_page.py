"""Merging the engines' pages: samples are kept unchanged, a malformed line is left out alone."""

import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
    UntypedMetricFamily,
)
from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.metrics import merged_page
from app.telemetry.metrics.merged_page import (
    MAX_FAMILIES,
    MAX_LINES,
    SLICE_BYTES,
    MalformedPage,
    MergedPage,
)

UP = (
    "# HELP gateway_engine_up 1 for an engine whose series are on this page, 0 for the others.\n"
    "# TYPE gateway_engine_up gauge\n"
)
Series = tuple[str, frozenset[tuple[str, str]], str, object]


def add(merged: MergedPage, engine: str, page: bytes) -> list[str]:
    """Add a page; return what was left out."""
    work = merged.add(engine, page)
    while True:
        try:
            next(work)
        except StopIteration as end:
            left_out: list[str] = end.value
            return left_out


def merge(**pages: str) -> str:
    """Return the merged page without gateway_engine_up."""
    merged = MergedPage()
    for engine, page in pages.items():
        add(merged, engine, page.encode())
    text = merged.text({}).decode()
    assert text.endswith(UP)
    return text.removesuffix(UP)


def read(page: str) -> Counter[Series]:
    """Return the samples that prometheus-client parses: name, labels, value, timestamp."""
    return Counter(
        (sample.name, frozenset(sample.labels.items()), repr(float(sample.value)), sample.timestamp)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    )


class TestHeaders:
    def test_family_of_two_engines_has_one_header(self) -> None:
        page = '# HELP x Some "text".\n# TYPE x counter\nx{k="v"} 1\n# TYPE y gauge\ny 2\n'
        assert merge(a=page, b=page) == (
            '# HELP x Some "text".\n# TYPE x counter\n'
            'x{gateway_engine="a",k="v"} 1\nx{gateway_engine="b",k="v"} 1\n'
            "# TYPE y gauge\n"
            'y{gateway_engine="a"} 2\ny{gateway_engine="b"} 2\n'
        )

    def test_first_help_text_is_kept(self) -> None:
        pages = {"a": "# HELP x one\nx 1\n", "b": "# HELP x two\nx 1\n"}
        assert merge(**pages).startswith("# HELP x one\nx{")

    def test_scattered_samples_are_grouped_by_family(self) -> None:
        page = "# TYPE x gauge\n# TYPE y gauge\ny 1\nx 1\n\n# a remark\ny 2\n"
        assert merge(a=page) == (
            '# TYPE x gauge\nx{gateway_engine="a"} 1\n'
            '# TYPE y gauge\ny{gateway_engine="a"} 1\ny{gateway_engine="a"} 2\n'
        )

    def test_histogram_keeps_its_samples_together(self) -> None:
        page = '# TYPE x histogram\nx_bucket{le="+Inf"} 1\nx_sum 2\nx_count 1\n'
        created = "# TYPE x_created gauge\nx_created 1.7e+09\n"
        text = merge(a=page + created, b=page + created)
        assert text.count("# TYPE") == 2
        assert text.index("# TYPE x_created") > text.index('x_count{gateway_engine="b"}')

    def test_samples_without_a_header_get_none(self) -> None:
        assert merge(a="x 1\n", b="x 2\n") == 'x{gateway_engine="a"} 1\nx{gateway_engine="b"} 2\n'


class TestClash:
    @pytest.mark.parametrize(
        ("first", "second", "left_out"),
        [
            ("# TYPE x gauge\nx 1\n", "# TYPE x counter\nx 2\n", "x"),
            ("# TYPE x gauge\nx 1\n", "x 2\n", "x"),
            ("x 1\n", "# TYPE x gauge\nx 2\n", "x"),
            # A sample name that belongs to another family's histogram, and vice versa.
            ("# TYPE x histogram\nx_sum 1\n", "# TYPE x_sum gauge\nx_sum 2\n", "x_sum"),
            ("x_sum 1\n", "# TYPE x histogram\nx_sum 2\n", "x"),
            ("# TYPE x summary\nx_sum 1\n", "# TYPE x_sum summary\nx_sum 2\n", "x_sum"),
            ("", "# TYPE gateway_engine_up counter\ngateway_engine_up 2\n", "gateway_engine_up"),
        ],
    )
    def test_conflicting_declaration_is_left_out_and_reported(
        self, first: str, second: str, left_out: str
    ) -> None:
        merged = MergedPage()
        assert add(merged, "a", first.encode()) == []
        assert add(merged, "b", second.encode() + b"other 1\n") == [
            f"other engines declare {left_out} differently"
        ]
        text = merged.text({}).decode()
        assert text == merge(a=first) + 'other{gateway_engine="b"} 1\n' + UP

    def test_explicitly_untyped_family_matches_an_untyped_one(self) -> None:
        assert merge(a="x 1\n", b="# TYPE x untyped\nx 2\n").count("x{") == 2


class TestLabel:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("x 1", 'x{gateway_engine="a"} 1'),
            ("x{} 1", 'x{gateway_engine="a"} 1'),
            ("x{}1", 'x{gateway_engine="a"} 1'),
            ("x {k='v'}".replace("'", '"') + "1", 'x{gateway_engine="a",k="v"} 1'),
            (' \tx\t{ k = "v" , }\t1', 'x{gateway_engine="a", k = "v" , } 1'),
            ('x{k="a\\"b,}\\\\{\\n"} 1', 'x{gateway_engine="a",k="a\\"b,}\\\\{\\n"} 1'),
            ('x{k="1..e999 1e999"} 1', 'x{gateway_engine="a",k="1..e999 1e999"} 1'),
            ('x{k=""} NaN', 'x{gateway_engine="a",k=""} NaN'),
            ("x -Inf 1795227950000", 'x{gateway_engine="a"} -Inf 1795227950000'),
            ("x 1.5e+011", 'x{gateway_engine="a"} 1.5e+011'),
            ("x 1e-999", 'x{gateway_engine="a"} 1e-999'),
            ("x +.5e-7 -1", 'x{gateway_engine="a"} +.5e-7 -1'),
            ('x{k="模型"} 1', 'x{gateway_engine="a",k="模型"} 1'),
        ],
    )
    def test_label_is_added_to_every_valid_spelling(self, line: str, expected: str) -> None:
        assert merge(a=f"{line}\n") == f"{expected}\n"

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ('x{gateway_engine="b"} 1', 'exported_gateway_engine="b"} 1'),
            ('x{ k="v" , gateway_engine = "b", } 1', 'k="v",exported_gateway_engine="b"} 1'),
            (
                'x{exported_gateway_engine="c",gateway_engine="b"} 1',
                'exported_gateway_engine="c",exported_exported_gateway_engine="b"} 1',
            ),
            ('x{gateway_engine="\r\v\u2028"} 1', 'exported_gateway_engine="\r\v\u2028"} 1'),
            ('x{k="gateway_engine=1"} 1', 'k="gateway_engine=1"} 1'),
        ],
    )
    def test_existing_engine_label_is_renamed(self, line: str, expected: str) -> None:
        assert merge(a=f"{line}\n") == f'x{{gateway_engine="a",{expected}\n'

    def test_name_that_starts_with_the_label_name_is_kept(self) -> None:
        page = 'gateway_engine_state{k="v"} 1\ngateway_engine_x 1\n'
        assert merge(a=page) == (
            'gateway_engine_state{gateway_engine="a",k="v"} 1\n'
            'gateway_engine_x{gateway_engine="a"} 1\n'
        )

    def test_engine_name_is_escaped(self) -> None:
        name = 'a\\1"b\n\\g<0>'
        [(_, labels, *_)] = read(merge(**{name: "x 1\n"}))
        assert labels == {("gateway_engine", name)}

    def test_page_ends_with_gateway_engine_up(self) -> None:
        merged = MergedPage()
        add(merged, "a", b"x 1\n")
        text = merged.text({"a": True, 'b"': False}).decode()
        ends = (
            'gateway_engine_up{gateway_engine="a"} 1\ngateway_engine_up{gateway_engine="b\\""} 0\n'
        )
        assert text == 'x{gateway_engine="a"} 1\n' + UP + ends


class TestMalformed:
    @pytest.mark.parametrize(
        "line",
        [
            b"<!doctype html>\n",
            b"\x00\x01\x02\n",
            b"x\n",
            b"x one\n",
            b"x 1 2 3\n",
            b"x 1 1.5\n",
            b"x 0x10\n",
            b"x 1e999\n",
            b"x -1" + b"0" * 400 + b"\n",
            b"x{} .1E+0999 5\n",
            b"x 1 9999999999999999999\n",
            b"x 1\r\n",
            b"x 1 \n",
            b"x 1 5 \n",
            b'# HELP x \\"\n',
            b"1x 1\n",
            b'x{k="v" 1\n',
            b'x{k="v} 1\n',
            b"x{k=v} 1\n",
            b'x{k="v"k="w"} 1\n',
            b'x{,k="v"} 1\n',
            b"x{,} 1\n",
            b'x{k="\\t"} 1\n',
            b'x{k="\xff"} 1\n',
            b'x{"quoted name"} 1\n',
            b'x{k="1",l="2",k="3"} 1\n',
            b'x{__name__="y"} 1\n',
            b'x{k="v"} 1 # {trace_id="1"} 1\n',
            b"# TYPE x\n",
            b"# TYPE x stateset\n",
            b"# TYPE 1x gauge\n",
            b'x{k="%s"} 1\n' % (b"y" * 100_000),
        ],
    )
    def test_malformed_line_is_left_out_alone(self, line: bytes) -> None:
        merged = MergedPage()
        good = b"# TYPE good gauge\ngood 1\n"
        (fault,) = add(merged, "a", good + line + good.partition(b"\n")[2])
        assert fault.startswith("malformed lines left out: 1, the first: ")
        assert "\n" not in fault
        assert len(fault) < 400
        assert merged.text({}).decode() == (
            '# TYPE good gauge\ngood{gateway_engine="a"} 1\ngood{gateway_engine="a"} 1\n' + UP
        )

    @pytest.mark.parametrize(
        ("page", "kept"),
        [
            ("x 1\nx 1", "x{A} 1\n"),
            ("# TYPE x gauge\n# TYPE x counter\nx 1\n", "# TYPE x gauge\nx{A} 1\n"),
            ("# HELP x a\n# HELP x b\nx 1\n", "# HELP x a\nx{A} 1\n"),
            ("x 1\n# TYPE x gauge\n", "x{A} 1\n"),
            (
                "# TYPE x histogram\n# TYPE x_sum gauge\nx_sum 1\n",
                "# TYPE x histogram\nx_sum{A} 1\n",
            ),
            (
                "# TYPE x_sum gauge\n# TYPE x summary\nx_sum 1\nx 1\n",
                "# TYPE x_sum gauge\nx_sum{A} 1\nx{A} 1\n",
            ),
        ],
    )
    def test_malformed_header_is_left_out_alone(self, page: str, kept: str) -> None:
        merged = MergedPage()
        (fault,) = add(merged, "a", page.encode())
        assert fault.startswith("malformed lines left out: 1, the first: ")
        assert merged.text({}).decode() == kept.replace("A", 'gateway_engine="a"') + UP

    @pytest.mark.parametrize(
        ("page", "error"),
        [
            (b"<!doctype html>\n<p>x</p>\n", "no valid sample: '<!doctype html>' is neither"),
            (b"".join(b"x%d 1\n" % n for n in range(MAX_FAMILIES + 1)), "2000 families"),
            (b"x 1\n" * (MAX_LINES + 1), "more than 100000 lines"),
            (b"\n" * (MAX_LINES + 1), "more than 100000 lines"),
        ],
    )
    def test_page_that_is_none_or_above_a_limit_adds_nothing(self, page: bytes, error: str) -> None:
        merged = MergedPage()
        with pytest.raises(MalformedPage, match=error):
            add(merged, "bad", page)
        assert merged.text({}).decode() == UP

    @pytest.mark.parametrize("line", [b"x\n", b"\n", b"# HELP \n", b"x 1\n", b"y" * 9_000 + b"\n"])
    def test_no_step_takes_more_than_a_few_lines(self, line: bytes) -> None:
        work = MergedPage().add("a", b"x 1\n" + line * 1_000)
        steps = 0
        with contextlib.suppress(StopIteration):
            while True:
                next(work)
                steps += 1
        assert steps >= 10

    def test_all_pages_above_the_limit_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(merged_page, "MAX_TOTAL_BYTES", 100)
        merged = MergedPage()
        for engine in "abcd":
            add(merged, engine, b"x 1\n")
        with pytest.raises(MalformedPage, match="together are too large"):
            add(merged, "e", b"x 1\n")

    def test_empty_page_adds_nothing(self) -> None:
        assert merge(a="", b="\n# a remark\n") == ""


NAMES = st.sampled_from(["vllm:x", "vllm:y", "z", "process_z"])
LABELS = st.dictionaries(
    st.sampled_from(["model_name", "le_", "gateway_engine", "exported_gateway_engine"]),
    st.text(st.characters(codec="utf-8"), max_size=4)
    | st.sampled_from(['"', "\\n", "{a,b}", "\n"]),
    max_size=3,
)
VALUE = (
    st.floats(-1e200, 1e200, exclude_min=True, exclude_max=True)
    | st.sampled_from([float("nan"), float("inf"), -float("inf")])
    | st.integers(-(2**60), 2**60).map(float)
)
COUNT = st.floats(0, 1e9)


@st.composite
def families(draw: st.DrawFn) -> list[Metric]:
    """Return an engine's families, of every type of prometheus-client."""
    found: list[Metric] = []
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        kind = draw(st.sampled_from(range(5)))
        each = draw(st.lists(LABELS, max_size=3))
        text = draw(st.text(max_size=5))
        labels = sorted({key for sample in each for key in sample})
        values = [[sample.get(key, "") for key in labels] for sample in each]
        family: Metric
        if kind == 0:
            family = CounterMetricFamily(name, text, labels=labels)
            for sample in values:
                family.add_metric(sample, draw(COUNT), created=draw(st.none() | COUNT))
        elif kind == 1:
            family = HistogramMetricFamily(name, text, labels=labels)
            for sample in values:
                buckets = [("1.0", draw(COUNT)), ("+Inf", draw(COUNT))]
                family.add_metric(sample, buckets, draw(COUNT))
        elif kind == 2:
            family = SummaryMetricFamily(name, text, labels=labels)
            for sample in values:
                family.add_metric(sample, draw(st.integers(0, 9)), draw(COUNT))
        else:
            make = GaugeMetricFamily if kind == 3 else UntypedMetricFamily
            family = make(name, text, labels=labels)
            for sample in values:
                family.add_metric(sample, draw(VALUE), draw(st.none() | st.integers(0, 2**40)))
        found.append(family)
    return found


def exposed(found: list[Metric]) -> bytes:
    """Return the page that prometheus-client renders."""

    class Families:
        def collect(self) -> list[Metric]:
            return found

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    return generate_latest(registry)


def with_engine(series: Series, engine: str) -> Series:
    name, labels, value, moment = series
    renamed = dict(labels)
    if (own := renamed.pop("gateway_engine", None)) is not None:
        other = "exported_gateway_engine"
        while other in renamed:
            other = f"exported_{other}"
        renamed[other] = own
    return name, frozenset({**renamed, "gateway_engine": engine}.items()), value, moment


@pytest.mark.slow
@settings(max_examples=60)
@given(
    pages=st.lists(families().map(exposed), max_size=3),
    slice_bytes=st.sampled_from([1, 64, SLICE_BYTES]),
)
def test_merged_page_has_every_sample_of_every_page(pages: list[bytes], slice_bytes: int) -> None:
    merged, expected = MergedPage(), Counter[Series]()
    left_out: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged_page, "SLICE_BYTES", slice_bytes)
        for number, page in enumerate(pages):
            engine = f"demo-{number}"
            left_out[engine] = add(merged, engine, page)
            for series, times in read(page.decode()).items():
                expected[with_engine(series, engine)] += times
    found = read(merged.text({}).decode())
    missing = expected - found
    assert found - expected == Counter()
    for name, labels, *_ in missing:
        (fault,) = left_out[dict(labels)["gateway_engine"]]
        others = fault.removeprefix("other engines declare ").removesuffix(" differently")
        assert any(name.startswith(family) for family in others.split(", "))
    text = merged.text({}).decode()
    headers = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers))


@given(
    page=st.binary(max_size=60)
    | st.text(st.sampled_from('x_: {}=",\\n\n#1.e+NaIf\t-TYPEHLgauge'), max_size=60).map(str.encode)
)
def test_arbitrary_page_never_spoils_the_merged_page(page: bytes) -> None:
    merged = MergedPage()
    add(merged, "good", b'# TYPE x gauge\nx{k="v"} 1\n')
    with contextlib.suppress(MalformedPage):
        add(merged, "arbitrary", page)
    found = read(merged.text({"good": True}).decode())
    assert ("x", frozenset({("gateway_engine", "good"), ("k", "v")}), "1.0", None) in found
    assert all("gateway_engine" in dict(labels) for _, labels, *_ in found)
