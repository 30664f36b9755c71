"""The form scanner compared with Starlette's parser, which vLLM uses."""

import itertools
from collections.abc import AsyncGenerator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from app.request_body.form_scan import (
    MAX_EPILOGUE,
    MAX_HEADER_LINE,
    WINDOW,
    BadBoundary,
    BadPartHeader,
    FormBounds,
    FormFault,
    FormScanner,
    NotMultipart,
    Part,
    RepeatedModel,
    TooManyParts,
    boundary_of,
)

AMBIGUOUS = "has a Content-Disposition that cannot be read"
UNREADABLE = "has a header that cannot be read"
DISPOSITION = b'Content-Disposition: form-data; name="%b"'


def pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cuts), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(places)]


def scan(
    body: bytes,
    cuts: list[int] | None = None,
    *,
    boundary: bytes = b"XX",
    bounds: FormBounds | None = None,
) -> list[Part]:
    scanner = FormScanner(boundary, bounds or FormBounds())
    for piece in pieces(body, cuts or []):
        scanner.feed(memoryview(piece))
    return scanner.finish()


def fault(body: bytes, cuts: list[int] | None = None) -> FormFault:
    with pytest.raises(FormFault) as caught:
        scan(body, cuts)
    return caught.value


def every_cut(body: bytes) -> list[list[int]]:
    """No cut, one at each place, and all."""
    return [[], *([place] for place in range(len(body) + 1)), list(range(len(body)))]


def read_by_starlette(
    body: bytes, cuts: list[int], content_type: str
) -> list[tuple[str, str | bytes]] | None:
    """Return what vLLM gets of a form: names with values, bytes for files; None if refused."""

    async def stream() -> AsyncGenerator[bytes, None]:
        for piece in pieces(body, cuts):
            yield piece

    parsing = MultiPartParser(Headers({"content-type": content_type}), stream()).parse()
    try:
        parsing.send(None)  # small files stay in memory, so that nothing is waited for
    except StopIteration as done:
        items = done.value.multi_items()
    except (MultiPartException, FormParserError):
        return None
    found: list[tuple[str, str | bytes]] = []
    for name, value in items:
        if isinstance(value, UploadFile):
            with value.file as file:
                found.append((name, file.read()))
        else:
            found.append((name, value))
    return found


def as_starlette(body: bytes, part: Part) -> tuple[str, str | bytes]:
    value = body[part.start : part.end]
    if part.filename:
        return part.name, value
    try:
        return part.name, value.decode()
    except UnicodeDecodeError:
        return part.name, value.decode("latin-1")


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b"--XX\r\n" + DISPOSITION % name + more + b"\r\n\r\n" + value + b"\r\n"


BOUNDARIES = st.sampled_from(
    [b"XX", b"-", b"-----", b"----WebKitFormBoundary7MA4YWxk", b"a b'(),./:=?"]
)
NEAR_MISSES = [b"\r", b"\n", b"\r\n", b"\r\n-", b"\r\n--", b"\r\n\r\n", b"-", b"--", b"\r\r\n--"]


@st.composite
def values(draw: st.DrawFn, boundary: bytes) -> bytes:
    """Data full of near misses of a delimiter, and rarely with a delimiter itself."""
    begun = st.integers(0, len(boundary)).map(lambda end: b"\r\n--" + boundary[:end])
    fragments = st.sampled_from(NEAR_MISSES) | st.binary(max_size=4) | begun | st.just(boundary)
    return b"".join(draw(st.lists(fragments, max_size=8)))


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters='"\\%'), max_size=6
).map(str.encode)
ODD_PARAMETERS = st.sampled_from(
    [
        *(b"", b'; filename="a.wav"', b"; filename=a", b'; filename=""', b' ; filename="a;b=c"'),
        *(b'; filename="100%25"', b'; Filename="a"', b'; size="1"', b";", b"; ", b'; name="model"'),
        *(b'; name*="model"', b"; name=model", b'; filename="a\\"', b'; filename="a\\"; name="b"'),
        *(
            b'; filename = "a"',
            b"; x",
            b'; "; name="model"',
            b"\t;\tfilename=a",
            b'; filename="\xff"',
        ),
    ]
)
ODD_HEADERS = st.sampled_from(
    [
        *(
            b"Content-Type: audio/wav",
            b"X:",
            b"X:  y ",
            b"X",
            b": y",
            b" folded",
            b"X : y",
            b"\tX: y",
        ),
        *(
            b"X: \x00",
            b"X: a\rb",
            b"X: a\nb",
            DISPOSITION % b"model",
            b"Content-Disposition: attachment",
        ),
        *(b"content-disposition:form-data;name=model", b"Content-Transfer-Encoding: base64", b""),
        *(b"Content-Transfer-Encoding: BINARY", b"X: " + b"y" * MAX_HEADER_LINE),
    ]
)


