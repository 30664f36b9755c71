import math

import pytest

from bench.disturbances import Disturbances
from bench.peers import BEFORE, COPY
from bench.report import Table, number, replace_section, section_of, tables
from tests.bench.results import disturbance, of, samples


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [(None, 2, "–"), (1234.5678, 1, "1,234.6"), (0.0, 2, "0.00"), (1024.0, 0, "1,024")],
)
def test_numbers_are_short_and_missing_ones_a_dash(
    value: float | None, digits: int, expected: str
) -> None:
    assert number(value, digits) == expected


def test_a_table_in_markdown() -> None:
    table = Table("Streams", ["", "CPU µs"], [["direct", "–"], ["vllm-gateway", "40.0"]], "Why.")

    assert table.markdown() == (
        "## Streams\n\nWhy.\n\n| | CPU µs |\n| --- | ---: |\n| direct | – |\n"
        "| vllm-gateway | 40.0 |\n"
    ).replace("| | ", "|  | ")


def test_a_run_has_a_table_for_each_part_that_ran_and_the_targets() -> None:
    run = of(samples("plain", 32, "cpu_us_per_request", direct=[None], vllm_gateway=[70.0]))

    made = list(tables(run))

    assert [table.title for table in made] == ["Plain requests", "Targets"]
    assert made[0].rows == [
        ["direct", "32", "–", "–", "–", "1"],
        ["vllm-gateway", "32", "70.0", "–", "–", "1"],
    ]
    assert {row[-1] for row in made[1].rows} == {"not run", "not shown"}


def test_target_without_a_size_has_no_row_for_it() -> None:
    run = of(
        samples("streams", 64, "ok", direct=[1], litellm=[1]),
        samples("streams", 512, "ok", direct=[1]),
    )

    rows = next(table for table in tables(run) if table.title == "Streams").rows

    assert [row[:2] for row in rows] == [["direct", "64"], ["litellm", "64"], ["direct", "512"]]


def test_the_targets_show_bound_value_interval_and_verdict() -> None:
    run = of(
        samples("streams", 64, "cpu_us_per_chunk", vllm_gateway=[5.0, 7.0], vllm_router=[4.0, 4.0]),
        samples(
            "plain",
            32,
            "cpu_us_per_request",
            vllm_gateway=[99.0, 90.0, 96.0, 93.0, 60.0, 84.0],
            vllm_router=[60.0] * 6,
        ),
        samples("memory", 1024, "rss_mib", vllm_gateway=[130.0, 131.0, 132.0, 129.0, 130.0, 128.0]),
        samples("stall", 1024, "stall_free", vllm_gateway=[1024], direct=[1024]),
    )

    rows = {row[0]: list(row[1:]) for row in list(tables(run))[-1].rows}

    assert rows["CPU per plain request, 32 at a time, × vllm-router"] == [
        "≤ 1.8 (aim 1.3)",
        "1.525",
        "1.000 to 1.650",
        "met",
    ]
    assert rows["CPU per streamed chunk, 64 streams, × vllm-router"] == [
        "≤ 1 (aim 0.9)",
        "1.500",
        "–",
        "not shown",
    ]
    assert rows["RSS after plain load, 512 and 1,024 streams"] == [
        "≤ 105 MiB (aim 90)",
        "130",
        "128 to 132",
        "missed",
    ]
    assert rows["stall-free streams of 1,024, where direct has 1,024"] == [
        "≥ 1,024",
        "1,024",
        "–",
        "not shown",
    ]
    assert rows["longest pause of the garbage collector under load"] == ["– ms", "–", "–", ""]


@pytest.mark.parametrize(
    ("other", "title"), [(BEFORE, "Against the gateway before"), (COPY, "Noise")]
)
def test_another_build_in_the_same_rounds_has_a_table(other: str, title: str) -> None:
    base = [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    run = of(
        samples("plain", 32, "cpu_us_per_request", vllm_gateway=[n * 0.9 for n in base]),
        samples("plain", 32, "cpu_us_per_request", **{other: base}),
    )

    made = {table.title: table for table in tables(run)}

    assert [*made] == ["Plain requests", title, "Targets"]
    assert made[title].columns[1:] == [other, "vllm-gateway", "ratio", "95 % interval"]
    assert made[title].rows[0] == [
        "CPU µs per plain request, 32 at a time",
        "102.5",
        "92.2",
        "0.900",
        "0.900 to 0.900",
    ]


def test_memory_is_shown_after_each_load() -> None:
    run = of(
        samples("memory", 32, "rss_mib", vllm_gateway=[90.0]),
        samples("memory", 512, "rss_mib", vllm_gateway=[95.0]),
        samples("memory", 1024, "rss_mib", vllm_gateway=[99.0]),
    )

    assert next(tables(run)).rows == [["vllm-gateway", "90", "95", "99", "–"]]


def test_figure_without_bounds_is_marked() -> None:
    assert number(math.inf, 2) == "∞"


def test_the_noisy_neighbor_has_a_row_for_each_body_and_target() -> None:
    run = Disturbances(
        [
            *(disturbance(round=n, stop_ms=stop) for n, stop in enumerate((4.0, 9.0, 5.0))),
            disturbance(at_once=8, outcomes=["503"], gap_ms=812.4, stop_ms=700.25),
            disturbance(target="direct", outcomes=[], stop_ms=None, rss_growth_mib=None),
        ]
    )

    made = list(tables(of(), run))

    assert [table.title for table in made] == ["Noisy neighbor", "Targets"]
    assert made[0].rows == [
        ["members", "vllm-gateway", "200, 503", "25 / 812", "6 / 6", "5.0 / 700.2", "1 / 1"],
        ["members", "direct", "–", "25 / –", "6 / –", "– / –", "– / –"],
    ]


@pytest.mark.parametrize(("stop_ms", "verdict"), [(19.5, "met"), (20.5, "missed")])
def test_the_longest_stop_of_the_event_loop_has_a_bound(stop_ms: float, verdict: str) -> None:
    made = next(tables(of(), Disturbances([disturbance(stop_ms=stop_ms)])))

    assert made.note.endswith(f"{stop_ms} ms; its bound is 20 ms, {verdict}.")


TEXT = "# Results\n\n## Soak\n\nold\n\n## Soaked\n\nstays\n"


def test_a_section_takes_the_place_of_the_old_one() -> None:
    replaced = replace_section(TEXT, "## Soak\n\nnew \\1\n")

    assert replaced == "# Results\n\n## Soak\n\nnew \\1\n\n## Soaked\n\nstays\n"
    assert replace_section(replaced, "## Soak\n\nnew \\1\n") == replaced


def test_a_new_section_goes_to_the_end() -> None:
    assert replace_section("# R\n", "## New\n\nx\n") == "# R\n\n## New\n\nx\n"
    assert replace_section("", "## New\n\nx\n") == "## New\n\nx\n"


def test_a_section_is_found_by_its_whole_heading() -> None:
    assert section_of(TEXT, "Soak") == "## Soak\n\nold\n"
    assert section_of(TEXT, "Soaked") == "## Soaked\n\nstays\n"
    assert section_of(TEXT, "So") is None
