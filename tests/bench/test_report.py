import pytest

from bench.disturbances import Disturbances
from bench.peers import BEFORE, COPY
from bench.report import replace_section, section_of, tables
from tests.bench.results import disturbance, of, samples


def test_a_run_has_a_table_for_each_part_that_ran_and_the_targets() -> None:
    run = of(samples("plain", 32, "cpu_us_per_request", direct=[None], vllm_gateway=[70.0]))

    made = list(tables(run))

    assert [table.title for table in made] == ["Plain requests", "Targets"]
    assert made[0].rows == [
        ["direct", "32", "–", "–", "–", "1"],
        ["vllm-gateway", "32", "70.0", "–", "–", "1"],
    ]
    assert {row[-1] for row in made[1].rows} == {"not run", "not shown"}


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
