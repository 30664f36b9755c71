"""Rewriting bodies: only the necessary bytes change."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from app.request_body.body import READ_NAMES, ParsedBody, parse
from app.request_body.endpoint import BATCH, CHAT, COMPLETIONS
from app.request_body.field_rules import FieldRules
from app.request_body.rewrite import ConstantRewrite, Rewrite, as_bool, rewrite_body
from app.routing import Bounds
from app.settings import FieldSettings

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATING = (CHAT, COMPLETIONS)
# Every endpoint that says how many tokens it wants, and where.
OUTPUT_FIELDS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (BATCH, "max_tokens"),
    (BATCH, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]
# Where none is given, the engine would take all that the model can.
SET_WHERE_ABSENT = [(CHAT, "max_tokens"), (BATCH, "max_tokens"), (RESPONSES, "max_output_tokens")]
OTHER_ENDPOINTS = [
    "/v1/embeddings",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/v1/audio/transcriptions",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "",
]
# More digits than Python's own int() reads.
LONG = pytest.param("9" * 5000, id="endless")
LONG_TEXT = pytest.param('"' + "9" * 5000 + '"', id="endless text")
WIDE = Bounds(choices=4, output_tokens=100)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
# How vLLM reads a number of the request: JSON as Python has it, then pydantic.
_number = TypeAdapter(int | None)
_truth = TypeAdapter(bool | None)


def vllm_reads(value: str) -> int | None:
    """Return the number that vLLM takes a JSON value for; None where it refuses it."""
    try:
        return _number.validate_python(json.loads(value))
    except ValidationError:
        return None


def body_of(**members: str) -> bytes:
    """A JSON body of these members, given as JSON."""
    pairs = [f'"{name}":{value}' for name, value in {"model": '"demo"', **members}.items()]
    return ("{" + ",".join(pairs) + "}").encode()


RULES = FieldRules()
NOTHING = Rewrite()


def planned(endpoint: str, body: ParsedBody, bounds: Bounds) -> Rewrite:
    """Return what is decided where there are no rules on fields and no salt."""
    return rewrite_body(endpoint, body, bounds, RULES, None)


def send(endpoint: str, raw: bytes, bounds: Bounds = Bounds()) -> tuple[Rewrite, bytes]:  # noqa: B008
    """Return what is decided for a body, and what the engine gets."""
    body = parse(b"application/json", raw)
    plan = planned(endpoint, body, bounds)
    return plan, body.for_engine("demo", plan.changes)


def sent(endpoint: str, bounds: Bounds = Bounds(), **members: str) -> Any:  # noqa: B008
    """Return the body that the engine receives for these members."""
    return json.loads(send(endpoint, body_of(**members), bounds)[1])


class TestAskingForUsage:
    @pytest.mark.parametrize("endpoint", GENERATING)
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (None, {"include_usage": True}),
            ("null", {"include_usage": True}),
            ("{}", {"include_usage": True}),
            ('{"include_usage":false}', {"include_usage": True}),
            ('{"include_usage":null}', {"include_usage": True}),
            ('{"include_usage":0}', {"include_usage": True}),
            ('{"include_usage":"False"}', {"include_usage": True}),
            ('{ "include_usage" : false }', {"include_usage": True}),
            ('{"include_usage":true,"include_usage":false}', {"include_usage": True}),
            ('{"include_\\u0075sage":false}', {"include_usage": True}),
            ('{"continuous_usage_stats":true}', {"include_usage": True}),
            (
                '{"continuous_usage_stats":true,"include_usage":false}',
                {"include_usage": True},
            ),
            (
                '{"include_usage":false,"include_obfuscation":true,"x":{"include_usage":false}}',
                {
                    "include_usage": True,
                    "include_obfuscation": True,
                    "x": {"include_usage": False},
                },
            ),
        ],
    )
    def test_stream_is_made_to_report_usage_which_is_withheld(
        self, endpoint: str, options: str | None, expected: dict[str, Any]
    ) -> None:
        members = {"stream": "true"} | ({} if options is None else {"stream_options": options})
        plan, raw = send(endpoint, body_of(**members))
        assert json.loads(raw)["stream_options"] == expected
        assert plan.withhold_usage

    @pytest.mark.parametrize("endpoint", GENERATING)
    @pytest.mark.parametrize(
        "options",
        [
            '{"include_usage":true}',
            '{"include_usage":true,"continuous_usage_stats":true,"x":1}',
            '{"include_usage":false,"include_usage":true}',
            '{"include_usage":1}',
            '{"include_usage":"yes"}',
            '{"include_\\u0075sage":true}',
            # Invalid: the engine refuses them in its own words.
            "true",
            "false",
            "5",
            "0",
            '""',
            '"include_usage"',
            "[]",
            '["include_usage"]',
            '{"include_usage":5}',
            '{"include_usage":[]}',
            '{"include_usage":{}}',
            '{"include_usage":"maybe"}',
        ],
    )
    def test_include_usage_of_the_client_and_invalid_options_are_forwarded(
        self, endpoint: str, options: str
    ) -> None:
        raw = body_of(stream="true", stream_options=options)
        plan, engine_gets = send(endpoint, raw)
        assert engine_gets is raw
        assert not plan.withhold_usage

    @pytest.mark.parametrize("endpoint", GENERATING)
    @pytest.mark.parametrize("stream", [None, "null", "false", "0", '"false"', "[]", '"stream"'])
    @pytest.mark.parametrize("options", [None, "null", "{}", '{"include_usage":false}'])
    def test_plain_request_needs_no_include_usage(
        self, endpoint: str, stream: str | None, options: str | None
    ) -> None:
        """vLLM refuses stream options without a stream: adding them would break the request."""
        members = {"stream": stream, "stream_options": options}
        raw = body_of(**{name: value for name, value in members.items() if value is not None})
        plan, engine_gets = send(endpoint, raw)
        assert engine_gets is raw
        assert plan == NOTHING

    @pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES, *OTHER_ENDPOINTS])
    def test_other_dialects_need_no_include_usage(self, endpoint: str) -> None:
        raw = body_of(stream="true", stream_options='{"include_usage":false}', n="2")
        assert send(endpoint, raw) == (NOTHING, raw)

    @pytest.mark.parametrize(
        ("raw", "stream"),
        [
            (b'{"model":"demo","stream":true}', True),
            (b'{"model":"demo","stream" :\n true }', True),
            (b'{"model":"demo","str\\u0065am":true}', True),
            (b'{"model":"demo","stream":1}', True),
            (b'{"model":"demo","stream":"True"}', True),
            (b'{"model":"demo","stream":null}', False),
            (b'{"model":"demo","x":{"stream":true}}', False),
            (b'{"model":"demo"}', False),
        ],
    )
    def test_stream_is_detected_as_the_engine_reads_it(self, raw: bytes, stream: bool) -> None:
        assert (as_bool(NOTHING.value(parse(b"", raw), "stream")) is True) is stream


WORDS = st.sampled_from(["0", "1", "on", "off", "t", "f", "true", "false", "y", "n", "yes", "no"])


@given(
    value=st.sampled_from(
        ["null", "true", "false", "1", "0", "1.0", "0.0", "-0", "10e-1", "1e0", "2", "-1", "0.5"]
    )
    | st.sampled_from(["1e400", "[]", "[1]", "{}", '""', '"1.0"', '" true"', '"tr\\u0075e"'])
    | st.sampled_from(["9" * 30, "1.00000000000000000001", '"2"', '"yes "', '"K"'])
    | st.tuples(WORDS, st.sampled_from([str.lower, str.upper, str.title])).map(
        lambda pair: json.dumps(pair[1](pair[0]))
    )
)
@settings(max_examples=60, deadline=None)
def test_bool_is_read_as_the_engine_reads_it(value: str) -> None:
    """Else a stream would go unmetered because of how its client writes `true`."""
    try:
        read = _truth.validate_python(json.loads(value))
    except ValidationError:
        read = None
    assert (as_bool(value.encode()) is True) is (read is True)
    options = f'{{"include_usage":{value}}}'
    plan, _ = send(CHAT, body_of(stream="true", stream_options=options))
    assert plan.withhold_usage is (read is False or value == "null")


class TestChoices:
    @pytest.mark.parametrize("endpoint", GENERATING)
    @pytest.mark.parametrize(
        ("members", "one"),
        [
            ({}, True),
            ({"n": "1"}, True),
            ({"n": "null"}, True),
            ({"n": "2"}, False),
            ({"n": '"2"'}, False),
            ({"n": "1e1"}, False),
            ({"prompt": '"[1]"'}, True),
            ({"prompt": '["a","b"]'}, False),
            ({"prompt": " [ [1], [2] ]"}, False),
            ({"prompt": '["a","b"]', "n": "1"}, False),
            ({"prompt_embeds": '"AAAA"'}, True),
            ({"prompt_embeds": '["AAAA","BBBB"]'}, False),
            ({"prompt": '"x"', "prompt_embeds": '"AAAA"'}, False),
        ],
    )
    @pytest.mark.parametrize("stream", ["true", "false"])
    def test_response_with_several_choices_is_detected(
        self, endpoint: str, members: dict[str, str], one: bool, stream: str
    ) -> None:
        plan, _ = send(endpoint, body_of(stream=stream, **members), WIDE)
        assert plan.one_choice is one

    @pytest.mark.parametrize("endpoint", GENERATING)
    @pytest.mark.parametrize("n", ["5", "5.0", '"5"', '" 5 "', "5e0", "1e400", LONG])
    def test_number_of_choices_is_lowered_to_the_bound(self, endpoint: str, n: str) -> None:
        assert sent(endpoint, Bounds(choices=4), n=n)["n"] == 4

    @pytest.mark.parametrize("endpoint", GENERATING)
    @pytest.mark.parametrize("n", ["null", "1", "4", "4.0", '"4"', "0", "-5", "true", "[9]", '"x"'])
    def test_other_numbers_are_kept(self, endpoint: str, n: str) -> None:
        raw = body_of(n=n)
        assert send(endpoint, raw, Bounds(choices=4))[1] is raw

    def test_absent_number_of_choices_is_not_set(self) -> None:
        raw = body_of()
        assert send(CHAT, raw, Bounds(choices=4)) == (NOTHING, raw)

    @pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES, *OTHER_ENDPOINTS])
    def test_other_endpoints_have_one(self, endpoint: str) -> None:
        raw = body_of(n="99", prompt="[1]")
        assert send(endpoint, raw, Bounds(choices=4)) == (NOTHING, raw)


class TestOutputTokens:
    @pytest.mark.parametrize(("endpoint", "name"), OUTPUT_FIELDS)
    @pytest.mark.parametrize(
        "value",
        [
            "101",
            "101.0",
            "1.01e2",
            "1e30",
            "1e400",
            "9" * 30,
            LONG,
            '"101"',
            '"101.0"',
            '" 101\\n"',
            '"+101"',
            '"1_000"',
            '"\\u0031\\u0030\\u0031"',
            LONG_TEXT,
        ],
    )
    def test_output_limit_is_lowered_to_the_bound(
        self, endpoint: str, name: str, value: str
    ) -> None:
        bounds = Bounds(output_tokens=100)
        assert sent(endpoint, bounds, **{name: value}) == {"model": "demo", name: 100}

    @pytest.mark.parametrize(("endpoint", "name"), OUTPUT_FIELDS)
    @pytest.mark.parametrize(
        "value",
        [
            "100",
            "100.0",
            "1",
            "0",
            "-1",
            "-1e400",
            '"100"',
            '"nan"',
            '"NaN"',
            '"-inf"',
            '"many"',
            '""',
            "true",
            "false",
            "[]",
            "[101]",
            "{}",
            '{"max_tokens":101}',
        ],
    )
    def test_invalid_output_limit_is_left_to_the_engine(
        self, endpoint: str, name: str, value: str
    ) -> None:
        """But vLLM before 0.10 takes a max_completion_tokens of 0 for none."""
        raw = body_of(**{name: value})
        found = send(endpoint, raw, Bounds(output_tokens=100))[1]
        if (name, value) == ("max_completion_tokens", "0"):
            assert found == b'{"max_tokens":100,' + raw[1:]
        else:
            assert found is raw

    @pytest.mark.parametrize(("endpoint", "name"), SET_WHERE_ABSENT)
    @pytest.mark.parametrize("null", [True, False])
    def test_absent_output_limit_is_set_to_the_bound(
        self, endpoint: str, name: str, null: bool
    ) -> None:
        members = {name: "null"} if null else {}
        assert sent(endpoint, Bounds(output_tokens=100), **members) == {"model": "demo", name: 100}

    def test_one_of_two_names_is_enough(self) -> None:
        for members in (
            {"max_tokens": "5"},
            {"max_completion_tokens": "5"},
            {"max_tokens": "null", "max_completion_tokens": "5"},
            {"max_tokens": "5", "max_completion_tokens": "null"},
        ):
            raw = body_of(**members)
            assert send(CHAT, raw, Bounds(output_tokens=100))[1] is raw

    def test_null_output_limits_count_as_absent(self) -> None:
        read = sent(
            CHAT, Bounds(output_tokens=100), max_tokens="null", max_completion_tokens="null"
        )
        assert read == {"model": "demo", "max_tokens": 100, "max_completion_tokens": None}

    def test_both_names_are_bounded(self) -> None:
        members = {"max_tokens": "101", "max_completion_tokens": "102"}
        read = sent(CHAT, Bounds(output_tokens=100), **members)
        assert read == {"model": "demo", "max_tokens": 100, "max_completion_tokens": 100}

    def test_completions_have_a_low_default_of_their_own(self) -> None:
        raw = body_of(prompt='"x"')
        assert send(COMPLETIONS, raw, Bounds(output_tokens=100)) == (NOTHING, raw)

    def test_a_bound_below_that_default_is_set(self) -> None:
        read = sent(COMPLETIONS, Bounds(output_tokens=10), prompt='"x"')
        assert read == {"model": "demo", "prompt": "x", "max_tokens": 10}

    def test_a_completion_of_null_tokens_has_no_default(self) -> None:
        """vLLM's 16 are for a request without the member; null is all that the model can."""
        read = sent(COMPLETIONS, Bounds(output_tokens=100), max_tokens="null")
        assert read == {"model": "demo", "max_tokens": 100}

    def test_messages_without_max_tokens_are_left_to_the_engine(self) -> None:
        for members in ({}, {"max_tokens": "null"}):
            raw = body_of(**members)
            assert send(MESSAGES, raw, Bounds(output_tokens=100)) == (NOTHING, raw)

    @pytest.mark.parametrize("endpoint", OTHER_ENDPOINTS)
    def test_other_endpoints_have_no_output_to_bound(self, endpoint: str) -> None:
        raw = body_of(max_tokens="101", max_output_tokens="101")
        assert send(endpoint, raw, Bounds(output_tokens=100)) == (NOTHING, raw)

    @pytest.mark.parametrize(("endpoint", "name"), OUTPUT_FIELDS)
    def test_without_a_bound_nothing_changes(self, endpoint: str, name: str) -> None:
        raw = body_of(n="9999", **{name: "9999999"})
        assert send(endpoint, raw)[1] is raw


