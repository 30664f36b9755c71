"""Images and speech as vllm-omni 0.30 answers for them (vllm_omni/entrypoints/openai)."""

import asyncio
import base64
import io
import json
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.vllm import Fake, Seen

IMAGES, EDITS, SPEECH = "/v1/images/generations", "/v1/images/edits", "/v1/audio/speech"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
RATE = 24_000
# Sound of a second for each ten characters, sent in pieces of half a second.
PIECE = bytes(range(250)) * (RATE // 250)


def wav_header(size: int = 0xFFFFFFFF) -> bytes:
    """Return the header of a WAV file; while it streams its size is not known."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF", size, b"WAVE", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data", size,
    )  # fmt: skip


def pieces_of(text: str) -> list[bytes]:
    """Return the sound of a text."""
    return [PIECE] * (2 * -(-len(text) // 10))


def form_of(seen: "Seen") -> list[tuple[str, str | None, bytes]]:
    """Return name, file name and value of each part of a form."""
    from email.parser import BytesParser
    from email.policy import HTTP

    head = f"content-type: {seen.header('content-type')}\r\n\r\n".encode()
    parts: list[tuple[str, str | None, bytes]] = []
    for part in BytesParser(policy=HTTP).parsebytes(head + seen.body).iter_parts():
        value = part.get_payload(decode=True)
        assert isinstance(value, bytes)
        name = str(part.get_param("name", header="content-disposition"))
        parts.append((name, part.get_filename(), value))
    return parts


async def answer_omni(
    fake: "Fake", seen: "Seen", path: str, body: dict[str, Any], writer: asyncio.StreamWriter
) -> bool:
    """Answer a request for images or speech; return whether the connection goes on."""
    if path == EDITS:
        parts = form_of(seen)
        fields = {name: value.decode() for name, file, value in parts if file is None}
        if not any(name.startswith("image") for name, file, _ in parts if file is not None):
            return _refuse(fake, writer, "Field 'image' or 'url' is required", 422)
        body = {**fields, "n": int(fields.get("n", 1)), "stream": fields.get("stream") == "true"}
    if body.get("model") != fake.model:
        return _refuse(fake, writer, f"Model mismatch: {body.get('model')!r}", 400)
    if path == SPEECH:
        return await _speak(fake, body, writer)
    count = body.get("n", 1)
    if not 1 <= count <= 10:
        return _refuse(fake, writer, "n must be from 1 to 10", 400)
    await asyncio.sleep(fake.pace_s)
    if body.get("response_format") == "file":
        return _file(fake, count, writer)
    image = {"b64_json": base64.b64encode(PNG).decode(), "url": None, "revised_prompt": None}
    answer = {"created": 1, "data": [image] * count, "output_format": "png", "size": "64x64"}
    if path == IMAGES or not body.get("stream"):  # only edits stream
        return fake.plain(writer, json.dumps(answer).encode())
    delta = {"object": "image.edit.chunk", "type": "ar_delta", "delta": "a cat", "index": 0}
    whole = {"object": "image.edit.chunk", "type": "image", **answer, "model": fake.model}
    events = [b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in (delta, whole)]
    return await _stream(fake, writer, "text/event-stream", [*events, b"data: [DONE]\n\n"])


async def _speak(fake: "Fake", body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    text, kind = body.get("input", ""), body.get("response_format", "wav")
    if not text:
        return _refuse(fake, writer, "Input text cannot be empty", 400)
    pieces, media_type = pieces_of(text), "audio/mpeg" if kind == "mp3" else f"audio/{kind}"
    stream_format = body.get("stream_format") or ("sse" if body.get("stream") else None)
    if stream_format and kind not in ("pcm", "wav"):
        return _refuse(fake, writer, "Streaming requires response_format='pcm' or 'wav'.", 400)
    if stream_format == "sse":
        return await _stream(fake, writer, "text/event-stream", list(_events(text, kind, pieces)))
    if stream_format == "audio":
        begin = [wav_header()] if kind == "wav" else []
        return await _stream(fake, writer, media_type, [*begin, *pieces])
    sound = b"".join(pieces)
    whole = wav_header(len(sound)) + sound if kind == "wav" else sound
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\ncontent-length: {len(whole)}\r\n"
        "x-vllm-omni-input-tokens: 3\r\nx-vllm-omni-output-tokens: 7\r\n\r\n"
    )
    writer.write(head.encode() + whole)
    return True


def _events(text: str, kind: str, pieces: Sequence[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        data = {"audio": base64.b64encode(piece).decode(), "response_format": kind}
        yield _event("speech.audio.delta", data)
        if text == "fail":
            error = {"message": "out of memory", "type": "server_error", "code": 500}
            yield _event("speech.audio.error", {"error": error})
            return
    usage = {"input_tokens": len(text) // 4, "output_tokens": len(pieces) * 6, "total_tokens": 0}
    yield _event("speech.audio.done", {"usage": usage})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    written = json.dumps({"type": kind, **data}, separators=(",", ":"))
    return f"event: {kind}\ndata: {written}\n\n".encode()


def _file(fake: "Fake", count: int, writer: asyncio.StreamWriter) -> bool:
    """Answer with one image as it is, or with several in a ZIP archive."""
    kind, name, content = "image/png", "image_0.png", PNG
    if count > 1:
        import zipfile

        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as files:
            for number in range(count):
                files.writestr(f"image_{number}.png", PNG)
        kind, name, content = "application/zip", "images.zip", archive.getvalue()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n"
        f'content-disposition: attachment; filename="{name}"\r\n\r\n'
    )
    writer.write(head.encode() + content)
    return True


async def _stream(
    fake: "Fake", writer: asyncio.StreamWriter, media_type: str, pieces: Sequence[bytes]
) -> bool:
    head = f"content-type: {media_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(b"HTTP/1.1 200 OK\r\n" + head.encode())
    for piece in pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(fake.pace_s)
    writer.write(b"0\r\n\r\n")
    return True


def _refuse(fake: "Fake", writer: asyncio.StreamWriter, message: str, status: int) -> bool:
    told = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return fake.plain(writer, json.dumps({"error": told}).encode(), status)
