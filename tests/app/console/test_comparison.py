"""Engines side by side: facts, flags and variables, and which rows differ."""

from app.console.command_line import parse
from app.console.comparison import UNKNOWN, compare
from app.console.engines_page import DEFAULT_COMPARED, MAX_COMPARED, choose
from app.console.fleet_view import EngineView
from engines.base import EngineFacts
from tests.app.console.test_actions import engine_row


def view(name: str, runs: str = "vllm serve --model=m", **facts: object) -> EngineView:
    """Return an engine that runs a command line and has reported facts."""
    row = engine_row(0).model_copy(
        update={"name": name, "runs": runs, "facts": EngineFacts().updated(EngineFacts(**facts))}  # type: ignore[arg-type]
    )
    return EngineView(row, parse(runs), None, (), True, "")


def test_rows_that_are_not_the_same_for_all_differ() -> None:
    found = compare(
        [
            view("a", "vllm --model=m --max-num-seqs=8", dtype="bfloat16", weights_gib=1.5),
            view("b", "vllm --model=m --enforce-eager", dtype="float16", weights_gib=1.5),
        ]
    )
    rows = {row.name: row for row in (*found.facts, *found.flags)}
    assert rows["dtype"].differs
    assert not rows["weights (GiB)"].differs
    assert rows["weights (GiB)"].values == ["1.50", "1.50"]
    assert not rows["--model"].differs
    assert rows["--max-num-seqs"].values == ["8", UNKNOWN]
    assert rows["--enforce-eager"].values == [UNKNOWN, "set"]
    assert found.differences == 3


def test_what_most_engines_do_not_have_is_marked() -> None:
    engines = [
        view(name, f"vllm --model={model}") for name, model in zip("abc", "xyx", strict=True)
    ]
    (row,) = compare(engines).flags
    assert row.cells == [("x", False), ("y", True), ("x", False)]
    (row,) = compare(engines[:2]).flags
    assert row.cells == [("x", False), ("y", True)]


def test_one_engine_differs_from_none() -> None:
    assert compare([view("a")]).differences == 0
    assert compare([]).engines == []


def test_a_remote_engine_has_an_address_instead_of_flags() -> None:
    found = compare([view("far", "http://gpu-box:8000")])
    assert found.flags == []
    assert [row.values for row in found.facts if row.name == "address"] == [["http://gpu-box:8000"]]


def test_facts_are_text() -> None:
    found = compare(
        [
            view(
                "a",
                supported_tasks=("generate", "embed"),
                sampling_defaults={"top_p": 0.9, "x": True},
            )
        ]
    )
    rows = {row.name: row.values[0] for row in found.facts}
    assert rows["supported tasks"] == "generate, embed"
    assert rows["sampling defaults"] == "top_p=0.90, x=yes"


def test_a_comparison_has_few_columns_until_some_are_chosen() -> None:
    engines = [view(f"e-{number}") for number in range(40)]
    assert choose(engines, None) == engines[:DEFAULT_COMPARED]
    assert choose(engines, ["e-7", "nope", "e-3"]) == [engines[3], engines[7]]
    assert len(choose(engines, [one.row.name for one in engines])) == MAX_COMPARED
