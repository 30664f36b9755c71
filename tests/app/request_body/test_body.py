"""Parsing the model from a body, and renaming it without touching the rest."""

import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.errors import BadRequest, Dialect, InvalidJson, MissingModel
from app.request_body.body import (
    MAX_MODEL_FIELD,
    MAX_SHORT,
    READ_NAMES,
    SHORT_NAMES,
    BodyScan,
    ParsedBody,
    parse,
)

JSON = b"application/json"
FORM = b"multipart/form-data; boundary=XX"


def read(raw: bytes | str) -> ParsedBody:
    return parse(JSON, raw.encode() if isinstance(raw, str) else raw)


def read_in_pieces(raw: bytes, size: int) -> ParsedBody:
    body_scan = BodyScan(JSON)
    for start in range(0, len(raw), size):
        body_scan.feed(raw[start : start + size])
    return body_scan.finish(raw)


def member(name: str, value: bytes, extra: str = "") -> bytes:
    """One part of a form."""
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(*parts: bytes, end: bytes = b"--XX--\r\n") -> bytes:
    return b"".join(parts) + end


AUDIO = member("file", b"RIFF\x00\x01\xff--X\r\n\r\nmodel", '; filename="a.wav"')


class TestFinding:
    @pytest.mark.parametrize(
        "raw",
        [
            '{"model":"demo"}',
            '{"model":"demo","messages":[]}',
            '{"messages":[],"model":"demo"}',
            '{"messages":[],"model":"demo","n":1}',
            ' \r\n\t{ "model"\n:\t"demo" } \n',
            '{"\\u006dodel":"demo"}',
            '{"model":"d\\u0065mo"}',
            '{"metadata":{"model":"inner"},"model":"demo"}',
            '{"model":"demo","metadata":{"model":"inner"}}',
            '{"model":"demo","tools":[{"model":"inner"}],"x":"\\"model\\":\\"inner\\""}',
            '{"model":"demo","model ":"inner"}',
        ],
    )
    def test_model_is_found_at_any_position_of_the_outermost_object(self, raw: str) -> None:
        assert read(raw).model == "demo"

    def test_nested_model_member_alone_is_a_missing_model(self) -> None:
        with pytest.raises(MissingModel):
            read('{"metadata":{"model":"inner"}}')

    @pytest.mark.parametrize(
        "raw",
        [
            '{"model":"first","model":"demo"}',
            '{"model":"demo","model":"demo"}',
            '{"model": "demo", "model": "demo"}',
            '{"model":null,"model":"demo"}',
            '{"model":"first","n":1,"\\u006dodel":"demo"}',
            '{"model":"demo","n":1,"n":2}',
            '{"model":"demo","x":1, "x":2}',
        ],
    )
    def test_repeated_member_is_refused(self, raw: str) -> None:
        with pytest.raises(InvalidJson, match="repeated"):
            read(raw)

    @pytest.mark.parametrize(
        "names",
        [
            ("Model",),
            ("Max_Tokens",),
            ("STREAM",),
            ("extra", "Extra"),
            ("\u212aeep", "keep"),  # the Kelvin sign
            ("\u017ftream",),  # a long s
        ],
    )
    def test_name_differing_only_in_case_is_refused(self, names: tuple[str, ...]) -> None:
        for ascii_only in (True, False):
            with pytest.raises(InvalidJson, match="repeated"):
                read(json.dumps({"model": "m", **dict.fromkeys(names, 1)}, ensure_ascii=ascii_only))

    def test_unknown_name_in_any_case_passes(self) -> None:
        assert read('{"model":"demo","dataSources":[1]}').for_engine("demo")

    @pytest.mark.parametrize("name", ["模型", "a/b:c@d", 'say "hi"', "\\", "\t", "😀", "x" * 5000])
    def test_any_text_is_a_valid_model_name(self, name: str) -> None:
        assert read(json.dumps({"model": name})).model == name
        assert read(json.dumps({"model": name}, ensure_ascii=False)).model == name

    @pytest.mark.parametrize("content_type", [b"", b"text/plain", b"application/json; charset=x"])
    def test_body_that_is_no_form_is_parsed_as_json(self, content_type: bytes) -> None:
        assert parse(content_type, b'{"model":"demo"}').model == "demo"


