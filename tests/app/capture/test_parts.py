"""What is replaced, cut and encrypted of a capture."""

import base64
import json
import os
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from app.capture.document import MAX_JSON_BYTES, document_of
from app.capture.media import replaced, without_media
from app.capture.redaction import MAX_MATCHES, Redaction
from app.capture.rules import CaptureRules
from app.capture.sealing import Sealer, Unreadable
from app.capture.transcript import MAX_ANSWER_BYTES, CaptureMemory, Transcript, size_of
from app.settings import CaptureSettings
from tests.app.usage.records import ended

KEY = base64.b64encode(bytes(32)).decode()
JSON = b"application/json"


def rules(**fields: Any) -> CaptureRules:
    made = CaptureRules.of(CaptureSettings(keys=("key-1",), encryption_keys=KEY, **fields))
    assert made is not None
    return made


def transcript(body: bytes, *pieces: bytes, kind: bytes = JSON, **fields: Any) -> Transcript:
    memory = CaptureMemory()
    assert memory.take("t", size_of(body))
    made = Transcript(rules(**fields), memory, "t", kind, body)
    for piece in pieces:
        made.add(piece)
    return made


def document(*args: bytes, stream: bool = False, **fields: Any) -> dict[str, Any]:
    made = document_of(transcript(*args, **fields), ended(1.0), stream=stream)
    return dict(msgspec.json.decode(made))


class TestMedia:
    IMAGE = os.urandom(300_001)

    @pytest.mark.parametrize(
        "member",
        [
            {"image_url": {"url": "data:image/png;base64,{}"}},
            {"input_audio": {"data": "{}", "format": "wav"}},
            {"source": {"type": "base64", "media_type": "image/png", "data": "{}"}},
            {"b64_json": "{}"},
            {"file": {"file_data": "data:application/pdf;base64,{}"}},
            {"anything": "{}"},
        ],
    )
    def test_base64_becomes_size_and_digest(self, member: dict[str, Any]) -> None:
        text = base64.b64encode(self.IMAGE).decode()
        found = document(json.dumps(member).replace("{}", text).encode())["request"]["body"]
        shown = f"[{len(self.IMAGE)} bytes, sha256 {sha256(self.IMAGE).hexdigest()}]"
        assert shown in json.dumps(found)
        assert text[:100] not in json.dumps(found)

    def test_escaped_slashes_and_the_url_alphabet(self) -> None:
        data = b"\xff" * 900
        plain = base64.b64encode(data)
        for text in (plain.replace(b"/", b"\\/"), base64.urlsafe_b64encode(data).rstrip(b"=")):
            kept = without_media(b'{"data":"' + text + b'"}').decode()
            assert sha256(data).hexdigest() in kept

    @pytest.mark.parametrize("text", ["", "word " * 500, "é" * 600, "short", "a" * 601])
    def test_texts_stay(self, text: str) -> None:
        assert replaced(text) is None

    def test_media_that_never_end(self) -> None:
        raw = b'{"data":"' + b"A" * 1000
        assert without_media(raw) == raw
        assert without_media(b";base64," * 1000) == b";base64," * 1000


class TestRedaction:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("email", "ann.lee+x@mail.example.com"),
            ("phone", "+49 (30) 1234-5678"),
            ("card", "4111 1111 1111 1111"),
            ("iban", "DE89 3704 0044 0532 0130 00"),
            ("ip", "192.168.1.17"),
            ("ip", "2001:db8:0:0:1:2:3:4"),
            ("secret", "sk-gw-0123456789-abcdefghijklmnop"),
            ("secret", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl"),
        ],
    )
    def test_named_patterns(self, name: str, text: str) -> None:
        assert Redaction.of([name]).apply(f"so {text}, then") == f"so [redacted:{name}], then"

    def test_texts_of_every_language(self) -> None:
        assert Redaction.of(["/猫+/"]).apply("狗猫猫鸟") == "狗[redacted]鸟"

    def test_hostile_text_takes_linear_time(self) -> None:
        """Backtracking over it would take longer than the universe has existed."""
        redaction = Redaction.of(["/(a+)+b/", "/(x|xx)*y/"])
        assert redaction.apply("a" * 100_000 + "x" * 100_000) == "a" * 100_000 + "x" * 100_000

    def test_beyond_the_last_match_nothing_is_kept(self) -> None:
        """Each search of `x` reads to the end, for the longer match."""
        text = Redaction.of(["/x[^y]*y|x/"]).apply("x" * (MAX_MATCHES + 50) + " and more")
        assert text == "[redacted]" * (MAX_MATCHES + 1)

    def test_before_the_cut(self) -> None:
        content = "a" * 990 + " ann@example.com"
        body = json.dumps({"x": content}).encode()
        kept = document(body, max_bytes=1024, redact=("email",))["request"]
        assert kept["truncated"] or "[redacted:email]" in kept["body"]["x"]
        assert "ann" not in kept["body"]["x"]

    def test_in_names_and_in_arguments(self) -> None:
        inner = '{"to": "ann\\u0040example.com"}'
        body = {"ann@example.com": 1, "function": {"name": "mail", "arguments": inner}}
        text = json.dumps(document(json.dumps(body).encode(), redact=("email",)))
        assert text.count("[redacted:email]") == 2

    CARD = "4111 1111 1111 1111"
    ESCAPED = CARD.replace("4", "\\u0034")

    @pytest.mark.parametrize("lead", ["", " ", "\r\n\t"])
    def test_space_before_a_body_hides_no_escapes(self, lead: str) -> None:
        body = f'{lead}{{"content": "{self.ESCAPED}"}}'.encode()
        kept = document(body, redact=("card",))["request"]["body"]
        assert kept == {"content": "[redacted:card]"}

    def test_in_json_within_a_text(self) -> None:
        inner = json.dumps({"text": f'["{self.ESCAPED}"]'}).replace("4", "\\u0034")
        text = json.dumps(document(json.dumps({"content": inner}).encode(), redact=("card",)))
        assert text.count("[redacted:card]") == 1
        assert "111 1111" not in text

    def test_json_within_a_text_stays_where_nothing_is_found(self) -> None:
        body = {"content": '{ "a":1,  "b": [] }'}
        assert document(json.dumps(body).encode(), redact=("card",))["request"]["body"] == body

    def test_in_arguments_of_a_stream_that_has_no_end(self) -> None:
        event = {
            "type": "response.function_call_arguments.delta",
            "delta": f'{{"card": "{self.ESCAPED}"}}',
        }
        piece = b"data: " + json.dumps(event).encode() + b"\n\n"
        text = json.dumps(document(b"{}", piece, stream=True, redact=("card",))["answer"])
        assert "[redacted:card]" in text

    def test_in_numbers_but_not_in_fractions(self) -> None:
        body = {"card": 4111111111111111, "n": 3, "embedding": [0.1234567890123456], "on": True}
        kept = document(json.dumps(body).encode(), redact=("card",))["request"]["body"]
        assert kept == body | {"card": "[redacted:card]"}

    def test_tokens_do_not_repeat_what_was_replaced(self) -> None:
        tokens = [{"token": piece, "bytes": list(piece.encode())} for piece in self.CARD.split()]
        choice = {
            "text": self.CARD,
            "logprobs": {"content": tokens},
            "token_ids": [1, 2],
            "prompt_logprobs": [None, {"1": {"decoded_token": "4111"}}],
        }
        body = json.dumps({"logprobs": True}).encode()
        found = document(body, json.dumps({"choices": [choice]}).encode(), redact=("card",))
        assert found["answer"]["body"] == {"choices": [{"text": "[redacted:card]"}]}
        assert found["request"]["body"] == {"logprobs": True}
        plain = document(body, json.dumps({"choices": [choice]}).encode())
        assert plain["answer"]["body"] == {"choices": [choice]}


