"""`vllm-gateway reload`: have a running gateway read its configuration again."""

from typing import Annotated

import msgspec
import typer

from app.cli.faults import fail

# The answer comes when the engines that changed are up, which they bound themselves.
CONNECT_S = 10.0
# What ended otherwise than asked for, though nothing of the call was wrong.
EXIT_FAILED = 1


class Answer(msgspec.Struct):
    """What POST /admin/reload answers, as far as it is needed here."""

    ok: bool
    lines: list[str]


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def reload(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    url: Annotated[
        str, typer.Option(envvar="GATEWAY_URL", help="Where the gateway listens.")
    ] = "http://127.0.0.1:8000",
    admin_key: Annotated[
        str,
        typer.Option(envvar="GATEWAY_ADMIN_KEY", show_envvar=False, help="From GATEWAY_ADMIN_KEY."),
    ] = "",
) -> None:
    """Read the configuration again and apply what differs; the rest goes on undisturbed."""
    body = _ask(url, admin_key, dry_run)
    try:
        answer = msgspec.json.decode(body, type=Answer)
        if as_json:
            print(msgspec.json.format(body, indent=2).decode())
    except (msgspec.DecodeError, UnicodeDecodeError):
        fail("the answer is not that of a gateway: is another server at --url?")
    if not as_json:
        for line in answer.lines:
            print(_shown(line))
    if not answer.ok:
        raise SystemExit(EXIT_FAILED)


def _ask(url: str, admin_key: str, dry_run: bool) -> bytes:
    """Return the gateway's answer; a fault ends the command, a line each, without the key."""
    import httpx

    if not admin_key:
        fail("the admin key is missing: set GATEWAY_ADMIN_KEY or give --admin-key")
    if not (admin_key.isascii() and admin_key.isprintable()):
        fail("the admin key holds a character that a header cannot carry")
    try:
        where = httpx.URL(url).join("/admin/reload")
        if where.scheme not in ("http", "https") or not where.host:
            fail("--url must be such as http://127.0.0.1:8000")
        shown = f"{where.scheme}://{where.netloc.decode()}"  # without a password
        answer = httpx.post(
            where,
            json={"dry_run": dry_run},
            headers={"authorization": f"Bearer {admin_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
    except httpx.InvalidURL:
        fail("--url must be such as http://127.0.0.1:8000")
    except httpx.HTTPError as error:
        fail(f"no answer from {shown}: {str(error) or type(error).__name__}")
    if not answer.is_success:
        fail(*_refusal(shown, answer.status_code, answer.content))
    return answer.content


def _refusal(where: str, status: int, body: bytes) -> list[str]:
    """Return what an error object says, for a terminal."""
    try:
        message = msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = "is that a gateway?"
    first, *more = message.splitlines() or [""]
    return [f"{where} answers {status}: {_shown(first)}", *map(_shown, more)]


def _shown(text: str) -> str:
    """Return a text without what would steer a terminal or break a line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
