"""The delivery of messages to one URL, and the schedule of its attempts.

Generic messages are signed according to the Standard Webhooks specification
(https://www.standardwebhooks.com, v1). The URL may hold a secret: it is in no log.
"""

import asyncio
import base64
import hmac
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from app.settings import AlertsSettings
from app.webhook.message import Message

if TYPE_CHECKING:  # imported only where alerts are sent: 8 MiB
    import httpx

# Timeout of one attempt, and connections at a time.
ATTEMPT_S = 10.0
CONNECTIONS = 8
# Doubled with every attempt: ten attempts in the first hour and a half, then one an hour.
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 3600.0
# Bytes that are read of an answer, and characters of the reason in it that are logged.
MAX_ANSWER = 4_096
MAX_REASON = 200
# The last attempt is some twelve hours after the first.
MAX_ATTEMPTS = 20


class _FeishuAnswer(msgspec.Struct):
    code: int = 0
    msg: str = ""


class Webhook:
    """Sends messages to the configured URL."""

    def __init__(
        self,
        settings: AlertsSettings,
        *,
        clock: Callable[[], float] = time.time,
        attempt_s: float = ATTEMPT_S,
    ) -> None:
        assert settings.webhook_url is not None
        self._url = settings.webhook_url.get_secret_value()
        self._format = settings.webhook_format
        self._keys = settings.signing_keys()
        self._clock = clock
        self._attempt_s = attempt_s
        self._transport: httpx.AsyncBaseTransport | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        """Return where messages go, without the path, which may be a secret."""
        parts = urlsplit(self._url)
        return f"<Webhook {parts.scheme}://{parts.hostname}>"

    async def close(self) -> None:
        """Close its connections."""
        if self._transport is not None:
            await self._transport.aclose()

    async def send(self, message: Message) -> str | None:
        """Make one attempt; return why the message was not delivered, None if it was."""
        transport = await self._opened()  # before the import, which takes long the first time
        import httpx

        body = message.body(self._format)
        headers = {"content-type": "application/json", "user-agent": "vllm-gateway"}
        if self._format == "generic":
            headers |= signature_headers(message.id, int(self._clock()), body, self._keys)
        try:
            request = httpx.Request("POST", self._url, headers=headers, content=body)
            async with asyncio.timeout(self._attempt_s):
                # Not by a client, which would log the URL. A redirect is an answer like others.
                response = await transport.handle_async_request(request)
                try:
                    said = await _start_of(response) if self._format == "feishu" else b""
                finally:
                    await response.aclose()
        except TimeoutError:
            return f"no answer within {self._attempt_s:g} s"
        except Exception as error:  # noqa: BLE001 - none of them may end the sending of others
            words = str(error) if isinstance(error, httpx.TransportError) else ""
            return f"{type(error).__name__} {words}".strip()
        if not response.is_success:
            return f"the receiver answered {response.status_code}"
        return feishu_refusal(said)

    async def _opened(self) -> "httpx.AsyncBaseTransport":
        async with self._opening:
            if self._transport is None:
                # Reading the certificates of authorities takes 20 ms.
                self._transport = await asyncio.to_thread(_transport)
            return self._transport


async def _start_of(response: "httpx.Response") -> bytes:
    """Return up to MAX_ANSWER bytes of a body."""
    start = b""
    async for piece in response.aiter_bytes():
        start += piece
        if len(start) >= MAX_ANSWER:
            break
    return start[:MAX_ANSWER]


def feishu_refusal(body: bytes) -> str | None:
    """Return why Feishu refused a message that it answered with 200; None: it took it.

    Its custom bots answer `{"code": 19024, "msg": "Key Words Not Found"}`, and 0 for success:
    https://open.feishu.cn/document/client-docs/bot-v3/add-custom-bot
    """
    try:
        answer = msgspec.json.decode(body, type=_FeishuAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not answer.code:
        return None
    return f"the receiver answered code {answer.code}: {answer.msg[:MAX_REASON]!r}"


def signature_headers(
    webhook_id: str, at_s: int, body: bytes, keys: Sequence[bytes]
) -> dict[str, str]:
    """Return the headers that identify a message sent at a moment, with a signature by each key."""
    signed = b"%b.%d.%b" % (webhook_id.encode(), at_s, body)
    signatures = (base64.b64encode(hmac.digest(key, signed, sha256)).decode() for key in keys)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }


def pause_s(attempts: int, chance: float) -> float | None:
    """Return the seconds until the next attempt; None: there is none.

    Exponential backoff with jitter: `chance`, from 0 to 1, takes off up to half, so that messages
    that failed together are not retried together.
    """
    if attempts >= MAX_ATTEMPTS:
        return None
    longest_s: float = min(FIRST_PAUSE_S * 2 ** (attempts - 1), MAX_PAUSE_S)
    return longest_s * (1 - chance / 2)


def _transport() -> "httpx.AsyncBaseTransport":
    import httpx

    return httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=CONNECTIONS))
