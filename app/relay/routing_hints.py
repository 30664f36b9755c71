"""The hints of a request for routing policies: its session and its prompt, read on demand.

Members of the body are compared as the client wrote them: a client writes the beginning of a
conversation the same way each time, and nothing it writes can do more than choose a replica.
"""

from collections.abc import Callable

import msgspec

from app.asgi import ClientExchange
from app.errors import Dialect
from app.request_body import ParsedBody
from app.routing import ReportedTokens
from app.settings import SlotsPerEngine

# Headers that name a session, the first one first: any client's, then what coding agents send by
# themselves, one for each conversation.
SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",  # Claude Code, from 2.1.86
    b"session-id",  # Codex
    b"session_id",  # Codex before that, and pi
    b"x-session-affinity",  # OpenCode and pi
    b"x-opencode-session",  # OpenCode, to providers of its own
)
# OpenAI's, the newer one first. Of Anthropic's `metadata` nothing is defined but `user_id`.
SESSION_MEMBERS = ("prompt_cache_key", "user")
ANTHROPIC_MEMBERS = ("metadata",)
# In the order in which chat templates join them.
PROMPT_MEMBERS = ("tools", "system", "instructions", "messages", "input", "prompt")
NULL = b"null"
# Bytes of a session's name that count.
MAX_SESSION_BYTES = 1024


class RequestHints(msgspec.Struct, eq=False):
    """Implements `app.routing.RoutingHints`; made only where a policy has a choice."""

    exchange: ClientExchange
    key_id: str
    body: ParsedBody
    # Separates vLLM's prefix caches: equal prompts under two salts share nothing.
    salt: bytes = b""
    # The LoRA adapter that it is for; prompts for two share nothing, either.
    adapter: str | None = None
    slots: SlotsPerEngine | None = None
    # Written by the policy that the hints are made for.
    uncached_tokens: int = 0
    on_end: Callable[[ReportedTokens | None], None] | None = None

    def session(self) -> bytes:
        """Return the session's name, prefixed with the key's ID.

        Clients name their sessions "1" or "default"; equal names of two keys are two sessions.
        """
        return self.key_id.encode() + b"\0" + self._session()

    def _session(self) -> bytes:
        for name in SESSION_HEADERS:
            if header := self.exchange.header(name):
                return header
        anthropic = self.exchange.dialect is Dialect.ANTHROPIC
        for member in ANTHROPIC_MEMBERS if anthropic else SESSION_MEMBERS:
            if (raw := self.body.members.get(member)) is not None:
                value = bytes(memoryview(raw)[:MAX_SESSION_BYTES])
                if value != NULL:
                    return value
        return b""

    def prompt(self, most: int) -> bytes:
        """Return the first `most` bytes of the prompt's members; b"" for a form.

        The closing bracket of a conversation moves as it grows; the bytes before it stay.
        """
        members = self.body.members
        prompt = self.salt or bytes(members.get("cache_salt", b""))
        if self.adapter is not None:
            prompt = self.adapter.encode() + b"\0" + prompt
        for name in PROMPT_MEMBERS:
            if name in members:
                prompt += memoryview(members[name])[: most - len(prompt)]
        return prompt
