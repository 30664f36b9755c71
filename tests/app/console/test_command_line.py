"""Command lines flag by flag."""

from hypothesis import given
from hypothesis import strategies as st

from app.console.command_line import SET, parse


def test_variables_and_flags_are_told_apart() -> None:
    found = parse(
        "CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=*** python -m vllm serve --model=a --max_num_seqs 8 "
        "--enforce-eager --lora-modules x=1 y=2 --api-key '***' -tp 2 --temp -1.5"
    )
    assert found.variables == {"CUDA_VISIBLE_DEVICES": "0,1", "HF_TOKEN": "***"}
    assert found.flags == {
        "--model": "a",
        "--max-num-seqs": "8",
        "--enforce-eager": SET,
        "--lora-modules": "x=1 y=2",
        "--api-key": "***",
        "-tp": "2",
        "--temp": "-1.5",
    }


def test_a_flag_that_is_given_twice_has_both_values() -> None:
    assert parse("vllm --middleware a --middleware=b").flags == {"--middleware": "a b"}


def test_json_values_stay_whole() -> None:
    assert parse("vllm --config '{\"a\": 1}'").flags == {"--config": '{"a": 1}'}


def test_an_address_has_no_flags() -> None:
    assert parse("http://gpu-box:8000").flags == {}


@given(st.text(max_size=200))
def test_any_text_is_read_without_a_fault(text: str) -> None:
    for name, value in parse(text).flags.items():
        assert name.startswith("-")
        assert value


def test_a_command_line_is_read_once_however_often_pages_show_it() -> None:
    text = "vllm serve --model=var/a --max-num-seqs 8"
    assert parse(text) is parse(text)
