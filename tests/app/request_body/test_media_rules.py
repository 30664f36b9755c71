"""Media URLs: only those of allowed hosts pass."""

import json
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import MediaNotAllowed
from app.request_body import media_rules
from app.request_body.body import BodyScan, ParsedBody, check_media, parse
from app.request_body.media_rules import MAX_FETCHED, MAX_GAP_BYTES, MAX_NAMES

JSON = b"application/json"
ESCAPES = {
    "u": (r"\u0075", r"\u0055"),
    "r": (r"\u0072", r"\u0052"),
    "l": (r"\u006c", r"\u006C", r"\u004c", r"\u004C"),
}
INNER = "http://169.254.169.254/latest/meta-data"


def body_of(fields: dict[str, Any], **dumps: Any) -> ParsedBody:
    return parse(JSON, json.dumps({"model": "m", **fields}, **dumps).encode())


def image(address: object, name: str = "image_url") -> dict[str, Any]:
    part = {"type": name, name: {"url": address}}
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize("name", ["image_url", "audio_url", "video_url"])
def test_url_of_a_host_that_is_not_allowed_is_refused(name: str) -> None:
    with pytest.raises(MediaNotAllowed, match=r"169\.254\.169\.254"):
        check_media(body_of(image(INNER, name)), ())


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"type": "input_image", "image_url": INNER}]},
        {"input": [{"type": "input_file", "file_url": INNER}]},
        {"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": INNER}}]}]},
        {"messages": [{"content": [{"image_url": [INNER]}]}]},
        {"data_1": {"content": [{"type": "image_url", "image_url": {"url": INNER}}]}},
    ],
)
def test_url_is_found_at_every_position(fields: dict[str, Any]) -> None:
    with pytest.raises(MediaNotAllowed):
        check_media(body_of(fields), ())


@pytest.mark.parametrize(
    "address",
    [
        "http://good.example@evil.example/x",
        "http://evil.example\\@good.example/",
        "http://good.example.evil.example/",
        "//good.example/x",
        " data:image/png;base64,x",
        "file:///etc/passwd",
        "ftp://good.example/",
        "http://[::1]/",
        "http://good.example:80:80/",
        "https://" + "g" * 9000 + ".example/",
        "",
    ],
)
def test_ambiguous_url_is_refused(address: str) -> None:
    with pytest.raises(MediaNotAllowed):
        check_media(body_of(image(address)), {"good.example"})


@pytest.mark.parametrize(
    "address",
    [
        "https://good.example/a.png",
        "http://GOOD.example:8080?x",
        "HTTPS://good.example.",
        "https://good.example" + "/中" * 9000,
        "data:image/png;base64,AAAA",
        "DATA:,x",
    ],
)
def test_allowed_hosts_and_data_urls_pass(address: str) -> None:
    check_media(body_of(image(address)), {"good.example"})


@pytest.mark.parametrize(
    "spelling", [r"image_\u0075rl", r"image_ur\u006C", r"image_\u0055\u0052\u004c", "image_URL"]
)
def test_url_is_found_under_a_name_in_another_spelling(spelling: str) -> None:
    raw = b'{"model":"m","input":[{"%s"  :\n"%s"}]}' % (spelling.encode(), INNER.encode())
    with pytest.raises(MediaNotAllowed):
        check_media(parse(JSON, raw), ())


@pytest.mark.parametrize("letters", list(product(*((c, c.upper(), *ESCAPES[c]) for c in "url"))))
def test_url_is_found_under_an_escaped_name(
    letters: tuple[str, ...],
) -> None:
    raw = b'{"model":"m","input":[{"%s":"%s"}]}' % ("".join(letters).encode(), INNER.encode())
    with pytest.raises(MediaNotAllowed):
        check_media(parse(JSON, raw), ())


def test_escaped_url_is_decoded_before_the_check() -> None:
    raw = b'{"model":"m","input":[{"image_url":"http:\\/\\/good.example\\/x"}]}'
    check_media(parse(JSON, raw), {"good.example"})
    raw = b'{"model":"m","input":[{"image_url":"\\u0064ata:,x"}]}'
    check_media(parse(JSON, raw), ())


