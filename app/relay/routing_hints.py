"""What of a request tells a routing policy where it belongs; nothing is read before it asks.

Members of the body are taken as the client wrote them. A client writes the same beginning of a
conversation alike each time, and whatever it writes can do no more than choose a replica.
"""

from app.asgi import ClientExchange
from app.errors import Dialect
from app.relay.body import ParsedBody

SESSION_HEADER = b"x-session-id"
# OpenAI's, the newer one first. Of Anthropic's `metadata` nothing is defined but `user_id`.
SESSION_MEMBERS = ("prompt_cache_key", "user")
ANTHROPIC_MEMBERS = ("metadata",)
# In the order in which chat templates put them together.
PROMPT_MEMBERS = ("tools", "system", "instructions", "messages", "input", "prompt")
NULL = b"null"
# What follows in the name of a session does not tell it from others.
LONGEST_SESSION = 1024


class RequestHints:
    """See `app.routing.policies.Clues`."""

    __slots__ = ("_body", "_exchange", "_key_id", "_salt")

    def __init__(
        self, exchange: ClientExchange, key_id: str, body: ParsedBody, salt: bytes = b""
    ) -> None:
        """`salt` keeps vLLM's caches apart: what begins alike under two salts is not shared."""
        self._exchange = exchange
        self._key_id = key_id
        self._body = body
        self._salt = salt

    def session(self) -> bytes:
        """Return the name of the session, after the key's id: keys do not share sessions.

        Clients call their sessions 1 or default; those of two keys have nothing in common.
        """
        return self._key_id.encode() + b"\0" + self._session()

    def _session(self) -> bytes:
        if header := self._exchange.header(SESSION_HEADER):
            return header
        anthropic = self._exchange.dialect is Dialect.ANTHROPIC
        for name in ANTHROPIC_MEMBERS if anthropic else SESSION_MEMBERS:
            if (raw := self._body.members.get(name)) is not None:
                value = bytes(memoryview(raw)[:LONGEST_SESSION])
                if value != NULL:
                    return value
        return b""

    def prompt(self, most: int) -> bytes:
        """Return the first `most` bytes of what makes up the prompt; none of a form.

        The end of a conversation's JSON, a bracket, is another when it goes on; what is before it
        stays.
        """
        members = self._body.members
        prompt = self._salt or bytes(members.get("cache_salt", b""))
        for name in PROMPT_MEMBERS:
            if name in members:
                prompt += memoryview(members[name])[: most - len(prompt)]
        return prompt