class TestRenaming:
    def test_body_with_the_served_name_is_unchanged(self) -> None:
        raw = b' {"model" : "demo" , "x":1e400}\n'
        assert read(raw).for_engine("demo") is raw

    @pytest.mark.parametrize(
        "value",
        [
            "123456789012345678901234567890123456789012345678901234567890",
            "-0",
            "-0.0",
            "0.10",
            "1e400",
            "-1E+400",
            "1e-400",
            "3.141592653589793238462643383279",
            '"\\u00e9\\ud83d\\ude00\\/\\b"',
            '"é😀\u2028"',
            '{"b" : 1 ,"a": [ 1,2 ],  "b":2}',
            '[ { "model" : "demo" } ]',
            "[\n1 ,\t2 ]",
            '""',
            "{}",
            "null",
            "true",
        ],
    )
    def test_every_other_value_keeps_its_bytes(self, value: str) -> None:
        body = read(f'{{"before":{value},"model":"demo","after":{value}}}')
        expected = f'{{"before":{value},"model":"served","after":{value}}}'
        assert body.for_engine("served") == expected.encode()

    def test_renaming_keeps_the_order_of_members(self) -> None:
        body = read('{"z":1,"model":"demo","a":2,"m":3}')
        assert list(json.loads(body.for_engine("served"))) == ["z", "model", "a", "m"]

    def test_nested_model_member_is_not_renamed(self) -> None:
        body = read('{"metadata":{"model":"demo"},"model":"demo"}')
        assert json.loads(body.for_engine("served")) == {
            "metadata": {"model": "demo"},
            "model": "served",
        }

    @pytest.mark.parametrize("name", ['"},"n":99,"x":{"', "\\", "\n", "é", "var/my model"])
    def test_served_name_is_encoded_as_one_json_string(self, name: str) -> None:
        body = read('{"model":"demo","n":1}')
        assert json.loads(body.for_engine(name)) == {"model": name, "n": 1}

    def test_body_can_be_renamed_for_several_engines(self) -> None:
        body = read('{"model":"demo","n":1}')
        assert body.for_engine("a") == b'{"model":"a","n":1}'
        assert body.for_engine("b") == b'{"model":"b","n":1}'
        assert body.for_engine("demo") == b'{"model":"demo","n":1}'