class TestBounds:
    def test_answer_beyond_the_memory_of_its_tenant(self) -> None:
        memory = CaptureMemory(most=10_000, most_of_tenant=2_000)
        made = Transcript(rules(), memory, "t", JSON, b"")
        assert memory.take("t", made.held)
        for _ in range(5):
            made.add(b"x" * 1000)
        assert (made.answer_cut, made.answer_bytes) == (True, 5000)
        assert memory.take("other", 2_000)
        made.release()
        assert memory.taken == 2_000

    def test_part_of_a_plain_answer_is_not_kept(self) -> None:
        """It might hide a pattern in an escape, which only decoding shows."""
        made = document(b"{}", b'{"x":"', b"y" * MAX_ANSWER_BYTES)
        assert made["answer"]["truncated"]
        assert made["answer"]["body"] is None

    def test_json_that_is_too_large_to_decode(self) -> None:
        made = document(b'{"x":"' + b"y " * MAX_JSON_BYTES + b'"}')
        assert (made["request"]["truncated"], made["request"]["body"]) == (True, None)

    def test_deeply_nested_json(self) -> None:
        for depth in (100, 400, 900, 5000, 100_000):
            document(b"[" * depth + b"]" * depth)

    def test_many_small_values_are_bounded(self) -> None:
        made = document(b"[" + b"0," * 300_000 + b"0]", max_bytes=1024)
        assert made["request"]["truncated"]
        assert len(made["request"]["body"]) < 200

    def test_other_bodies(self) -> None:
        assert document(b"{}", b"1\n00:00 subtitles")["answer"]["body"] == "1\n00:00 subtitles"
        audio = b"ID3\xff\xfb" * 100
        assert document(b"{}", audio)["answer"]["body"].startswith("[500 bytes, sha256 ")
        assert document(b"")["request"]["body"] is None
        assert document(b"--x", kind=b"multipart/form-data; boundary=y")["request"]["body"] is None

    def test_nothing_of_it_is_in_a_repr(self) -> None:
        assert "canary" not in repr(transcript(b'{"x":"canary"}', b"canary"))


class TestSealing:
    def test_rotation_of_keys(self) -> None:
        old, new = os.urandom(32), os.urandom(32)
        before = Sealer([old]).seal(b"text", b"row")
        rotated = Sealer([new, old])
        assert rotated.open(before, b"row") == b"text"
        after = rotated.seal(b"text", b"row")
        assert Sealer([new]).open(after, b"row") == b"text"
        with pytest.raises(Unreadable, match="ENCRYPTION_KEYS"):
            Sealer([new]).open(before, b"row")

    def test_row_and_text_are_authenticated(self) -> None:
        sealer = Sealer([os.urandom(32)])
        sealed = sealer.seal(b"text", b"row")
        assert b"text" not in sealed
        flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
        for text, row in ((sealed, b"other"), (flipped, b"row"), (sealed[:20], b"row")):
            with pytest.raises(Unreadable):
                sealer.open(text, row)
        for text in (b"", sealed[:10], b"\x02" + sealed[1:]):
            with pytest.raises(Unreadable):
                sealer.open(text, b"row")


def test_share_is_the_same_for_one_id() -> None:
    half = rules(share=0.25)
    ids = [f"{number:024x}" for number in range(4000)]
    chosen = [one for one in ids if half.chooses(one)]
    assert 900 < len(chosen) < 1100
    assert [one for one in ids if half.chooses(one)] == chosen
