"""Keys as they are presented, and those of the configuration: who gets in, and what never does."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.auth.authenticator import Authenticator
from app.auth.presented_key import presented_key, read_any_key
from app.auth.principal import Principal, Role
from app.errors import InvalidApiKey
from app.head_facts import HeadFacts
from app.settings import NO_LIMITS, digest
from tests.app.auth.doors import Headers, bearer
from tests.app.auth.doors import door as door_for

KEY = b"sk-Canary-0123456789abcdef"
OTHER = b"sk-other-0123456789abcdef"


@pytest.fixture
def door() -> Authenticator:
    return door_for([digest(KEY), digest(OTHER)])


def let_in(door: Authenticator, headers: Headers) -> Principal:
    """Return who is let in without a look into the store."""
    principal = door.recall(headers, HeadFacts())
    assert principal is not None
    return principal


def refused(door: Authenticator, headers: Headers) -> InvalidApiKey:
    with pytest.raises(InvalidApiKey) as caught:
        door.recall(headers, HeadFacts())
    assert KEY.decode() not in str(caught.value)
    return caught.value


class TestAccepted:
    @pytest.mark.parametrize(
        "headers",
        [
            [(b"authorization", b"Bearer " + KEY)],
            [(b"authorization", b"bearer " + KEY)],
            [(b"authorization", b"BEARER " + KEY)],
            [(b"authorization", b"bEaReR " + KEY)],
            [(b"authorization", b"  Bearer   " + KEY + b"  ")],
            [(b"authorization", b"Bearer \t" + KEY + b"\t")],
            [(b"x-api-key", KEY)],
            [(b"x-api-key", b" " + KEY + b"\t")],
            [(b"host", b"h"), (b"x-api-key", KEY), (b"accept", b"*/*")],
        ],
    )
    def test_valid_key_is_accepted(self, door: Authenticator, headers: Headers) -> None:
        assert let_in(door, headers).id == f"key-{digest(KEY).hex()[:8]}"

    def test_same_key_in_both_headers_is_accepted(self, door: Authenticator) -> None:
        both = [*bearer(KEY), (b"x-api-key", KEY)]
        assert let_in(door, both) == let_in(door, bearer(KEY))

    def test_each_key_is_its_own_principal(self, door: Authenticator) -> None:
        assert let_in(door, bearer(KEY)) != let_in(door, bearer(OTHER))

    def test_principal_reveals_nothing_of_the_key(self, door: Authenticator) -> None:
        assert KEY.decode() not in repr(let_in(door, bearer(KEY)))
        assert KEY.decode()[:6] not in repr(let_in(door, bearer(KEY)))

    @pytest.mark.parametrize("headers", [[], bearer(KEY), bearer(b"wrong")])
    def test_clients_are_anonymous_when_auth_is_disabled(self, headers: Headers) -> None:
        door = door_for([digest(KEY)], enabled=False)
        assert let_in(door, headers) == Principal("anonymous", Role.CLIENT, NO_LIMITS)

    def test_authorization_headers_are_ignored_when_auth_is_disabled(self) -> None:
        door = door_for([], enabled=False)
        assert let_in(door, [(b"authorization", b"Basic xyz")]).id == "anonymous"


class TestRefused:
    @pytest.mark.parametrize(
        "headers",
        [
            [],
            [(b"host", b"h")],
            [(b"x-api-key", b"")],
            [(b"x-api-key", b"   ")],
            [(b"authorization", b"Bearer ")],
            [(b"authorization", b"Bearer")],
            [(b"authorization", b"Bearer    ")],
            [(b"proxy-authorization", b"Bearer " + KEY)],
            [(b"cookie", KEY)],
        ],
    )
    def test_missing_key_error_explains_how_to_send_one(
        self, door: Authenticator, headers: Headers
    ) -> None:
        error = refused(door, headers)
        assert error.reason == "missing"
        assert "Authorization: Bearer" in error.message
        assert "x-api-key" in error.message

    @pytest.mark.parametrize(
        "value",
        [b"Basic " + KEY, b"Token " + KEY, KEY, b"Bearer" + KEY, b"Bearer\t" + KEY, b"", b" "],
    )
    def test_only_the_bearer_scheme_is_read(self, door: Authenticator, value: bytes) -> None:
        error = refused(door, [(b"authorization", value)])
        assert "Bearer" in error.message

    @pytest.mark.parametrize(
        "headers",
        [
            [*bearer(KEY), (b"x-api-key", OTHER)],
            [(b"x-api-key", OTHER), *bearer(KEY)],
            [*bearer(KEY), *bearer(OTHER)],
            [(b"x-api-key", KEY), (b"x-api-key", OTHER)],
            [*bearer(KEY), (b"x-api-key", b"")],
            [(b"x-api-key", b""), *bearer(KEY)],
        ],
    )
    def test_two_different_keys_are_refused(self, door: Authenticator, headers: Headers) -> None:
        assert "two different" in refused(door, headers).message

    @pytest.mark.parametrize(
        "key",
        [
            KEY.lower(),
            KEY.upper(),
            KEY[:-1],
            KEY[1:],
            KEY + b"x",
            KEY + b"\x00",
            KEY + b"," + OTHER,
            KEY + b" " + KEY,
            b'"' + KEY + b'"',
            b"*",
            b"%",
            b"undefined",
            b"null",
            "sk-ключ-0123456789abcdef".encode(),
            b"\xff\xfe\x00" * 10,
        ],
    )
    def test_inexact_keys_are_refused(self, door: Authenticator, key: bytes) -> None:
        for headers in (bearer(key), [(b"x-api-key", key)]):
            assert refused(door, headers).reason == "invalid"

    @pytest.mark.parametrize(
        "key",
        [
            b"' OR '1'='1",
            b"' OR 1=1 --",
            b'"; DROP TABLE keys; --',
            b"' UNION SELECT digest FROM keys --",
            b"%' OR digest LIKE '%",
            KEY + b"' --",
        ],
    )
    def test_sql_in_a_key_is_just_an_invalid_key(self, door: Authenticator, key: bytes) -> None:
        assert refused(door, bearer(key)).message == "the API key is not valid"

    def test_a_digest_of_a_key_is_not_a_key(self, door: Authenticator) -> None:
        kept = digest(KEY)
        for key in (kept, kept.hex().encode(), kept.hex().upper().encode(), b"sha256:" + kept):
            for headers in (bearer(key), [(b"x-api-key", key)]):
                refused(door, headers)

    def test_the_public_id_of_a_key_is_not_a_key(self, door: Authenticator) -> None:
        refused(door, bearer(let_in(door, bearer(KEY)).id.encode()))

    def test_a_key_of_a_megabyte_is_refused(self, door: Authenticator) -> None:
        assert refused(door, bearer(b"x" * 1024 * 1024)).reason == "invalid"
        assert refused(door, [(b"x-api-key", KEY * 40_000)]).reason == "invalid"

    def test_a_key_that_shares_a_long_prefix_is_refused(self) -> None:
        """CVE-2026-35030: a cache was keyed on a token's beginning."""
        long = b"k" * 600
        door = door_for([digest(long)])
        let_in(door, bearer(long))
        refused(door, bearer(long[:-1] + b"x"))

    def test_every_key_is_refused_when_none_exist(self) -> None:
        door = door_for([])
        for headers in ([], bearer(KEY), bearer(b""), bearer(digest(b"").hex().encode())):
            refused(door, headers)

    def test_refusal_does_not_reveal_a_near_match(self, door: Authenticator) -> None:
        messages = {refused(door, bearer(key)).message for key in (KEY[:-1], b"x", KEY.lower())}
        assert len(messages) == 1

    @given(key=st.binary(max_size=80))
    @settings(max_examples=200, deadline=None)
    def test_random_tokens_are_refused(self, key: bytes) -> None:
        assume(key.strip() not in (KEY, OTHER))
        door = door_for([digest(KEY), digest(OTHER)])
        for headers in (
            bearer(key),
            [(b"x-api-key", key)],
            [(b"authorization", key)],
            [*bearer(KEY), (b"x-api-key", key)],
        ):
            refused(door, headers)

    @given(at=st.integers(0, len(KEY) - 1), byte=st.integers(0, 255))
    @settings(max_examples=100, deadline=None)
    def test_one_wrong_byte_is_enough(self, at: int, byte: int) -> None:
        wrong = KEY[:at] + bytes([byte]) + KEY[at + 1 :]
        assume(wrong != KEY)
        refused(door_for([digest(KEY)]), bearer(wrong))


names = st.sampled_from((b"authorization", b"x-api-key", b"accept"))
words = st.sampled_from((b"Bearer", b"bearer", b"Basic", b" ", b"\t", b"a", b"b", b"x" * 1025))
headers_of_all_kinds = st.lists(
    st.tuples(names, st.lists(words, max_size=4).map(b"".join)), max_size=3
)


@given(headers_of_all_kinds)
def test_usual_headers_are_read_as_all_others(headers: list[tuple[bytes, bytes]]) -> None:
    def outcome(read: Callable[[Headers], bytes]) -> bytes | str:
        try:
            return read(headers)
        except InvalidApiKey as error:
            return error.message

    assert outcome(presented_key) == outcome(read_any_key)