# JSON values, among them all that pydantic takes for a number.
DIGITS = st.sampled_from([*"0123456789_+-.eE ", "\\n", "\\u0031", "\u00a0"])
NUMERALS = st.lists(DIGITS, max_size=8).map(lambda digits: f'"{"".join(digits)}"')
NUMBERS = (
    st.integers().map(str)
    | st.integers(90, 110).map(str)
    | st.integers(90, 110).map(lambda number: f'"{number}"')
    | st.floats(allow_nan=False, allow_infinity=False).map(json.dumps)
    | st.floats(90, 110).map(json.dumps)
    | st.integers(-2, 12).map(lambda exponent: f"11e{exponent}")
    | NUMERALS
)
VALUES = NUMBERS | st.sampled_from(["null", "true", "false", "[101]", "{}", '"101abc"', '"0x65"'])


@pytest.mark.parametrize(("endpoint", "name"), [*OUTPUT_FIELDS, (CHAT, "n"), (COMPLETIONS, "n")])
@given(value=VALUES)
@example(value='"1_01"')
@example(value='"0101.000"')
@settings(max_examples=60, deadline=None)
def test_no_number_that_the_engine_accepts_exceeds_the_bound(
    endpoint: str, name: str, value: str
) -> None:
    raw = body_of(**{name: value})
    _, engine_gets = send(endpoint, raw, Bounds(choices=100, output_tokens=100))
    kept = bytes(_members.decode(engine_gets)[name]).decode()
    before, after = vllm_reads(value), vllm_reads(kept)
    if after is not None:
        assert after <= 100
    if before is not None:
        assert after == min(before, 100)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
