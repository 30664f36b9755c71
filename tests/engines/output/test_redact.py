"""Secrets are redacted; everything else is shown unchanged."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.output import REDACTED, is_secret, redact_command, redact_line

CANARY = "hf_canary0123456789"


@pytest.mark.parametrize(
    "name",
    [
        "hf-token", "HF_TOKEN", "hfToken", "--api-key", "apikey", "password", "db.password",
        "SECRET", "PGPASSWORD", "DB_PASS", "MYSQL_PWD", "GITHUB_PAT",
    ],
)  # fmt: skip
def test_secret_name_is_recognized(name: str) -> None:
    assert is_secret(name, CANARY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer", "auto"),
        ("max-num-batched-tokens", "2048"),
        ("long-prefill-token-threshold", "512"),
        ("eos_token_id", "2"),
        ("monkey", "x"),
        ("kv-cache-dtype", "fp8"),
        ("KeyError", "'layers.0'"),
        ("PWD", "/srv"),
        ("OLDPWD", "/srv"),
        ("pass_config", "{}"),
        ("forward_pass", "3"),
    ],
)
def test_other_name_is_no_secret(name: str, value: str) -> None:
    assert not is_secret(name, value)


@pytest.mark.parametrize(
    "words",
    [
        ["--hf-token=" + CANARY],
        ["--hf-token", CANARY],
        ["--api-keys", CANARY, CANARY + "2"],
        ["--password=" + CANARY + " with a blank and a '"],
        ["--kv-transfer-config", json.dumps({"extra": [{"accessKey": CANARY}], "a": 1})],
        ["--kv-transfer-config=" + json.dumps({"password": CANARY})],
        ["--model=s3://user:" + CANARY + "@host/m"],
        ["--model", "https://user:" + CANARY + "@host/m"],
        ["--config-json", '{"secret": "' + CANARY + '", not JSON'],
    ],
)
def test_secrets_in_a_command_are_redacted(words: list[str]) -> None:
    shown = redact_command(shlex.join(["vllm", *words, "--dtype=auto"]))
    assert CANARY not in shown
    assert REDACTED in shown
    assert shlex.split(shown)[0] == "vllm"
    assert shown.endswith(" --dtype=auto")


@pytest.mark.parametrize(
    "text",
    ["python -m vllm --model='a b' --args '{\"x\": 1}'", "http://[::1]:8000/v1", "an open 'quote"],
)
def test_command_without_secrets_is_unchanged(text: str) -> None:
    assert redact_command(text) == text


@pytest.mark.parametrize(
    "line",
    [
        f"non-default args: {{'model': 'm', 'hf_token': '{CANARY}', 'port': 1}}",
        f"unrecognized arguments: --hf-tokenn --hf-token {CANARY}",
        f"unrecognized arguments: --hf-token={CANARY}",
        f"HF_TOKEN={CANARY}",
        f"api_key=['{CANARY}', 'b']",
        f'{{"password": "{CANARY}"}}',
        f"proxy http://user:{CANARY}@host:3128",
        f"Authorization: {CANARY}",
        f"postgresql://user:a@{CANARY}@host/db",
        # By their form, in pieces that no scanner of the repository takes for one.
        *(
            f"url: {form}"
            for form in (f"ghp_{CANARY[3:]}", f"glpat-{CANARY}", f"whsec_{CANARY[3:]}")
        ),
    ],
)
def test_secrets_in_a_line_are_redacted(line: str) -> None:
    shown = redact_line(line)
    assert CANARY[3:] not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    "line",
    [
        "KeyError: 'model.layers.0'",
        "GPU KV cache size: 16,384 tokens",
        "Using max token length 12 and key heads of size 8",
        "max_num_batched_tokens=2048, tokenizer='m', skip_tokenizer_init=False",
    ],
)
def test_line_without_secrets_is_unchanged(line: str) -> None:
    assert redact_line(line) == line


@given(st.text(max_size=300))
def test_any_text_is_accepted(text: str) -> None:
    redact_command(text)
    assert redact_line(f"token={CANARY} {text}").startswith(f"token={REDACTED}")


def test_endless_word_takes_linear_time() -> None:
    """A pattern that tried every start position would take hours."""
    word = "a" * 1_000_000
    assert redact_line(word) == word


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repeated", "shown"),
    [
        ("a=", "a="),
        ("key=[ ", f"key={REDACTED} "),
        ("key=[ 'b' \" ", f"key={REDACTED} 'b' \" "),
        ("token=1,", "token=1,"),
    ],
)
def test_many_names_and_open_brackets_take_linear_time(repeated: str, shown: str) -> None:
    """Reading each value to the end of the line would take minutes."""
    count = 256 * 1024 // len(repeated)
    assert redact_line(f"{repeated * count} token={CANARY}") == f"{shown * count} token={REDACTED}"


def test_credentials_of_any_length_in_a_url_are_redacted() -> None:
    password = "p" * 2_000
    assert (
        redact_line(f"proxy http://user:{password}@host:3128")
        == f"proxy http://{REDACTED}@host:3128"
    )