@st.composite
def forms(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A boundary, and a form with it as some client may write it, or as none should."""
    boundary = draw(BOUNDARIES)
    body = draw(st.sampled_from([b"", b"\r\n"]))
    odd = draw(st.booleans())
    for name in draw(st.lists(NAMES | st.sampled_from([b"model", b"file", b"MODEL"]), max_size=3)):
        lines = [DISPOSITION % name + (draw(ODD_PARAMETERS) if odd else b"")]
        if odd:
            place = draw(st.integers(0, 1))
            lines[place:place] = draw(st.lists(ODD_HEADERS, max_size=1))
        value = draw(values(boundary))
        body += b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, b"\r\n".join(lines), value)
    body += b"--%b--" % boundary + draw(st.sampled_from([b"", b"\r\n", b" \r\n\t", b"x", b"--"]))
    if odd and body:
        place = draw(st.integers(0, len(body) - 1))
        other = draw(st.sampled_from([*NEAR_MISSES, b"", b" ", b"\t", b'"', b";", b":", b"\x00"]))
        body = body[:place] + other + body[place + draw(st.integers(0, 2)) :]
    return boundary, body


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, bytes, list[int]]:
    boundary, body = draw(forms())
    places = st.integers(0, len(body))
    return boundary, body, draw(st.lists(places, max_size=6) | st.just(list(range(len(body)))))


class TestBesideStarlette:
    @pytest.mark.slow
    @given(cases())
    @example((b"XX", b"--XX--", []))
    @example((b"XX", part(b"a;b", b"", b'; filename="c;d"') + b"--XX--", []))
    def test_accepted_form_is_read_alike_in_any_pieces(
        self, case: tuple[bytes, bytes, list[int]]
    ) -> None:
        boundary, body, cuts = case
        quoted = f'multipart/form-data; boundary="{boundary.decode()}"'
        try:
            parts = scan(body, cuts, boundary=boundary)
        except FormFault:
            assert scan_verdict(body, boundary) is None, "the verdict depends on the pieces"
            return
        assert boundary_of(quoted.encode()) == boundary
        expected = read_by_starlette(body, cuts, quoted)
        assert [as_starlette(body, found) for found in parts] == expected
        for found in parts:
            assert body[: found.start].endswith(b"\r\n\r\n")
            assert body[found.end :].startswith(b"\r\n--" + boundary)
        assert scan(body, boundary=boundary) == parts

    @pytest.mark.slow
    @given(st.lists(st.tuples(NAMES, st.booleans(), st.binary(max_size=9)), max_size=5), st.data())
    def test_parts_of_a_client_are_found(
        self, fields: list[tuple[bytes, bool, bytes]], data: st.DataObject
    ) -> None:
        body = b"".join(
            part(name, value, b'; filename="a"\r\nContent-Type: audio/wav' if is_file else b"")
            for name, is_file, value in fields
        )
        body += b"--XX--\r\n"
        cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=5))
        found = scan(body, cuts)
        assert [(p.name.encode(), p.filename, body[p.start : p.end]) for p in found] == fields

    def test_values_longer_than_a_window_keep_their_spans(self) -> None:
        audio = b"\r\n--X" * WINDOW
        body = part(b"file", audio, b'; filename="a"') + part(b"model", b"demo") + b"--XX--\r\n"
        found = scan(body)
        assert [body[each.start : each.end] for each in found] == [audio, b"demo"]


def scan_verdict(body: bytes, boundary: bytes) -> list[Part] | None:
    try:
        return scan(body, boundary=boundary)
    except FormFault:
        return None


class TestRefusedParts:
    @pytest.mark.parametrize(
        ("headers", "what"),
        [
            ([], "has no Content-Disposition header"),
            ([b"Content-Type: text/plain"], "has no Content-Disposition header"),
            ([DISPOSITION % b"a"] * 2, "has two Content-Disposition headers"),
            ([DISPOSITION % b"a", b"content-DISPOSITION:x"], "has two Content-Disposition headers"),
            (
                [b"Content-Disposition: attachment; name=a"],
                AMBIGUOUS,
            ),
            ([b"Content-Disposition: form-data"], "has no name"),
            ([b'Content-Disposition: form-data; filename="a"'], "has no name"),
            ([DISPOSITION % b"a" + b'; name="b"'], AMBIGUOUS),
            ([DISPOSITION % b"a" + b'; NAME="b"'], AMBIGUOUS),
            (
                [DISPOSITION % b"a" + b"; name*=utf-8''b"],
                AMBIGUOUS,
            ),
            (
                [DISPOSITION % b"a" + b"; filename*0=b"],
                AMBIGUOUS,
            ),
            ([DISPOSITION % b"a\\"], AMBIGUOUS),
            ([DISPOSITION % b'a"b'], AMBIGUOUS),
            (
                [DISPOSITION % b"a" + b'; filename="\\"; name="b"'],
                AMBIGUOUS,
            ),
            ([DISPOSITION % b"a\x7f"], UNREADABLE),
            ([DISPOSITION % b"a" + b";"], AMBIGUOUS),
            (
                [b"Content-Disposition: form-data; name =a"],
                AMBIGUOUS,
            ),
            (
                [b"Content-Disposition: form-data; name="],
                AMBIGUOUS,
            ),
            ([DISPOSITION % b"mode%6C"], "has a name with percent-encoding"),
            ([DISPOSITION % b"\xff"], "has a name that is not UTF-8"),
            ([DISPOSITION % b"a" + b'; filename="\xff"'], "has a name that is not UTF-8"),
            ([DISPOSITION % b"a", b"no colon"], UNREADABLE),
            ([DISPOSITION % b"a", b" X: folded"], UNREADABLE),
            ([DISPOSITION % b"a", b"X : y"], UNREADABLE),
            ([DISPOSITION % b"a", b": y"], UNREADABLE),
            ([DISPOSITION % b"a", b"X: \x00"], UNREADABLE),
            ([DISPOSITION % b"a", b"X: a\nb"], UNREADABLE),
            ([DISPOSITION % b"a", b"X: " + b"y" * 4094], UNREADABLE),
            ([DISPOSITION % b"a", *[b"X: y"] * 8], "has over 8 headers"),
            ([DISPOSITION % b"a", *[b"X: " + b"y" * 4000] * 3], "has headers of over 8192 bytes"),
            (
                [DISPOSITION % b"a", b"Content-Transfer-Encoding: base64"],
                "has a Content-Transfer-Encoding that is not supported",
            ),
        ],
    )
    def test_ambiguous_headers_are_refused(self, headers: list[bytes], what: str) -> None:
        first = part(b"n", b"1")
        lines = b"".join(line + b"\r\n" for line in headers)
        body = first + b"--XX\r\n" + lines + b"\r\ndemo\r\n--XX--\r\n"
        for cuts in ([], list(range(len(body)))):
            found = fault(body, cuts)
            assert isinstance(found, BadPartHeader)
            assert str(found) == f"the part of the form at byte {len(first) + 4} {what}"

    @pytest.mark.parametrize(("first", "second"), [(b"model", b"model"), (b"model", b"Model")])
    def test_two_models_are_refused(self, first: bytes, second: bytes) -> None:
        for more in (b"", b'; filename="a"'):
            body = part(first, b"a") + part(b"n", b"1") + part(second, b"b", more) + b"--XX--"
            assert isinstance(fault(body), RepeatedModel)

    def test_other_names_may_be_repeated(self) -> None:
        body = part(b"timestamp_granularities[]", b"word") * 2 + b"--XX--"
        assert len(scan(body)) == 2


class TestRefusedStructure:
    @pytest.mark.parametrize(
        ("body", "offset", "what"),
        [
            (b"x" + part(b"a", b"1") + b"--XX--", 0, "it does not begin with its boundary"),
            (b"\r\n\r\n" + part(b"a", b"1") + b"--XX--", 0, "it does not begin with its boundary"),
            (b"\n" + part(b"a", b"1") + b"--XX--", 0, "it does not begin with its boundary"),
            (b"--XY--", 0, "it does not begin with its boundary"),
            (b"--XX \r\n", 4, "neither a new line nor -- after its boundary"),
            (b"--XX\n", 4, "neither a new line nor -- after its boundary"),
            (b"--XX-x", 4, "neither a new line nor -- after its boundary"),
            (
                part(b"a", b"b\r\n--XXc") + b"--XX--",
                len(part(b"a", b"b\r\n--XX")) - 2,
                "neither a new line nor -- after its boundary",
            ),
        ],
    )
    def test_misplaced_delimiters_are_refused_whatever_the_pieces(
        self, body: bytes, offset: int, what: str
    ) -> None:
        for cuts in every_cut(body):
            found = fault(body, cuts)
            assert isinstance(found, NotMultipart)
            assert str(found) == f"the multipart form is broken: {what} at byte {offset}"

    @pytest.mark.parametrize(
        "epilogue", [b"x", b"\r\nx", b"--XX--", b"\x00", b" " * (MAX_EPILOGUE + 1)]
    )
    def test_nothing_but_some_whitespace_follows_the_last_delimiter(self, epilogue: bytes) -> None:
        body = part(b"a", b"1") + b"--XX--"
        assert isinstance(fault(body + epilogue), NotMultipart)
        assert len(scan(body + b"\r\n" + b" " * (MAX_EPILOGUE - 2))) == 1

    def test_truncated_form_is_refused_at_its_end(self) -> None:
        body = part(b"a", b"1") + b"--XX--"
        for end in range(len(body)):
            scanner = FormScanner(b"XX", FormBounds())
            scanner.feed(body[:end])
            with pytest.raises(NotMultipart, match=f"unexpected end at byte {end}$"):
                scanner.finish()


class TestBounds:
    def test_number_of_parts(self) -> None:
        most = part(b"a", b"") * 64
        assert len(scan(most + b"--XX--")) == 64
        found = fault(most + part(b"a", b"") + b"--XX--")
        assert isinstance(found, TooManyParts)
        assert str(found) == "the form has over 64 parts"

    def test_size_of_a_parts_headers(self) -> None:
        for cuts in ([], [4000], [8191], [8192, 8200, 8210]):
            bounds = FormBounds(part_header_bytes=len(DISPOSITION % b"a") + 2 + 3000)
            for more in (0, 1):
                line = b"\r\nX:" + b"y" * (2998 + more)
                body = part(b"a", b"1", line) + b"--XX--"
                if more:
                    with pytest.raises(BadPartHeader):
                        scan(body, [cut % len(body) for cut in cuts], bounds=bounds)
                else:
                    assert len(scan(body, [cut % len(body) for cut in cuts], bounds=bounds)) == 1

    def test_unterminated_headers_are_refused_before_the_body_ends(self) -> None:
        scanner = FormScanner(b"XX", FormBounds())
        with pytest.raises(BadPartHeader):
            scanner.feed(b"--XX\r\n" + b"X" * 9000)


class TestBoundary:
    @pytest.mark.parametrize(
        ("content_type", "boundary"),
        [
            (b"multipart/form-data; boundary=XX", b"XX"),
            (b'Multipart/Form-Data;BOUNDARY="X X"', b"X X"),
            (b"multipart/form-data; charset=utf-8; boundary=----=_Part_1_2.3", b"----=_Part_1_2.3"),
            (b'multipart/form-data ; boundary=a:/?=(); charset="UTF-8" ', b"a:/?=()"),
            (b"multipart/form-data; boundary=" + b"a" * 70, b"a" * 70),
        ],
    )
    def test_boundary_is_the_one_that_starlette_reads(
        self, content_type: bytes, boundary: bytes
    ) -> None:
        assert boundary_of(content_type) == boundary
        body = b"--%b\r\n%b\r\n\r\n1\r\n--%b--" % (boundary, DISPOSITION % b"a", boundary)
        assert read_by_starlette(body, [], content_type.decode()) == [("a", "1")]

    @pytest.mark.parametrize(
        ("content_type", "message"),
        [
            (b"multipart/form-data", "the multipart form names no boundary"),
            (b'multipart/form-data; boundary=""', "the multipart form names no boundary"),
            (
                b"multipart/form-data; boundary=" + b"a" * 71,
                "the boundary of the form has over 70 characters",
            ),
            (
                b'multipart/form-data; boundary="a@b"',
                "the boundary of the form has characters that RFC 2046 does not allow",
            ),
            (
                b'multipart/form-data; boundary="a "',
                "the boundary of the form has characters that RFC 2046 does not allow",
            ),
            (
                b"multipart/form-data; boundary=a; charset=utf-7",
                "the charset of a form must be utf-8",
            ),
            *(
                (content_type, "the content type of the form cannot be read")
                for content_type in (
                    b"multipart/mixed; boundary=a",
                    b"multipart/form-data; boundary=",
                    b"multipart/form-data; boundary=a; boundary=b",
                    b"multipart/form-data; boundary=a; Boundary=a",
                    b"multipart/form-data; boundary*=utf-8''a",
                    b'multipart/form-data; boundary="a\\"b"',
                    b"multipart/form-data; boundary=a b",
                    b"multipart/form-data; boundary=a\r\nb",
                    b"multipart/form-data; boundary=\xff",
                    b"multipart/form-data boundary=a",
                    b"",
                )
            ),
        ],
    )
    def test_a_boundary_that_could_be_misread_is_refused(
        self, content_type: bytes, message: str
    ) -> None:
        with pytest.raises(BadBoundary) as caught:
            boundary_of(content_type)
        assert str(caught.value) == message

    def test_a_charset_could_hide_a_second_model_from_the_gateway(self) -> None:
        body = part(b"model", b"demo") + part(b"+AG0-odel", b"+AHM-ecret") + b"--XX--"
        content_type = "multipart/form-data; boundary=XX; charset=utf-7"
        assert [each.name for each in scan(body)] == ["model", "+AG0-odel"]
        assert read_by_starlette(body, [], content_type) == [("model", "demo"), ("model", "secret")]
        with pytest.raises(BadBoundary):
            boundary_of(content_type.encode())
