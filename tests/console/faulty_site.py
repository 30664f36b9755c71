"""A site of a few pages, each with at most one fault."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HTML = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Test</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">{head}</head>
<body><main><h1>Test</h1>{body}</main></body></html>"""


def html(body: str, head: str = "") -> str:
    """Return a page without faults around a body."""
    return _HTML.format(body=body, head=head)


def scripted(script: str) -> dict[str, tuple[str, str]]:
    """Return a page at / that runs a script of its own origin."""
    return {
        "/": ("text/html", html("", '<script type="module" src="/script.js"></script>')),
        "/script.js": ("text/javascript", script),
    }


@asynccontextmanager
async def serving(files: dict[str, tuple[str, str]]) -> AsyncIterator[str]:
    """Serve files by path, each of a media type and a text; yield the origin."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            kind, text = files.get(path, ("text/plain", "not found"))
            body = text.encode()
            fields = (
                f"HTTP/1.1 {200 if path in files else 404} Status",
                f"content-type: {kind}",
                f"content-length: {len(body)}",
                f"content-security-policy: {POLICY}",
                "cache-control: no-store",
                "connection: close",
            )
            writer.write("\r\n".join(fields).encode() + b"\r\n\r\n" + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