def test_url_in_text_passes() -> None:
    text = f'look at "image_url": "{INNER}" and "url": url"'
    check_media(body_of({"messages": [{"role": "user", "content": text}]}), ())
    check_media(body_of({"messages": [{"role": "user", "content": [{"text": "my url"}]}]}), ())


def test_url_in_tool_schemas_passes() -> None:
    check_media(body_of({"tools": [{"default": {"url": INNER}}], "messages": []}), ())
    with pytest.raises(MediaNotAllowed):
        check_media(body_of({"tools": [{"url": INNER}], **image(INNER)}), ())


@given(
    st.integers(1, 40),
    st.sampled_from(["", "  ", "\n" * 50]),
    st.sampled_from(["url", "image_url", r"ur\u006c", "URL", "text", "curls"]),
    st.booleans(),
)
def test_scan_in_pieces_agrees_with_the_whole(
    size: int, blanks: str, name: str, nested: bool
) -> None:
    value = f'"{INNER}"' if not nested else f'{{"detail":"high","url"{blanks}:{blanks}"{INNER}"}}'
    raw = f'{{"model":"m","input":[{{"a":1,"{name}"{blanks}:{blanks}{value}}}]}}'.encode()
    scan = BodyScan(JSON)
    for start in range(0, len(raw), size):
        scan.feed(raw[start : start + size])

    def refused(body: ParsedBody) -> bool:
        try:
            check_media(body, ())
        except MediaNotAllowed:
            return True
        return False

    is_address = nested or name.lower().replace("\\u006c", "l").endswith("url")
    assert refused(scan.finish(raw)) is refused(parse(JSON, raw)) is is_address


def test_urls_in_schemas_are_not_checked() -> None:
    """Thousands of them, of thousands of bytes each, would keep the loop for seconds."""
    urls = ",".join(f'{{"url":"http://{"a" * 9000}"}}' for _ in range(100))
    raw = f'{{"model":"m","tools":[{urls}],"messages":[]}}'.encode()
    scan = BodyScan(JSON)
    scan.feed(raw)
    body = scan.finish(raw)
    with patch.object(media_rules, "_BEGINNING", None):
        check_media(body, ())


@pytest.mark.parametrize("blanks", ['{} "', '{}: "', ':{} "', ':{}"'])
def test_url_after_too_many_blanks_is_refused(blanks: str) -> None:
    gap = blanks.format(" " * MAX_GAP_BYTES)
    if ":" not in gap:
        gap = gap.replace('"', ': "')
    raw = f'{{"model":"m","input":[{{"url"{gap}data:,x"}}]}}'.encode()
    with pytest.raises(MediaNotAllowed):
        check_media(parse(JSON, raw), ())
    near = raw.replace(b" " * MAX_GAP_BYTES, b" " * 100)
    check_media(parse(JSON, near), ())


def test_more_addresses_than_any_request_has_fetched_are_refused() -> None:
    few = [{"url": "https://good.example/"}] * MAX_FETCHED
    check_media(body_of({"input": few}), {"good.example"})
    with pytest.raises(MediaNotAllowed, match="to fetch"):
        check_media(body_of({"input": [*few, few[0]]}), {"good.example"})


def test_more_names_than_a_request_has_images_are_refused() -> None:
    few = [{"url": None}] * MAX_NAMES
    check_media(body_of({"input": few}), ())
    with pytest.raises(MediaNotAllowed):
        check_media(body_of({"input": [*few, {"url": None}]}), ())


PART = {"type": "image_url", "image_url": None}


