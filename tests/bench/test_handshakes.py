"""The table of handshakes compares the rounds of both programs."""

from bench.handshakes import CADDY, Cost, table
from bench.peers import WITH_TLS


def test_a_ratio_is_taken_within_each_round() -> None:
    ours = [Cost(WITH_TLS, number, 100.0 * (number + 1), 900.0) for number in range(3)]
    caddys = [Cost(CADDY, number, 50.0 * (number + 1), 800.0) for number in range(3)]
    rows = table([*ours, *caddys], "2.6").rows
    assert rows == [[WITH_TLS, "200", "2.00", "900"], [CADDY, "100", "1.00", "800"]]


def test_without_caddy_there_is_no_ratio() -> None:
    assert table([Cost(WITH_TLS, 0, 100.0, 900.0)], "").rows == [[WITH_TLS, "100", "–", "900"]]