class TestRefusedJson:
    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b" ",
            b"{",
            b"}",
            b'{"model":"demo"',
            b'{"model":"demo",}',
            b'{"model":"demo"}x',
            b'{"model":"demo"}{}',
            b"{'model':'demo'}",
            b'{model:"demo"}',
            b'{"model":"demo","x":NaN}',
            b'{"model":"demo","x":Infinity}',
            b'{"model":"demo","x":-Infinity}',
            b'{"model":"demo","x":01}',
            b'{"model":"demo","x":.5}',
            b'{"model":"demo","x":+1}',
            b'{"model":"demo","x":tru}',
            b'{"model":"demo","x":[1,]}',
            b'{"model":"demo","x":"a\nb"}',
            b'{"model":"demo","x":"\\q"}',
            b'{"model":"demo"/*c*/}',
            b'{"model":"demo"}\x00',
            b"\x00\x01\x02",
            b"\x1f\x8b\x08gzip",
        ],
    )
    def test_invalid_syntax_is_invalid_json(self, raw: bytes) -> None:
        with pytest.raises(InvalidJson) as caught:
            read(raw)
        assert "\n" not in caught.value.message
        assert json.loads(caught.value.body(Dialect.OPENAI))["error"]["code"] == "invalid_json"

    @pytest.mark.parametrize(
        "raw", [b"[]", b'["model"]', b"1", b'"model"', b"null", b"true", b'[{"model":"demo"}]']
    )
    def test_value_that_is_no_object_is_invalid_json(self, raw: bytes) -> None:
        with pytest.raises(InvalidJson, match="must be a JSON object"):
            read(raw)

    @pytest.mark.parametrize(
        "raw",
        [
            b"[" * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"model":"demo","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"model":"demo","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
            b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ],
        ids=["open", "array", "member", "objects", "model"],
    )
    def test_deep_nesting_is_refused_without_a_crash(self, raw: bytes) -> None:
        with pytest.raises(BadRequest):
            read(raw)

    @pytest.mark.parametrize(
        "raw",
        [
            b'{"model":"demo","x":"\xff"}',
            b'{"model":"demo","\xff":1}',
            b'{"model":"demo","x":"\xc3"}',
            b'{"model":"demo","x":"\xed\xa0\x80"}',
            b'{"model":"demo","x":["\xff"]}',
        ],
    )
    def test_bytes_that_are_not_utf8_are_invalid_json(self, raw: bytes) -> None:
        with pytest.raises(InvalidJson):
            read(raw)

    @pytest.mark.parametrize(
        "raw", [b'{"model":"\xff"}', b'{"model":"demo\xc3"}', b'{"model":"\xed\xa0\x80"}']
    )
    def test_a_model_that_is_not_utf8_is_a_bad_request(self, raw: bytes) -> None:
        with pytest.raises(BadRequest):
            read(raw)

    @pytest.mark.parametrize(
        "value",
        [
            rb"\ud800",
            rb"a\udc00b",
            rb"\ud800\u0041",
            rb"\ud83d\ude00\ude00",
            rb"\\\ud800",
            rb"\ud800\n",
        ],
    )
    def test_a_lone_surrogate_in_another_value_is_refused_in_words(self, value: bytes) -> None:
        """No engine could put it into UTF-8 for its tokenizer."""
        raw = b'{"model":"demo","x":"' + value + b'"}'
        for size in (len(raw), 1, 5, 24):
            with pytest.raises(InvalidJson, match="half of a surrogate pair"):
                read_in_pieces(raw, size)
        with pytest.raises(InvalidJson, match="half of a surrogate pair"):
            read(raw)

    @pytest.mark.parametrize("charset", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
    def test_json_in_a_charset_that_vllm_reads_is_forwarded_in_utf8(self, charset: str) -> None:
        text = '{"model":"demo","prompt":"語"}'
        body = read(text.encode(charset))
        assert (body.model, body.raw) == ("demo", text.encode())

    @pytest.mark.parametrize("raw", [rb'{"model":"\ud800"}', rb'{"model":"a\udc00b"}'])
    def test_a_lone_surrogate_in_the_model_is_a_bad_request(self, raw: bytes) -> None:
        with pytest.raises(BadRequest):
            read(raw)

    @pytest.mark.parametrize(
        "value",
        ["null", '""', "1", "1.5", "true", "false", "[]", '["demo"]', "{}", '{"id":"demo"}'],
    )
    def test_model_that_is_no_string_is_missing(self, value: str) -> None:
        with pytest.raises(MissingModel) as caught:
            read(f'{{"model":{value}}}')
        assert caught.value.param == "model"

    def test_absent_model_is_missing(self) -> None:
        with pytest.raises(MissingModel, match="you must provide a model parameter"):
            read("{}")


class TestForm:
    @pytest.mark.parametrize(
        "content_type",
        [
            FORM,
            b"Multipart/Form-Data; Boundary=XX",
            b'multipart/form-data; boundary="XX"',
            b"multipart/form-data;charset=utf-8;boundary=XX",
        ],
    )
    def test_the_model_of_a_form_is_found(self, content_type: bytes) -> None:
        assert parse(content_type, form(AUDIO, member("model", b"demo"))).model == "demo"

    @pytest.mark.parametrize("first", [True, False])
    def test_the_model_is_renamed_in_place_and_every_other_byte_stays(self, first: bool) -> None:
        parts = [member("model", b"demo"), AUDIO, member("language", b"model demo")]
        if not first:
            parts.reverse()
        raw = form(*parts)
        body = parse(FORM, raw)
        expected = raw.replace(member("model", b"demo"), member("model", b"served-name"))
        assert body.for_engine("served-name") == expected
        assert body.for_engine("demo") is raw

    def test_a_renamed_form_is_read_back_with_the_new_name(self) -> None:
        renamed = parse(FORM, form(AUDIO, member("model", b"demo"))).for_engine("模型")
        assert parse(FORM, renamed).model == "模型"

    def test_file_named_model_is_not_the_model(self) -> None:
        upload = member("model", b"file content", '; filename="model"')
        with pytest.raises(MissingModel):
            parse(FORM, form(upload))

    def test_two_parts_named_model_are_refused_even_if_one_is_a_file(self) -> None:
        upload = member("model", b"file content", '; filename="m"')
        for parts in ((member("model", b"a"), upload), (upload, member("model", b"a"))):
            with pytest.raises(BadRequest, match="two parts named model"):
                parse(FORM, form(*parts))

    def test_a_part_with_two_names_is_refused(self) -> None:
        """The gateway took the first, engines the last: an allow-list was passed by that."""
        head = (
            b'--XX\r\nContent-Disposition: form-data; name="model"\r\n'
            b'Content-Disposition: form-data; name="other"\r\n\r\nallowed\r\n'
        )
        with pytest.raises(BadRequest):
            parse(FORM, form(head, member("model", b"forbidden")))

    def test_model_field_inside_a_file_is_content(self) -> None:
        nested = b'--YY\r\nContent-Disposition: form-data; name="model"\r\n\r\ninner\r\n--YY--'
        raw = form(member("file", nested, '; filename="a"'), member("model", b"demo"))
        assert parse(FORM, raw).model == "demo"

    @pytest.mark.parametrize(
        "head",
        [
            'content-disposition: form-data; name="model"',
            "CONTENT-DISPOSITION: form-data; name=model",
            'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"',
            'Content-Disposition: form-data; name="model"\r\nContent-Type: text/plain',
        ],
    )
    def test_part_headers_of_other_clients_are_accepted(self, head: str) -> None:
        raw = form(f"--XX\r\n{head}\r\n\r\ndemo\r\n".encode())
        assert parse(FORM, raw).for_engine("new") == raw.replace(b"demo", b"new")

    def test_repeated_models_are_refused(self) -> None:
        """Authorised by one name and run by another: the engine must not see a second one."""
        with pytest.raises(BadRequest, match="two parts named model"):
            parse(FORM, form(member("model", b"first"), AUDIO, member("model", b"second")))

    def test_second_model_part_is_refused_even_if_empty(self) -> None:
        raw = form(member("model", b"first"), member("model", b""))
        with pytest.raises(BadRequest):
            parse(FORM, raw)

    @pytest.mark.parametrize(
        "content_type",
        [
            b"multipart/form-data",
            b"multipart/form-data;",
            b"multipart/form-data; boundary=",
            b'multipart/form-data; boundary=""',
            b"multipart/form-data; bound=XX",
        ],
    )
    def test_a_form_without_a_boundary_is_a_bad_request(self, content_type: bytes) -> None:
        with pytest.raises(BadRequest, match=r"boundary|content type"):
            parse(content_type, form(member("model", b"demo")))

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"nothing of the kind",
            b"--YY\r\n\r\n--YY--\r\n",
            b"--XX\r\n",
            b"--XX--\r\n",
            b"--XXmodel",
            b"--XX\r\nContent-Disposition form-data\r\n\r\nx\r\n--XX--\r\n",
            b"--XX\r\n: empty\r\n\r\nx\r\n--XX--\r\n",
            b"--XX\nContent-Disposition: form-data; name=model\n\ndemo\n--XX--\n",
            b"\xff" * 100,
            b'{"model":"demo"}',
        ],
    )
    def test_a_broken_form_is_a_bad_request(self, raw: bytes) -> None:
        with pytest.raises(BadRequest):
            parse(FORM, raw)

    @pytest.mark.parametrize("end", [b"", b"--XX", b"--XX\r\n", b"--XX-", b"--X"])
    def test_unterminated_form_is_a_bad_request(self, end: bytes) -> None:
        with pytest.raises(BadRequest):
            parse(FORM, form(member("model", b"demo"), end=end))

    def test_truncated_form_is_parsed_or_refused(self) -> None:
        raw = form(AUDIO, member("model", b"demo"))
        whole = 0
        for length in range(len(raw) + 1):
            try:
                assert parse(FORM, raw[:length]).model == "demo"
                whole += 1
            except BadRequest:
                continue
        assert 1 <= whole <= 3  # with and without the line's end after the last boundary

    @pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"x" * (MAX_MODEL_FIELD + 1)])
    def test_model_field_that_is_no_name_is_missing(self, value: bytes) -> None:
        with pytest.raises(MissingModel) as caught:
            parse(FORM, form(member("model", value)))
        assert caught.value.param == "model"

    def test_the_longest_name_is_still_read(self) -> None:
        name = "x" * MAX_MODEL_FIELD
        assert parse(FORM, form(member("model", name.encode()))).model == name

    def test_a_form_without_a_model_is_missing_it(self) -> None:
        with pytest.raises(MissingModel, match="you must provide a model parameter"):
            parse(FORM, form(AUDIO))

    @pytest.mark.parametrize("charset", ["; charset=utf-16", "; charset=nonsense"])
    def test_charset_other_than_utf8_is_refused(self, charset: str) -> None:
        with pytest.raises(BadRequest, match="utf-8"):
            parse(FORM + charset.encode(), form(member("model", b"demo")))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    before=st.dictionaries(TEXT, VALUES, max_size=3),
    after=st.dictionaries(TEXT, VALUES, max_size=3),
    model=TEXT.filter(bool),
    new=TEXT,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
