"""The JSON scanner compared with msgspec: same verdicts and members, in any pieces."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.request_body.json_faults import (
    JsonFault,
    NestedTooDeep,
    NotAnObject,
    NotJson,
    RepeatedMember,
    TokenTooLong,
    TooManyMembers,
    TooManyValues,
)
from app.request_body.json_scan import (
    MAX_NAME,
    MAX_NUMBER,
    WINDOW,
    JsonBounds,
    JsonScanner,
    Kind,
    Member,
)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
WIDE = JsonBounds(members=1000, values=1_000_000)


def scan(body: bytes, cuts: list[int] | None = None, bounds: JsonBounds = WIDE) -> list[Member]:
    scanner = JsonScanner(bounds)
    places = [0, *sorted(cuts or []), len(body)]
    for start, end in itertools.pairwise(places):
        scanner.feed(memoryview(body)[start:end])
    return scanner.finish()


def fault(body: bytes, cuts: list[int] | None = None, bounds: JsonBounds = WIDE) -> JsonFault:
    with pytest.raises(JsonFault) as caught:
        scan(body, cuts, bounds)
    return caught.value


def every_cut(body: bytes) -> list[list[int]]:
    """No cut, one at each place, and all."""
    return [[], *([place] for place in range(len(body) + 1)), list(range(len(body)))]


# In a string, more than the end of a piece can cut.
ESCAPES = "\\\\" * 8 + "\\ud83d\\ude00" * 2 + '\\\\\\"u\\u0041' + "\\\\ud83d\\n"

# Values that differ in what a parser must look at; the length of a string is of little interest.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["[", "}", '"', "\\", '\\"', ",", "\\\\", "\U0001f600", "\x00", "true", "1"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=5)
GAPS = st.text(" \t\r\n", max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A JSON object as some client may write it."""
    text = json.dumps(
        draw(OBJECTS),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 0, "\t"])),
        separators=(draw(GAPS) + "," + draw(GAPS), draw(GAPS) + ":" + draw(GAPS)),
    )
    return (draw(GAPS) + text + draw(GAPS)).encode()


@st.composite
def with_cuts(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> tuple[bytes, list[int]]:
    body = draw(source)
    places = st.integers(0, len(body))
    return body, draw(st.lists(places, max_size=6) | st.just(list(range(len(body)))))


FRAGMENTS = st.sampled_from(
    b'[ ] { } , : " \\ \\u00e9 \\ud83d \\ude00 \\q 0 - . e + 1 tru null NaN \x00 \x1f \x7f \x80'
    b' \xc3 \xc3\xa9 \xed\xa0\x80 \xef\xbb\xbf [] {} "" ,, }} 01 1.5e-3 "a": \''.split(b" ")
) | st.binary(min_size=1, max_size=2)


@st.composite
def broken_bodies(draw: st.DrawFn) -> bytes:
    """A JSON object with some bytes changed, deleted, inserted, doubled or cut off."""
    body = draw(bodies())
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted((draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))))
        body = draw(
            st.sampled_from(
                [
                    body[:start] + draw(FRAGMENTS) + body[start:],
                    body[:start] + draw(FRAGMENTS) + body[start + 1 :],
                    body[:start] + body[start + 1 :],
                    body[:start] + body[end:],
                    body[:end] + body[start:],
                    body[:start],
                ]
            )
        )
    return body


def kind_of(value: object) -> Kind:
    if isinstance(value, str):
        return Kind.STRING
    if isinstance(value, list):
        return Kind.ARRAY
    if isinstance(value, dict):
        return Kind.OBJECT
    return Kind.LITERAL if value is None or isinstance(value, bool) else Kind.NUMBER


class Counts(msgspec.Struct):
    """Counts of a body's members, by a parser that builds it."""

    depth: int
    members: int
    values: int
    numbers: int

    @classmethod
    def of(cls, body: bytes) -> "Counts":
        objects: list[list[tuple[str, Any]]] = []

        def pairs(found: list[tuple[str, Any]]) -> tuple[list[tuple[str, Any]]]:
            objects.append(found)
            return (found,)

        value = json.loads(body, object_pairs_hook=pairs, parse_int=float)
        depth, values, numbers = cls._walk(value)
        return cls(depth, len(value[0]), values, numbers)

    @classmethod
    def _walk(cls, value: Any) -> tuple[int, int, int]:
        if isinstance(value, float):
            return 0, 0, 1
        inner: list[Any] = []
        names = 0
        if isinstance(value, tuple):
            inner = [element for _, element in value[0]]
            names = len(inner)
        elif isinstance(value, list):
            inner = value
        else:
            return 0, 1, 0
        counts = [cls._walk(element) for element in inner]
        return (
            1 + max((depth for depth, _, _ in counts), default=0),
            1 + names + sum(values for _, values, _ in counts),
            sum(numbers for _, _, numbers in counts),
        )


