"""Log lines contain neither secrets nor control characters."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.telemetry.logs.scrub import MAX_TEXT_CHARS, clean, scrub, scrub_lines

CANARY = "Canary0123456789abcdef"
STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize(
    "said",
    [
        f"Incorrect API key provided: sk-{CANARY}",
        f"the model 'sk-gw-0123456789-{CANARY}' does not exist",
        f"authorization: Bearer {CANARY}",
        f"bearer {CANARY}",
        f"Basic {CANARY}==",
        f"cannot connect to postgresql://me:{CANARY}@host/db",
        f"redis://:{CANARY}@host:6379/0",
        f"GET /v1/models?api_key={CANARY}&x=1",
        f"HF_TOKEN={CANARY}",
        f"non-default args: {{'hf_token': '{CANARY}'}}",
        f"vllm serve --hf-token {CANARY}",
        f"password: {CANARY}",
        f"hf_{CANARY}",
    ],
)
def test_secret_in_foreign_text_is_masked(said: str) -> None:
    assert CANARY not in scrub(said)
    assert "***" in scrub(said)


@pytest.mark.parametrize(
    "said",
    [
        "engine demo-0 failed: unrecognized arguments: --no-such-flag",
        "no client key yet: vllm-gateway keys create --name NAME",
        "root created the client key 0123456789",
        "reload: ~ limits.default.tokens_per_minute 1 → 2",
        "an answer of 20 tokens, 4 of them cached; eos_token_id: 2",
        "问候 naïve café ①",
    ],
)
def test_text_without_secrets_is_unchanged(said: str) -> None:
    assert scrub(said) == said


@given(st.text())
@example("a\nb\r\x1b[31m\u2028\u202e\u2066\x85\ud800")
def test_no_character_ends_a_line_or_controls_a_terminal(said: str) -> None:
    for shown in (clean(said), scrub(said)):
        assert not STEERS.search(shown)
        shown.encode()


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp"])))
def test_harmless_text_is_unchanged(said: str) -> None:
    assert clean(said) == said


def test_text_is_cut_at_the_limit() -> None:
    assert len(scrub("x" * 100_000)) == MAX_TEXT_CHARS + 1


def test_stack_trace_keeps_its_lines() -> None:
    trace = f"Traceback:\n\tFile \"a.py\"\nKeyError: 'sk-{CANARY}\x1b'"
    assert scrub_lines(trace) == "Traceback:\n    File \"a.py\"\nKeyError: '***·'"