@pytest.mark.parametrize(
    "letters", list(product(("u", r"\u0075"), ("u", r"\u0075"), ("i", r"\u0069"), ("d", r"\u0064")))
)
def test_media_uuid_is_refused_in_any_spelling(letters: tuple[str, ...]) -> None:
    """vLLM caches it under that name, and serves it to any request with the name alone."""
    name = "".join(letters).encode()
    raw = b'{"model":"m","messages":[{"content":[{"%s" : "a","type":"text"}]}]}' % name
    with pytest.raises(MediaNotAllowed, match="uuid"):
        check_media(parse(JSON, raw), ())
    check_media(parse(JSON, raw), (), uuids=True)
    for size in (1, 7, len(raw)):
        scan = BodyScan(JSON)
        for start in range(0, len(raw), size):
            scan.feed(raw[start : start + size])
        with pytest.raises(MediaNotAllowed, match="uuid"):
            check_media(scan.finish(raw), ())


@pytest.mark.parametrize("value", [7, ["a"], {"a": 1}, "https://good.example"])
def test_media_uuid_of_any_value_is_refused(value: object) -> None:
    with pytest.raises(MediaNotAllowed, match="uuid"):
        check_media(body_of({"messages": [{"content": [{**PART, "uuid": value}]}]}), ())


def test_other_uuids_pass() -> None:
    for content in ([{**PART, "uuid": None}], 'a "uuid": "x"', [{"guid": "x", "my_uuid": "x"}]):
        check_media(body_of({"messages": [{"content": content}]}), ())
    check_media(body_of({"tools": [{"properties": {"uuid": {"type": "string"}}}]}), ())


class TestAnthropicsMessages:
    def check(self, part: dict[str, Any]) -> None:
        body = body_of({"messages": [{"role": "user", "content": [part]}]})
        check_media(body, {"good.example"}, anthropic=True)

    def test_source_of_an_image_is_checked(self) -> None:
        image = {"type": "image", "source": {"type": "url", "url": INNER}}
        for part in (image, {"type": "tool_result", "content": [image]}):
            with pytest.raises(MediaNotAllowed):
                self.check(part)
        self.check({"type": "image", "source": {"type": "url", "url": "https://good.example/x"}})
        self.check({"type": "image", "source": {"type": "base64", "data": "AAAA"}})

    @pytest.mark.parametrize("depth", [0, 1, 20])
    @pytest.mark.parametrize("source", ["source", r"\u0073ource"])
    @pytest.mark.parametrize("before", ['"x \\" }]"', "[{}, 1.5, null]", '{"content":{"url":1}}'])
    def test_source_is_found_in_pieces_at_any_depth(
        self, depth: int, source: str, before: str
    ) -> None:
        image = f'[{{"a":{before},"{source}" :\n{{"type":"url","url" : "{INNER}"}},"b":{before}}}]'
        for _ in range(depth):
            image = f'[{{"type":"tool_result","content":{image}}}]'
        good = f'{{"content":[{{"input":{image}}}],"role":"user"}}'
        for messages, is_refused in ((good, False), (f'{good},{{"content":{image}}}', True)):
            raw = f'{{"x":{image},"model":"m","messages":[{messages}]}}'.encode()
            bodies = [parse(JSON, raw)]
            for size in (1, 7, 64):
                scan = BodyScan(JSON, anthropic=True)
                for start in range(0, len(raw), size):
                    scan.feed(raw[start : start + size])
                bodies.append(scan.finish(raw))
            for body in bodies:
                with pytest.raises(MediaNotAllowed) if is_refused else nullcontext():
                    check_media(body, (), anthropic=True)

    def test_tool_arguments_are_not_checked(self) -> None:
        fetch = {"url": INNER, "source": {"url": INNER}, "uuid": "x"}
        self.check({"type": "tool_use", "id": "1", "name": "fetch", "input": fetch})

    @pytest.mark.parametrize("messages", [None, "x", [1], [{"content": "url"}], [{"content": [1]}]])
    def test_invalid_messages_are_left_to_the_engine(self, messages: object) -> None:
        body = body_of({"messages": messages, "x": {"url": INNER}})
        check_media(body, (), anthropic=True)


@pytest.mark.parametrize("name", ["url", "base_url", "api_url", "uuid"])
def test_member_of_the_body_itself_is_no_medium(name: str) -> None:
    check_media(body_of({"messages": [], name: INNER}), ())
    with pytest.raises(MediaNotAllowed):
        check_media(body_of({name: INNER, **image(INNER)}), ())
