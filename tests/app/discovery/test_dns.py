"""The source `dns`: with a fake clock, and with a real DNS server."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import dns.asyncresolver
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.discovery.dns import (
    FAMILIES,
    MAX_WAIT_S,
    MIN_WAIT_S,
    Addresses,
    DnsSource,
    LookupFailed,
    SystemResolver,
    _is_usable,
    merge,
    wait_s,
)
from tests.app.discovery.clock import Clock, watching
from tests.services import DnsServer


@pytest.mark.parametrize(
    ("address", "usable"),
    [
        ("::1", True),
        ("64:ff9b::10.0.0.1", True),
        ("64:ff9b::169.254.169.254", False),
        ("2002:a9fe:a9fe::1", False),
        ("::169.254.169.254", False),
        ("::", False),
    ],
)
def test_ipv6_address_leads_to_the_ipv4_address_that_it_contains(
    address: str, usable: bool
) -> None:
    assert _is_usable(address) == usable


@dataclass
class Names:
    """Answers by family, as a test sets them."""

    answers: dict[str, Addresses | LookupFailed] = field(default_factory=dict)
    asked: int = 0

    def set(self, *addresses: str, ttl_s: float = 5.0) -> None:
        for family in FAMILIES:
            found = frozenset(a for a in addresses if (":" in a) == (family == "AAAA"))
            self.answers[family] = Addresses(found, ttl_s)

    def fail(self, *families: str) -> None:
        for family in families or FAMILIES:
            self.answers[family] = LookupFailed("no nameserver answered")

    async def resolve(self, family: str) -> Addresses:
        self.asked += 1
        answer = self.answers[family]
        if isinstance(answer, LookupFailed):
            raise answer
        return answer


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(names: Names, clock: Clock) -> DnsSource:
    return DnsSource("vllm.test", 8000, resolve=names.resolve, sleep=clock.sleep)


class TestTimes:
    async def test_addresses_of_both_families_are_listed_when_they_change(
        self, source: DnsSource, names: Names, clock: Clock
    ) -> None:
        names.set("10.0.0.1", "2001:db8::1", ttl_s=5)
        async with watching(source) as watched:
            await clock.asleep()
            assert watched.lists == [["http://10.0.0.1:8000", "http://[2001:db8::1]:8000"]]
            names.set("10.0.0.1", "10.0.0.2", ttl_s=5)
            await clock.advance(4.9)
            assert len(watched.lists) == 1
            await clock.advance(0.1)
            assert watched.last == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
            await clock.advance(60)
            assert len(watched.lists) == 2

    @pytest.mark.parametrize(("ttl_s", "waits_s"), [(0, 1.0), (1, 1.0), (5, 5.0), (3600, 30.0)])
    async def test_ttl_is_bounded(
        self, source: DnsSource, names: Names, clock: Clock, ttl_s: float, waits_s: float
    ) -> None:
        names.set("10.0.0.1", ttl_s=ttl_s)
        async with watching(source):
            await clock.advance(100)
        assert set(clock.sleeps) == {waits_s}

    @given(st.none() | st.floats(0, 1e9), st.integers(1, 100_000))
    def test_wait_is_always_within_the_bounds(self, ttl_s: float | None, failures: int) -> None:
        assert MIN_WAIT_S <= wait_s(ttl_s, failures) <= MAX_WAIT_S

    async def test_family_with_the_shorter_ttl_decides(
        self, source: DnsSource, names: Names, clock: Clock
    ) -> None:
        names.set("10.0.0.1", ttl_s=20)
        names.answers["AAAA"] = Addresses(frozenset({"2001:db8::1"}), 10)
        async with watching(source):
            await clock.asleep()
        assert clock.sleeps == [10]

    async def test_family_without_address_does_not_decide(
        self, source: DnsSource, names: Names, clock: Clock
    ) -> None:
        names.set("10.0.0.1", ttl_s=20)
        names.answers["AAAA"] = Addresses(frozenset(), 1)
        async with watching(source):
            await clock.asleep()
        assert clock.sleeps == [20]


class TestOutages:
    async def test_a_minute_without_answer_keeps_what_was_known(
        self, source: DnsSource, names: Names, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        names.set("10.0.0.1", "10.0.0.2")
        async with watching(source) as watched:
            await clock.asleep()
            names.fail()
            await clock.advance(65)
            assert len(watched.lists) == 1
            assert caplog.messages == [
                "discovery by DNS of vllm.test failed: no nameserver answered; servers that are "
                "kept: 2"
            ]
            # 5 s of the TTL, then longer and longer.
            assert clock.sleeps == [5, 1, 2, 4, 8, 16, 30]
            names.set("10.0.0.2")
            await clock.advance(MAX_WAIT_S)
            assert watched.last == ["http://10.0.0.2:8000"]
            assert caplog.messages[1:] == ["discovery by DNS of vllm.test works again; servers: 1"]

    async def test_each_reason_is_logged_once(
        self, source: DnsSource, names: Names, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        names.set("10.0.0.1")
        async with watching(source) as watched:
            await clock.asleep()
            assert not source.is_failing
            names.fail()
            await clock.advance(20)
            names.set()
            await clock.advance(60)
            assert source.is_failing
            assert len(watched.lists) == 1
            assert len(caplog.messages) == 2
            assert "no nameserver answered" in caplog.messages[0]
            assert "the name has no address" in caplog.messages[1]

    async def test_name_without_address_keeps_what_was_known(
        self, source: DnsSource, names: Names, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        names.set("10.0.0.1")
        async with watching(source) as watched:
            await clock.asleep()
            names.set()
            await clock.advance(60)
            assert len(watched.lists) == 1
            assert "the name has no address" in caplog.text

    async def test_nothing_is_listed_before_the_first_answer(
        self, source: DnsSource, names: Names, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        names.fail()
        async with watching(source) as watched:
            await clock.advance(3)
            assert watched.lists == []
            assert "no server is known yet" in caplog.text
            names.set("10.0.0.1")
            await clock.advance(MAX_WAIT_S)
            assert watched.lists == [["http://10.0.0.1:8000"]]

    async def test_family_that_fails_alone_keeps_its_addresses(
        self, source: DnsSource, names: Names, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        names.set("10.0.0.1", "2001:db8::1")
        async with watching(source) as watched:
            await clock.asleep()
            names.set("10.0.0.2")
            names.fail("AAAA")
            await clock.advance(5)
            assert watched.last == ["http://10.0.0.2:8000", "http://[2001:db8::1]:8000"]
            names.set("10.0.0.2")
            await clock.advance(5)
            assert watched.last == ["http://10.0.0.2:8000"]
        assert caplog.messages == []

    async def test_thousands_of_addresses_are_bounded(
        self, source: DnsSource, names: Names, clock: Clock
    ) -> None:
        names.set(*(f"10.0.{n // 250}.{n % 250}" for n in range(4000)))
        async with watching(source) as watched:
            await clock.asleep()
        assert len(watched.last) == 1000

    @given(
        st.lists(
            st.fixed_dictionaries(
                dict.fromkeys(FAMILIES, st.none() | st.frozensets(st.integers(0, 3), max_size=3))
            )
        )
    )
    def test_family_has_the_addresses_of_its_latest_answer(
        self, rounds: list[dict[str, frozenset[int] | None]]
    ) -> None:
        known: dict[str, frozenset[str]] = {}
        latest: dict[str, frozenset[str]] = {}
        for answers in rounds:
            given = {
                family: LookupFailed()
                if found is None
                else Addresses(frozenset(map(str, found)), 1)
                for family, found in answers.items()
            }
            known = merge(known, given)
            latest |= {f: a.found for f, a in given.items() if isinstance(a, Addresses)}
        assert known == latest


@pytest.mark.services
@pytest.mark.slow
class TestRealServer:
    async def test_addresses_come_and_go(self, dns_server: DnsServer, clock: Clock) -> None:
        dns_server.put("vllm.test", "10.0.0.1", "2001:db8::1")
        resolve = SystemResolver("vllm.test", dns_server.resolver())
        async with watching(DnsSource("vllm.test", 1, resolve=resolve, sleep=clock.sleep)) as seen:
            await clock.asleep()
            assert seen.last == ["http://10.0.0.1:1", "http://[2001:db8::1]:1"]
            assert clock.sleeps == [1]
            dns_server.put("vllm.test", "10.0.0.2")
            await clock.advance(1)
            await clock.asleep()
            assert seen.last == ["http://10.0.0.2:1"]

    async def test_more_addresses_than_a_datagram_holds(self, dns_server: DnsServer) -> None:
        addresses = [f"10.0.{n // 250}.{n % 250}" for n in range(600)]
        dns_server.put("vllm.test", *addresses)
        found = await SystemResolver("vllm.test", dns_server.resolver())("A")
        assert found.found == frozenset(addresses)

    async def test_search_domains_are_tried(self, dns_server: DnsServer) -> None:
        dns_server.put("vllm.default.svc.cluster.test", "10.0.0.1")
        resolver = dns_server.resolver("default.svc.cluster.test", "cluster.test", ndots=5)
        found = await SystemResolver("vllm.default.svc", resolver)("A")
        assert found.found == {"10.0.0.1"}

    async def test_absolute_name_is_not_searched(self, dns_server: DnsServer) -> None:
        dns_server.put("vllm.test.test", "10.0.0.1")
        resolve = SystemResolver("vllm.test.", dns_server.resolver("test"))
        with pytest.raises(LookupFailed, match="the name does not exist"):
            await resolve("A")

    async def test_family_without_address_is_an_answer(self, dns_server: DnsServer) -> None:
        dns_server.put("vllm.test", "10.0.0.1")
        assert not (await SystemResolver("vllm.test", dns_server.resolver())("AAAA")).found

    async def test_unusable_addresses_are_left_out(self, dns_server: DnsServer) -> None:
        dns_server.put("vllm.test", "10.0.0.1", "224.0.0.1")
        found = await SystemResolver("vllm.test", dns_server.resolver())("A")
        assert found.found == {"10.0.0.1"}

    async def test_addresses_of_this_machine_and_link_are_left_out(
        self, dns_server: DnsServer
    ) -> None:
        """Clouds have their credentials at 169.254.169.254; ::ffff:0.0.0.0 is this machine."""
        hostile = ("::ffff:0.0.0.0", "::ffff:169.254.169.254", "fe80::1", "169.254.169.254")
        dns_server.put("vllm.test", "10.0.0.1", "2001:db8::1", *hostile)
        resolve = SystemResolver("vllm.test", dns_server.resolver())
        assert (await resolve("A")).found == {"10.0.0.1"}
        assert (await resolve("AAAA")).found == {"2001:db8::1"}

    async def test_faults_of_a_server_are_told_apart(
        self, dns_server: DnsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("app.discovery.dns.LOOKUP_S", 0.2)
        resolver = dns_server.resolver()
        with pytest.raises(LookupFailed, match="the name does not exist"):
            await SystemResolver("other.test", resolver)("A")
        with pytest.raises(LookupFailed, match="failed or refused"):
            await SystemResolver("vllm.elsewhere", resolver)("A")
        dns_server.pause()
        with pytest.raises(LookupFailed, match=r"no nameserver answered within 0\.2 s"):
            await SystemResolver("here.test", resolver)("A")
        dns_server.resume()
        assert (await SystemResolver("here.test", resolver)("A")).found == {"127.0.0.1"}
        dns_server.stop()
        with pytest.raises(LookupFailed):
            await SystemResolver("here.test", resolver)("A")


async def test_machine_without_nameservers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unconfigured(dns.asyncresolver.Resolver):
        def __init__(self) -> None:
            super().__init__(filename="/nonexistent")

    monkeypatch.setattr("dns.asyncresolver.Resolver", Unconfigured)
    with pytest.raises(LookupFailed, match="names no nameserver"):
        await SystemResolver("vllm.test")("A")


@pytest.mark.parametrize("text", [b"nameserver gateway\n", b"# \xff\nnameserver 127.0.0.1\n"])
async def test_unreadable_resolv_conf_is_a_failure(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "resolv.conf"
    file.write_bytes(text)

    class Misconfigured(dns.asyncresolver.Resolver):
        def __init__(self) -> None:
            super().__init__(filename=str(file))

    monkeypatch.setattr("dns.asyncresolver.Resolver", Misconfigured)
    with pytest.raises(LookupFailed, match="the lookup failed"):
        await SystemResolver("vllm.test")("A")


@pytest.mark.parametrize("host", ["a" * 64 + ".test", ".".join(["a" * 60] * 5)])
async def test_impossible_name_is_a_failure(host: str) -> None:
    with pytest.raises(LookupFailed):
        await SystemResolver(host)("A")