@settings(max_examples=150, deadline=None)
def test_renaming_changes_the_model_and_nothing_else(
    before: dict[str, Any],
    after: dict[str, Any],
    model: str,
    new: str,
    ascii_only: bool,
    indent: int | None,
) -> None:
    original = {**before, "model": model, **{k: v for k, v in after.items() if k != "model"}}
    assume(len({name.casefold() for name in original}) == len(original))
    assume(all(name == name.casefold() or name.casefold() not in READ_NAMES for name in original))
    body = read(json.dumps(original, ensure_ascii=ascii_only, indent=indent))
    assert body.model == model
    assert json.loads(body.for_engine(new)) == {**original, "model": new}


@given(raw=st.binary(max_size=60) | st.text(max_size=40).map(lambda t: t.encode()))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    for content_type in (JSON, FORM):
        try:
            assert parse(content_type, raw).model
        except BadRequest:
            continue


# Values without whitespace, in which a member may hide from whoever counts bytes or blanks.
WRITTEN = st.sampled_from(["0", '" "', '"a b, c"', "[1, 2]", "[]", '{"a":1}', '{"a": "n"}', "null"])
NAMES = st.sampled_from(["a", "n", "%b", "ä", "a b", "", '"', "\\", "model", "N", "\n", "stream"])