# Numbers that would not survive being read and written.
EXACT = st.sampled_from(["1e400", "-0", "0.10", "9" * 40, '"\\u00e9\\/"', '{ "b":1 , "a":[ ] }'])
TOUCHED = {
    "model", "n", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens"
}  # fmt: skip


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings"])
@given(
    others=st.dictionaries(TEXT.filter(lambda name: name not in TOUCHED), JSON, max_size=4),
    exact=EXACT,
    touched=st.dictionaries(
        st.sampled_from(sorted(TOUCHED - {"model", "stream_options"})), NUMBERS, max_size=3
    ),
    stream=st.booleans(),
    ascii_only=st.booleans(),
    served=st.sampled_from(["demo", "other"]),
)
@settings(max_examples=40, deadline=None)
def test_other_members_keep_their_bytes_and_order(
    endpoint: str,
    others: dict[str, Any],
    exact: str,
    touched: dict[str, str],
    stream: bool,
    ascii_only: bool,
    served: str,
) -> None:
    given = {name: json.dumps(value, ensure_ascii=ascii_only) for name, value in others.items()}
    given |= {"model": '"demo"', "stream": json.dumps(stream), "exact": exact, **touched}
    # Names that differ in case only are refused.
    assume(len({name.casefold() for name in given}) == len(given))
    assume(all(name == name.casefold() or name.casefold() not in READ_NAMES for name in given))
    pairs = [f"{json.dumps(name)} : {value}" for name, value in given.items()]
    body = parse(b"", ("{" + " , ".join(pairs) + "}").encode())
    plan = planned(endpoint, body, WIDE)
    members = _members.decode(body.for_engine(served, plan.changes))
    assert [name for name in members if name in given] == list(given)
    assert set(members) - set(given) <= TOUCHED
    for name, value in given.items():
        if name not in plan.changes and name != "model":
            assert bytes(members[name]) == value.encode()
    assert bytes(members["model"]) == f'"{served}"'.encode()


