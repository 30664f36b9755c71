"""Files of prompts, as text and as JSON Lines."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.offline import Job, Prompt, PromptsError, read_prompts

MESSAGES = ({"role": "user", "content": "a"},)


def test_each_line_is_a_prompt_and_blank_lines_are_skipped() -> None:
    assert read_prompts(b"\xef\xbb\xbfone\r\n\n  \n two \n", "f") == [
        Prompt("one"),
        Prompt(" two "),
    ]


def test_json_lines_hold_strings_and_objects() -> None:
    lines = ['"a"', '{"prompt": "b", "id": 7}', json.dumps({"messages": MESSAGES, "id": "x"})]
    expected = [Prompt("a"), Prompt("b", id=7), Prompt(messages=MESSAGES, id="x")]
    assert read_prompts("\n".join(lines).encode(), "f") == expected
    assert [prompt.to_json() for prompt in expected] == [
        {"prompt": "a"},
        {"id": 7, "prompt": "b"},
        {"id": "x", "messages": MESSAGES},
    ]


def test_format_follows_the_name_else_the_first_line() -> None:
    assert read_prompts(b'{"prompt": "a"}', "f.txt") == [Prompt('{"prompt": "a"}')]
    assert read_prompts(b"17\n{}", "f") == [Prompt("17"), Prompt("{}")]
    assert read_prompts(b"{not json", "f") == [Prompt("{not json")]
    with pytest.raises(PromptsError, match=r"^f\.jsonl line 1: not JSON: Expecting value"):
        read_prompts(b"hello", "f.jsonl")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", None),
        ("{", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
        ("[" * 100_000, "nested too deeply"),
        ("17", "must be a string, or an object with prompt or messages"),
        ('""', "prompt must be a string that is not empty"),
        ('{"prompt": 1}', "prompt must be a string that is not empty"),
        ("{}", "must hold either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "must hold either prompt or messages"),
        (
            '{"prompt": "a", "temperature": 1}',
            "unknown key 'temperature'; allowed are prompt or messages, and id",
        ),
        ('{"prompt": "a", "id": true}', "id must be a string or a whole number"),
        ('{"messages": []}', "messages must be a list that is not empty"),
        ('{"messages": ["a"]}', "messages.0 must be an object with a role"),
        (
            '{"messages": [{"role": "user", "content": 1}]}',
            "messages.0.content must be a string or a list of parts",
        ),
    ],
)
def test_invalid_line_is_reported_with_its_number(line: str, said: str | None) -> None:
    data = f'"fine"\n\n{line}\n'.encode()
    if said is None:
        assert read_prompts(data, "f") == [Prompt("fine")]
        return
    with pytest.raises(PromptsError) as caught:
        read_prompts(data, "f")
    assert str(caught.value) == f"f line 3: {said}"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "f contains no prompt"),
        (b" \n\n", "f contains no prompt"),
        (b"a\n\xff", "f line 2: not UTF-8"),
    ],
)
def test_file_without_text_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(PromptsError) as caught:
        read_prompts(data, "f")
    assert str(caught.value) == said


@given(st.lists(st.text(min_size=1), min_size=1))
def test_json_strings_are_read_back(texts: list[str]) -> None:
    data = "\n".join(map(json.dumps, texts)).encode()
    assert read_prompts(data, "f.jsonl") == [Prompt(text) for text in texts]


@given(st.binary())
def test_any_bytes_are_prompts_or_one_error(data: bytes) -> None:
    try:
        said = ""
        assert read_prompts(data, "f")
    except PromptsError as error:
        said = str(error)
    assert not said or re.fullmatch(r"f [^\n]+", said)


def test_job_survives_serialization() -> None:
    messages = ({"role": "user", "content": "hi"},)
    job = Job(
        model="m",
        prompts=(Prompt("a", id=1), Prompt(messages=messages)),
        engine=(("dtype", "float32"),),
        sampling={"n": 2},
        chat=True,
    )
    assert Job.from_line(job.to_line().decode()) == job