@pytest.mark.slow
@given(
    members=st.lists(st.tuples(NAMES, WRITTEN), max_size=6),
    ascii_only=st.booleans(),
    colon=st.sampled_from([":", ": ", " :", " : "]),
    comma=st.sampled_from([",", ", ", " ,", ",\n"]),
    around=st.sampled_from([("{", "}"), (" {", "}"), ("{", "} "), ("{ ", "}"), ("{", "}\n")]),
)
@settings(max_examples=500, deadline=None)
def test_parse_and_scan_agree(
    members: list[tuple[str, str]],
    ascii_only: bool,
    colon: str,
    comma: str,
    around: tuple[str, str],
) -> None:
    """Above all, no member that is repeated passes, however the body is written."""
    pairs = [("model", '"demo"'), *members]
    inside = comma.join(
        f"{json.dumps(name, ensure_ascii=ascii_only)}{colon}{value}" for name, value in pairs
    )
    raw = inside.join(around).encode()
    try:
        scan = BodyScan(JSON)
        scan.feed(raw)
        slow = scan.finish(raw)
    except BadRequest as error:
        with pytest.raises(type(error)):
            parse(JSON, raw)
        return
    quick = parse(JSON, raw)
    assert len(quick.members) == len(pairs)
    assert list(quick.members.items()) == list(slow.members.items())
    assert (quick.model, quick.odd_names) == (slow.model, slow.odd_names)