def test_unknown_stream_options_keep_their_bytes() -> None:
    options = '{"x":1e400,"include_usage":false,"y":{ "a" : 0.10 },"continuous_usage_stats":true}'
    _, raw = send(CHAT, body_of(stream="true", stream_options=options, z="-0"))
    expected = '{"x":1e400,"include_usage":true,"y":{ "a" : 0.10 }}'
    assert raw == body_of(stream="true", stream_options=expected, z="-0")


def test_one_plan_serves_every_engine_that_is_tried() -> None:
    body = parse(b"", body_of(stream="true", n="9"))
    plan = planned(CHAT, body, Bounds(choices=2))
    for name in ("a", "b", "demo"):
        expected = {
            "model": name,
            "stream": True,
            "n": 2,
            "stream_options": {"include_usage": True},
        }
        assert json.loads(body.for_engine(name, plan.changes)) == expected


MEMBERS = st.dictionaries(
    st.sampled_from(
        [
            "messages", "stream", "stream_options", "n", "best_of", "prompt", "encoding_format",
            "max_tokens", "cache_salt", "priority", "Temperature", "user",
        ]
    ),
    st.sampled_from(["null", "true", "2", '"bytes_only"', '["a","b"]', "{}"]),
    max_size=4,
)  # fmt: skip
RULES_OF_ALL_KINDS = st.builds(
    FieldSettings,
    allow=st.lists(st.just("priority"), max_size=1),
    deny=st.lists(st.just("user"), max_size=1),
    max=st.dictionaries(st.just("temperature"), st.just(1.0), max_size=1),
    # With a forced field, and most output bounds, no rewrite is constant.
    force=st.sampled_from([{}, {}, {}, {"seed": 7}]),
)


