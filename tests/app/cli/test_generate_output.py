"""The output of `vllm-gateway generate`."""

import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.cli.generate_output import JsonLinesWriter, ProgressMeter, PromptOrder, TextWriter
from app.cli.output import printable
from engines.base import Progress
from engines.offline import Advance


def record(**fields: Any) -> dict[str, Any]:
    plain = {"index": 0, "prompt": "q", "choice": 0, "reasoning": None, "content": "a"}
    return {**plain, **fields}


def page(*records: dict[str, Any], titles: bool = False) -> str:
    out = io.StringIO()
    form = TextWriter(out, titles=titles)
    for one in records:
        form.write(one)
    return out.getvalue()


def test_single_answer_is_plain_text() -> None:
    assert page(record(content="Two\nlines, [red]as they are[/red].")) == (
        "Two\nlines, [red]as they are[/red].\n"
    )


def test_reasoning_and_answer_are_separate() -> None:
    shown = page(record(reasoning="hm", content="so"))
    assert shown == "Thought:\nhm\n\nAnswer:\nso\n"
    assert page(record(reasoning="hm", content=None)) == "Thought:\nhm\n\nAnswer:\n\n"


def test_several_answers_have_titles() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x " * 80}]
    second = {k: v for k, v in record(index=1, choice=1).items() if k != "prompt"}
    shown = page(record(), {**second, "messages": messages}, titles=True).splitlines()
    assert shown[:3] == ["[1] q", "a", ""]
    assert shown[3].startswith("[2.2] x x x")
    assert shown[3].endswith("…")


def test_error_is_a_json_line_and_no_text() -> None:
    failed = {"index": 0, "prompt": "q", "error": {"message": "m"}}
    assert page(failed) == ""
    out = io.StringIO()
    JsonLinesWriter(out).write(failed)
    assert json.loads(out.getvalue()) == failed


def test_printable_replaces_control_characters() -> None:
    assert printable("a\x1b[2Jb\rc\x9bd\te\nf…", kept="\n\t") == "a\ufffd[2Jb\ufffdc\ufffdd\te\nf…"


@given(st.permutations(range(6)), st.integers(0, 6))
def test_answers_are_in_the_order_of_their_prompts(places: list[int], done: int) -> None:
    order = PromptOrder()
    shown = [
        one["index"] for place in places[:done] for one in order.add(place, [{"choice": place}])
    ]
    assert shown == list(range(len(shown)))
    late = [one["index"] for one in order.rest()]
    assert late == sorted(late)
    assert sorted(shown + late) == sorted(places[:done])


def test_summary_counts_answers_and_tokens() -> None:
    meter = ProgressMeter(Console(file=io.StringIO()), 3, live=True)
    assert meter.summary(0) == "0 of 3 prompts: the model was not loaded"
    with meter:
        meter.loaded()
        meter.advance(Advance(3, 1200, 34))
    summary = meter.summary(1)
    assert summary.startswith("3 of 3 prompts in ")
    assert "1,200 prompt tokens (" in summary
    assert "34 generated (" in summary
    assert summary.endswith("; 1 failed")


def test_bar_shows_the_start_and_then_the_prompts() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)

    def shown() -> str:
        """The present content of the terminal."""
        out.seek(0)
        out.truncate()
        meter.refresh()
        return out.getvalue()

    with ProgressMeter(console, 1200, live=True) as meter:
        first = shown()
        assert "starting" in first
        assert "1,200 prompts to answer" in first
        assert "?" not in first
        meter.loading(Progress("loading weights", 1, 3))
        loading = shown()
        assert "loading weights" in loading
        assert "1/3" in loading
        meter.loading(Progress("making the KV cache"))
        assert "1/3" not in shown()
        meter.loaded()
        generating = shown()
        assert "generating" in generating
        assert "0/1200" in generating