@given(at=st.integers(0, 400), piece=st.binary(min_size=1, max_size=4), drop=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_damaged_form_is_parsed_unchanged_or_refused(at: int, piece: bytes, drop: int) -> None:
    raw = form(AUDIO, member("model", b"demo"), member("language", b"en"))
    damaged = raw[:at] + piece + raw[at + drop :]
    try:
        body = parse(FORM, damaged)
    except BadRequest:
        return
    renamed = body.for_engine("a-new-name")
    assert parse(FORM, renamed).model == "a-new-name"
    assert parse(FORM, renamed).for_engine(body.model) == damaged


CONTENT = st.binary(max_size=40).filter(lambda content: b"--XX" not in content)
FIELDS = st.tuples(
    st.sampled_from(["file", "language", "prompt", "models"]),
    CONTENT,
    st.sampled_from(["", '; filename="a.wav"', '; filename=""']),
)


@given(
    fields=st.lists(FIELDS, max_size=4),
    at=st.integers(0, 4),
    model=TEXT.filter(lambda text: bool(text) and "--XX" not in text),
    new=TEXT.filter(lambda text: bool(text) and "--XX" not in text),
)
@settings(max_examples=150, deadline=None)
def test_renaming_in_a_form_changes_that_field_and_nothing_else(
    fields: list[tuple[str, bytes, str]], at: int, model: str, new: str
) -> None:
    parts = [member(*field) for field in fields]
    before, after = parts[:at], parts[at:]
    raw = form(*before, member("model", model.encode()), *after)
    body = parse(FORM, raw)
    assert body.model == model
    assert body.for_engine(new) == form(*before, member("model", new.encode()), *after)


def test_numbers_beyond_a_float_are_forwarded_unchanged() -> None:
    renamed = read('{"model":"demo","x":1e400}').for_engine("served")
    assert math.isinf(json.loads(renamed)["x"])
    assert b"1e400" in renamed


@pytest.mark.parametrize("name", sorted(SHORT_NAMES))
@pytest.mark.parametrize("quick", [True, False])
def test_members_that_are_parsed_at_once_are_bounded(name: str, quick: bool) -> None:
    """A number of 30 MiB would keep the event loop for longer than a request may."""
    members = {"model": '"m"', "prompt": f'"{"x" * MAX_SHORT}"'}
    for length, fits in ((MAX_SHORT, True), (MAX_SHORT + 1, False)):
        members[name] = f'"{"1" * (length - 2)}"'
        raw = f"{{{','.join(f'{json.dumps(n)}:{v}' for n, v in members.items())}}}".encode()
        scan = BodyScan(b"")

        def read(raw: bytes = raw, scan: BodyScan = scan) -> ParsedBody:
            if quick:
                return parse(b"", raw)
            scan.feed(raw)
            return scan.finish(raw)

        if fits:
            read()
            continue
        with pytest.raises(BadRequest, match=f"{name} has over"):
            read()
