import sys

from bench.bytecodes import Counts, Function, Tracer, table


def test_only_what_runs_while_it_is_on_counts() -> None:
    tracer = Tracer()

    def add(a: int, b: int) -> int:
        return a + b

    sys.settrace(tracer.trace)
    try:
        add(1, 2)
        tracer.on = True
        add(1, 2)
        add(1, 2)
        tracer.on = False
    finally:
        sys.settrace(None)

    assert tracer.calls[add.__code__] == 2
    assert tracer.bytecodes[add.__code__] >= 2 * 4  # two loads, a sum, a return


def test_the_table_has_a_row_for_a_request_and_one_for_a_chunk() -> None:
    function = Function("app/relay/relay.py", "Relay.serve", 60.0, 1.0)
    counts = Counts(6234, 222, 332.8, 9.0, 1200.0, [function], [])

    rows = table(counts, {"prefix": 7000}).rows
    assert [row[1:] for row in rows] == [["6,234", "222"], ["333", "9"], ["7,000", ""]]
    assert "`prefix`" in rows[-1][0]
