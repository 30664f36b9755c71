import sys
from pathlib import Path

import pytest

from bench.__main__ import PARTS, main, parts_of


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        (None, [*PARTS]),
        (["proxies"], ["streams", "plain"]),
        (["memory", "plain"], ["plain", "memory"]),
        (["litellm"], ["streams", "plain", "litellm"]),  # it takes part in their rounds
    ],
)
def test_parts_run_in_their_order(chosen: list[str] | None, parts: list[str]) -> None:
    assert parts_of(chosen) == parts


@pytest.mark.parametrize(
    ("option", "reason"),
    [("--before", "not a checkout of this project"), ("--before-python", "not an interpreter")],
)
def test_missing_build_is_refused_before_any_run(
    option: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", option, str(tmp_path / "nothing")])

    with pytest.raises(SystemExit):
        main()

    assert reason in capsys.readouterr().err
