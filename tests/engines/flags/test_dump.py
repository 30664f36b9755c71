"""The script that runs vLLM's parser."""

import argparse

import pytest

from engines.flags.dump import find_surplus, list_flags


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--seed=1"], None),
        (["--seed", "1"], None),
        (["--hosts", "a", "b", "--eager"], None),
        (["--level", "--seed=1"], None),
        (["--level", "1"], None),
        (["--seed", "1", "2"], "argument --seed: it takes one value"),
        (["--level", "1", "2"], "argument --level: it takes one value"),
        (["--eager", "another/model"], "argument --eager: it takes no value"),
    ],
)
def test_no_value_of_a_list_becomes_the_model(words: list[str], fault: str | None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--level", nargs="?")
    parser.add_argument("--hosts", nargs="+")
    parser.add_argument("--eager", action="store_true")
    assert find_surplus(parser, ["--model=m", *words]) == fault


def test_names_that_an_action_hides_are_flags() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-num-seqs", "-s", type=int)
    hiding = parser.add_argument("--enable-lora", action=argparse.BooleanOptionalAction)
    hiding.option_strings = ["--enable-lora"]
    assert list_flags(parser) == {
        "max-num-seqs": True, "enable-lora": False, "no-enable-lora": False
    }  # fmt: skip
