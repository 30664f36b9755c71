"""The choice of engines to compare."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from app.console.command_line import CommandLine
from app.console.engines_page import DEFAULT_COMPARED, MAX_COMPARED, choose
from app.console.fleet_view import EngineView
from app.fleet import EngineRow
from engines.base import EngineFacts, EngineState

VIEW = EngineView(
    row=EngineRow(
        name="",
        model="m",
        kind="process",
        state=EngineState.READY,
        since=None,
        progress=None,
        facts=EngineFacts(),
        last_error=None,
        restarts=0,
        load_s=None,
        in_flight=0,
        pid=None,
        memory_gib=None,
        runs="vllm serve",
    ),
    command=CommandLine(),
    progress=None,
    actions=(),
    has_log=True,
    gpus="",
)
ENGINES = [replace(VIEW, row=VIEW.row.model_copy(update={"name": f"e{n}"})) for n in range(40)]
NAMES = [one.row.name for one in ENGINES]


@given(st.none() | st.lists(st.sampled_from(NAMES) | st.text(max_size=5), max_size=60))
def test_the_chosen_engines_are_compared_in_the_order_of_the_configuration(
    names: list[str] | None,
) -> None:
    found = [one.row.name for one in choose(ENGINES, names)]
    if names:
        assert found == [name for name in NAMES if name in names][:MAX_COMPARED]
    else:
        assert found == NAMES[:DEFAULT_COMPARED]
