"""Flags that vLLM no longer has, and misspelled flags."""

import pytest

from engines.spec.old_flags import REMOVED_FLAGS, explain_removed_flag, nearest_flag
from tests.fakes.vllm_flags import table


def test_removed_flags_are_not_in_vllms_parser() -> None:
    assert REMOVED_FLAGS.keys() & table().flags == set()


def test_advice_names_only_flags_that_vllm_has() -> None:
    for advice in REMOVED_FLAGS.values():
        named = {word.strip(",:;") for word in advice.split() if word.count("-") >= 2}
        assert named <= table().flags, advice


def test_negated_flag_is_explained_like_its_flag() -> None:
    assert explain_removed_flag("no-enable-reasoning") == explain_removed_flag("enable-reasoning")
    assert explain_removed_flag("max-model-len") is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max-modellen", "max-model-len"),
        ("max-model-length", "max-model-len"),
        ("maxnumseqs", "max-num-seqs"),
        ("gpu-mem-util", "gpu-memory-utilization"),
        ("quantisation", "quantization"),
        ("enable-log-request", "enable-log-requests"),
        # The opposite.
        ("disable-log-requests", None),
        ("disable-prefix-caching", None),
        ("enable-custom-all-reduce", None),
        ("noenforce-eager", "no-enforce-eager"),
        # The same letters, something else.
        ("enable-reasoning", None),
        ("num-scheduler-steps", None),
    ],
)
def test_suggestion_is_a_misspelling_never_another_flag(name: str, meant: str | None) -> None:
    assert nearest_flag(name, table().flags) == meant