@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings", "/tokenize"]),
    members=MEMBERS,
    fields=RULES_OF_ALL_KINDS,
    output=st.sampled_from([None, None, None, 100]),
    salt=st.sampled_from([None, b'"salt"']),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_constant_rewrite_is_that_of_each_body_it_holds_for(
    endpoint: str,
    members: dict[str, str],
    fields: FieldSettings,
    output: int | None,
    salt: bytes | None,
) -> None:
    body = parse(b"application/json", body_of(**members))
    rules, bounds = FieldRules(fields), Bounds(output_tokens=output)
    constant = ConstantRewrite.of(endpoint, bounds, rules, salt)
    assume(constant is not None and constant.holds_for(body))
    assert constant is not None

    rewrite = rewrite_body(endpoint, body, bounds, rules, salt)
    assert msgspec.structs.replace(constant.rewrite, opening=b"") == rewrite
    opened = body.for_engine("demo", rewrite.changes, opening=constant.rewrite.opening)
    assert opened == body.for_engine("demo", rewrite.changes)


def test_most_requests_have_the_constant_rewrite() -> None:
    constant = ConstantRewrite.of(CHAT, Bounds(), RULES, b'"salt"')
    assert constant is not None

    for members in ({"messages": "[]"}, {"messages": "[]", "max_tokens": "5", "user": '"a"'}):
        assert constant.holds_for(parse(b"", body_of(**members)))
    for members in ({"stream": "true"}, {"n": "2"}, {"priority": "1"}):
        assert not constant.holds_for(parse(b"", body_of(**members)))