class TestMembers:
    @pytest.mark.slow
    @given(with_cuts(bodies()))
    def test_members_are_those_that_msgspec_finds_whatever_the_pieces(
        self, case: tuple[bytes, list[int]]
    ) -> None:
        body, cuts = case
        expected = _members.decode(body)
        try:
            members = scan(body, cuts)
        except RepeatedMember:
            folded = [name.casefold() for name in expected]
            assert len(set(folded)) < len(folded)
            return
        assert [member.name for member in members] == list(expected)
        for member in members:
            assert body[member.start : member.end] == bytes(expected[member.name]).strip()

    @pytest.mark.slow
    @given(with_cuts(bodies()))
    def test_kinds_and_items_are_those_of_the_values(self, case: tuple[bytes, list[int]]) -> None:
        body, cuts = case
        value = json.loads(body)
        try:
            members = scan(body, cuts)
        except RepeatedMember:
            return
        for member in members:
            of = value[member.name]
            assert member.kind is kind_of(of)
            assert member.items == (len(of) if isinstance(of, list) else 0)
            assert member.item_kind is (kind_of(of[0]) if isinstance(of, list) and of else None)

    @pytest.mark.parametrize(
        ("prompt", "items", "item_kind"),
        [
            ("[]", 0, None),
            ('["a"]', 1, Kind.STRING),
            ('["a, b", "[c]"]', 2, Kind.STRING),
            ("[1,22,333]", 3, Kind.NUMBER),
            ("[[1,2],[3],[]]", 3, Kind.ARRAY),
            ('[[["a"]],2,{"b":[1,2]}]', 3, Kind.ARRAY),
            ("[[]]", 1, Kind.ARRAY),
            ('[{"a":1,"b":2}]', 1, Kind.OBJECT),
            ("[null,true]", 2, Kind.LITERAL),
        ],
    )
    def test_prompts_are_counted_whatever_the_pieces(
        self, prompt: str, items: int, item_kind: Kind | None
    ) -> None:
        body = f' {{"model": "m", "prompt": {prompt} , "n": 1}}'.encode()
        for cuts in every_cut(body):
            member = scan(body, cuts)[1]
            assert (member.items, member.item_kind) == (items, item_kind)
            assert body[member.start : member.end] == prompt.encode()

    def test_values_longer_than_a_window_keep_their_spans(self) -> None:
        long = b"x" * (3 * WINDOW)
        values = [
            b'"%b"' % long,
            b"[%b]" % b",".join([b"12345"] * WINDOW),
            b'[["%b", "a"], {"%b": 1}]' % (long, long),
            b"[%b]" % b",".join([b"[]"] * 40_000),
            b"[%b]" % b",".join([b'{"a":[{}]}'] * 20_000),
        ]
        body = b"{%b}" % b",".join(b'"%d":%b' % item for item in enumerate(values))
        members = scan(body)
        assert [body[member.start : member.end] for member in members] == values
        assert [member.items for member in members] == [0, WINDOW, 2, 40_000, 20_000]


