"""A message and its body in each form: generic, Slack, Feishu and Microsoft Teams. Pure.

The forms of the chats hold one text. What clients and operators have named is in it, so whatever a
chat takes for a mention, a link or formatting is made harmless.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from app.settings import WebhookFormat

# Characters of the longest text.
MAX_TEXT = 4_000
# Bytes of the longest message to a chat: Feishu takes 20 KB, Teams 28 KB, Slack 40,000 characters.
# An escaped character has up to twelve.
MAX_CHAT_BYTES = 20_000
_SLACK = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# Formatting in a TextBlock of an Adaptive Card.
_MARKDOWN = re.compile(r"([\\`*_\[\]#~])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What happened; every attempt to deliver it has the same ID and body."""

    id: str
    kind: str  # such as engine.failed
    at_s: float  # seconds since 1970
    data: Mapping[str, Any]
    text: str  # for people, in one line

    def body(self, form: WebhookFormat = "generic") -> bytes:
        """Return the body in a form."""
        text = self.text[:MAX_TEXT]
        body = json.dumps(self._content(form, text)).encode()
        while form != "generic" and len(body) > MAX_CHAT_BYTES:
            text = text[: len(text) * MAX_CHAT_BYTES // len(body)]
            body = json.dumps(self._content(form, text)).encode()
        return body

    def _content(self, form: WebhookFormat, text: str) -> dict[str, Any]:
        match form:
            case "slack":
                return {"text": "".join(_SLACK.get(c, c) for c in text)}
            case "feishu":
                # Tags such as <at> are mentions, and nothing escapes them.
                return {"msg_type": "text", "content": {"text": text.replace("<", "‹")}}
            case "teams":
                return _teams_card(_MARKDOWN.sub(r"\\\1", text))
            case _:
                moment = datetime.fromtimestamp(self.at_s, UTC)
                return {"type": self.kind, "timestamp": written_time(moment), "data": self.data}


def written_time(moment: datetime) -> str:
    """Return a time in RFC 3339 with milliseconds."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _teams_card(text: str) -> dict[str, Any]:
    """Return a message with an Adaptive Card, as webhooks of Teams' workflows take it."""
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "TextBlock", "text": text, "wrap": True}],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}
