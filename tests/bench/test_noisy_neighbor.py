from pathlib import Path

import pytest

from bench import children, noisy_neighbor
from bench.disturbances import AT_ONCE, NO_BODY, Disturbance
from bench.hostile_bodies import BODIES
from bench.noisy_neighbor import Program, ProgramError
from bench.peers import DIRECT, GATEWAY, Peer, direct

NESTING = "100,000-fold nesting"
LIMITED = "requests_per_minute: 0, 16 MiB of token ids"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORK", tmp_path)
    for name in ("CALM_S", "SETTLE_S", "TAIL_S"):
        monkeypatch.setattr(noisy_neighbor, name, 0.1)


def measured(monkeypatch: pytest.MonkeyPatch, body: str, *found: Peer) -> list[Disturbance]:
    """Measure one body; nothing may be left out."""
    monkeypatch.setattr(noisy_neighbor, "BODIES", {body: BODIES[body]})
    notes: list[str] = []
    run = list(noisy_neighbor.measure(lambda _: None, notes.append, found, quick=True))
    assert notes == []
    return run


def test_a_body_is_sent_once_and_then_several_times_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm, one, many = measured(monkeypatch, NESTING)

    assert (calm.body, calm.outcomes) == (NO_BODY, [])
    assert (one.body, one.at_once, one.outcomes) == (NESTING, 1, ["400"])
    assert (many.at_once, many.outcomes) == (AT_ONCE, ["400"] * AT_ONCE)
    for sample in (calm, one, many):
        assert sample.target == DIRECT
        assert sample.gap_ms is not None
        assert sample.wait_ms is not None
        assert (sample.stop_ms, sample.rss_growth_mib) == (None, None)  # of no process in between
        assert (sample.streams_lost, sample.died) == (0, False)


def test_the_gateway_has_keys_for_victim_attacker_and_one_without_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noisy_neighbor, "AT_ONCE", 2)

    run = measured(monkeypatch, LIMITED, Peer(GATEWAY, "1", direct().start))

    assert {sample.target for sample in run if sample.body == LIMITED} == {GATEWAY}
    refused = [sample for sample in run if sample.body == LIMITED]
    assert {name for sample in refused for name in sample.outcomes} == {"429"}
    for sample in refused:
        assert sample.before_body is not None
        assert sample.stop_ms is not None
        assert sample.rss_growth_mib is not None


def test_a_program_that_does_not_become_ready_is_an_error_and_ended() -> None:
    program = Program("hostile_sender", "--body", "none", "--url", "http://127.0.0.1:1", "--key=k")
    try:
        with pytest.raises(ProgramError, match="hostile_sender ended early with code 1"):
            program.wait_ready()
    finally:
        program.close()