class TestVerdicts:
    @pytest.mark.slow
    @given(with_cuts(broken_bodies()))
    @example((b'{"a":"\\ud800"}', []))
    @example((b'{"a":["\\ud800"]}', [12]))
    def test_verdict_is_that_of_msgspec_whatever_the_pieces(
        self, case: tuple[bytes, list[int]]
    ) -> None:
        body, cuts = case
        try:
            body.decode()
            _members.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            fault(body, cuts)
            return
        names = [name for name, _ in json.loads(body, object_pairs_hook=lambda pairs: pairs)]
        if len({name.casefold() for name in names}) < len(names):
            assert isinstance(fault(body, cuts), RepeatedMember)
        else:
            assert [member.name for member in scan(body, cuts)] == names

    @pytest.mark.parametrize(
        "value",
        [
            *("", "01", "-", "1.", ".5", "+1", "1e", "1e+", "NaN", "Infinity", "-Infinity", "0x1"),
            *("tru", "nulll", "True", "'a'", "/**/1", "[1,]", "[,]", "[1 2]", "[1,,2]", '["a":1]'),
            *(f'"{ESCAPES}{end}"' for end in ("\\q", "\\ud83d", "\\udc00", "\\u00g", "\n")),
            *('{"a":1,}', '{"a"}', "{1:2}", '{"a" 1}', '{"a":}', "{,}", "[}", "{]", "[1}", "]"),
            *('"\\q"', '"\\u00g0"', '"\\ud800"', '"\\udc00"', '"\\ud800\\ud800"', '"\\ud800a"'),
            *('"\t"', '"\n"', '"\x00"', '"\x1f"', "\x0b1", "\xa01", "1\x00", "\ufeff1", "[tru]"),
            *("[[1,2],[3}]", '{"a":{"b":[}}}', '["\\x"]', '{"\\q":1}', "[1e5.5]", "[--1]", "[00]"),
        ],
    )
    def test_invalid_json_is_refused_in_any_pieces(self, value: str) -> None:
        body = f'{{"a":{value},"b":1}}'.encode()
        with pytest.raises(msgspec.DecodeError):
            _members.decode(body)
        for cuts in every_cut(body):
            assert isinstance(fault(body, cuts), NotJson)

    @pytest.mark.parametrize(
        "value",
        [
            *("-0", "0e0", "-0.0E-0", "1E400", "123456789012345678901234567890", "[0,-1.5e+3]"),
            *('"\\/\\b\\f\\n\\r\\t\\"\\\\"', '"\\u0000"', '"\\ud83d\\ude00"', '"\x7f"', '"\u2028"'),
            f'"{ESCAPES}"',
            *('"\U0001f600"', '[["\\ud83d\\ude00", "é"], {"é": "\\\\"}]', "{}", "[[],{}]", '""'),
        ],
    )
    def test_unusual_json_is_accepted_whatever_the_pieces(self, value: str) -> None:
        body = f'\r\n\t {{ "a"\n:\t{value}\r, "b" :1 }} \n'.encode()
        for cuts in every_cut(body):
            found = scan(body, cuts)[0]
            assert body[found.start : found.end] == value.encode()

    @pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"])
    def test_strings_are_utf8_at_any_depth(self, bad: bytes) -> None:
        for body in (b'{"%b":1}', b'{"a":"%b"}', b'{"a":["%b"]}', b'{"a":{"%b":1}}', b'{"a":1}%b'):
            for cuts in every_cut(body % bad):
                assert isinstance(fault(body % bad, cuts), NotJson)

    @pytest.mark.parametrize(
        "body",
        [b"", b" ", b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":[1,2]', b'{"a":"\\u00'],
    )
    def test_truncated_body_is_refused_at_its_end(self, body: bytes) -> None:
        for cuts in every_cut(body):
            scanner = JsonScanner(WIDE)
            for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
                scanner.feed(body[start:end])
            with pytest.raises(NotJson, match=f"unexpected end at byte {len(body)}$"):
                scanner.finish()

    @pytest.mark.parametrize(
        "body", [b"[]", b'"a"', b"1", b" -1", b"true", b"[1", b"\xef\xbb\xbf{}", b"x"]
    )
    def test_value_that_is_no_object_is_refused(self, body: bytes) -> None:
        assert isinstance(fault(body), NotAnObject)

    @pytest.mark.parametrize("body", [b"{}{}", b'{"a":1}}', b"{}\x00", b"{} 1"])
    def test_nothing_but_whitespace_follows_the_object(self, body: bytes) -> None:
        for cuts in every_cut(body):
            assert isinstance(fault(body, cuts), NotJson)


class TestRepeatedMembers:
    @pytest.mark.parametrize(
        ("first", "second"),
        [("a", "a"), ("a", "\\u0061"), ("model", "Model"), ("stra\u00dfe", "STRASSE"), ("", "")],
    )
    def test_names_that_differ_only_in_case_are_refused(self, first: str, second: str) -> None:
        body = f'{{"{first}":1,"n":2,"{second}":3}}'.encode()
        for cuts in every_cut(body):
            assert isinstance(fault(body, cuts), RepeatedMember)

    def test_names_of_nested_objects_are_not_compared(self) -> None:
        assert len(scan(b'{"a":{"b":1,"b":2,"a":3},"b":[{"b":1},{"b":2}]}')) == 2


class TestBounds:
    @pytest.mark.slow
    @given(with_cuts(bodies()))
    def test_bounds_hold_at_what_the_body_has_and_fail_at_one_less(
        self, case: tuple[bytes, list[int]]
    ) -> None:
        body, cuts = case
        counts = Counts.of(body)
        try:
            scan(body, cuts)
        except RepeatedMember:
            return
        has = msgspec.structs.asdict(counts)
        scan(body, cuts, JsonBounds(**has))
        over: dict[str, type[JsonFault]] = {
            "depth": NestedTooDeep,
            "members": TooManyMembers,
            "values": TooManyValues,
            "numbers": TooManyValues,
        }
        for name, kind in over.items():
            if has[name] > (name == "depth"):
                bounds = msgspec.structs.replace(JsonBounds(**has), **{name: has[name] - 1})
                assert isinstance(fault(body, cuts, bounds), kind)

    @pytest.mark.parametrize(
        "nest",
        [
            lambda n: b"[" * n + b"]" * n,
            lambda n: b'{"a":' * n + b"1" + b"}" * n,
            lambda n: b'[{"a":' * (n // 2) + b"[" * (n % 2) + b"]" * (n % 2) + b"}]" * (n // 2),
            lambda n: b"[[],[1],{}," + b"[" * (n - 1) + b"]" * (n - 1) + b",[]]",
        ],
    )
    def test_depth_counts_the_body_itself(self, nest: Callable[[int], bytes]) -> None:
        deep = b'{"a":%b,"b":[]}'
        for cuts in ([], [40], [90], [20, 70, 100], list(range(150))):
            assert len(scan(deep % nest(63), cuts, JsonBounds())) == 2
            assert isinstance(fault(deep % nest(64), cuts, JsonBounds()), NestedTooDeep)
            assert isinstance(fault(deep % nest(400), cuts, JsonBounds()), NestedTooDeep)

    def test_bound_is_enforced_before_the_body_ends(self) -> None:
        for body, kind in (
            (b'{"a":' + b"[" * 64, NestedTooDeep),
            (b"{" + b",".join(b'"%d":1' % n for n in range(257)), TooManyMembers),
            (b'{"a":[' + b'"",' * 100_001, TooManyValues),
            (b'{"a":[' + b"1," * 2_000_001, TooManyValues),
            (b'{"a":' + b"1" * (MAX_NUMBER + 1), TokenTooLong),
            (b'{"a":[' + b"1" * (MAX_NUMBER + 1), TokenTooLong),
            (b'{"' + b"a" * (MAX_NAME + 1), TokenTooLong),
        ):
            with pytest.raises(kind):
                JsonScanner(JsonBounds()).feed(body)

    def test_longest_number_and_longest_name(self) -> None:
        for cuts in ([], [MAX_NUMBER // 2], [WINDOW], [7, MAX_NUMBER - 3, MAX_NUMBER + 6]):
            for more, longest in ((0, True), (1, False)):
                number = b"1" * (MAX_NUMBER + more)
                name = b"a" * (MAX_NAME + more)
                for body in (b'{"a":%b}' % number, b'{"a":[0,%b]}' % number, b'{"%b":1}' % name):
                    if longest:
                        assert len(scan(body, cuts)) == 1
                    else:
                        assert isinstance(fault(body, cuts), TokenTooLong)

    def test_depth_bound_that_cannot_be_kept_is_refused(self) -> None:
        for depth in (0, 255):
            with pytest.raises(ValueError, match="1 to 254"):
                JsonBounds(depth=depth)


class TestMessages:
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"a":1,}', "the body is not JSON: syntax error at byte 7"),
            (b'{"a":[1,2,,3]}', "the body is not JSON: syntax error at byte 10"),
            (b'{"a":"\\q"}', "the body is not JSON: syntax error at byte 7"),
            (b'{"a":"\xff"}', "the body is not JSON: invalid UTF-8 at byte 6"),
            (b'{"a":1', "the body is not JSON: unexpected end at byte 6"),
            (b"[]", "the body must be a JSON object"),
            (b'{"a":[[]]}', "the body is nested over 2 levels deep"),
            (b'{"a":1,"b":2,"c":3,"d":4}', "the body has over 3 members"),
            (b'{"a":["","","","",""]}', "the body holds over 6 values"),
            (b'{"a":[1,2,3,4,5]}', "the body holds over 4 numbers"),
            (b'{"a":1,"a":2}', 'the member "a" is repeated'),
            (b'{"\\n":1,"\\u000a":2}', 'the member "\\n" is repeated'),
            (b'{"a":%b}' % (b"1" * 65537), "the body holds a number of over 65536 bytes"),
            (b'{"%b":1}' % (b"a" * 1025), "the body holds a name of over 1024 bytes"),
        ],
    )
    def test_fault_is_one_line_for_the_client(self, body: bytes, message: str) -> None:
        bounds = JsonBounds(depth=2, members=3, values=6, numbers=4)
        assert str(fault(body, bounds=bounds)) == message

    def test_a_long_name_is_shortened(self) -> None:
        message = str(fault(b'{"%b":1,"%b":2}' % ((b"a" * 1000,) * 2)))
        assert message == f'the member "{"a" * 63}…" is repeated'
