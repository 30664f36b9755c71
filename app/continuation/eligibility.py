"""Decides how a stream can go on at another engine. Pure.

*Replay*: the IDs of the prompt and of the answer so far become the prompt. Nothing is computed
twice but the prefill, and a sampled answer goes on as it began. It is exact only if the rest of an
answer depends on these IDs alone, so a request is replayed only if every field that it sets is in
the table below: a field that vLLM may add later is in none.

*Verify*: the same request is sent again, and its answer is compared with what the client has. It
needs an engine that gives the same answer again: a greedy request, or one with a seed.

| in the request                                    | why it cannot be replayed                    |
|---------------------------------------------------|----------------------------------------------|
| `n`, `best_of`, several prompts                   | each answer has its own state                |
| `response_format`, `structured_outputs`           | a grammar reads the output only              |
| a tool that `tool_choice` forces                  | likewise                                     |
| `stop`                                            | text is held back, so IDs and text differ    |
| `frequency_penalty`, `presence_penalty`           | they count the output only                   |
| `bad_words`, `thinking_token_budget`              | likewise                                     |
| `seed`, unless greedy                             | the state of the random numbers is lost      |
| `echo`, `include_reasoning: false`                | vLLM withholds or changes IDs or text        |
| `logprobs` of completions                         | offsets in the text would start anew         |
| images, audio, video, `prompt_embeds`             | the prompt is more than its IDs              |
| `kv_transfer_params`, `truncate_prompt_tokens`    | they would apply to the answer as well       |
| `/v1/messages`, `/v1/responses`                   | they take no IDs                             |
| an engine before vLLM 0.32                        | its chats take no IDs; a null `max_tokens`   |
|                                                   | of completions is another limit              |
| any other field                                   | unknown                                      |

A tool call that has begun cannot be replayed either: the parser's state is lost. Beam search and
responses that the engine stores are never continued.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import msgspec

from engines.base import EngineFacts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDPOINTS = frozenset({CHAT, COMPLETIONS, "/v1/messages", "/v1/responses"})
# The first vLLM on which a replay was measured to be exact; see `replay.py`.
_FIRST_WITH_IDS = (0, 32)
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
# vLLM's `_SAMPLING_EPS`: sampling with a lower temperature is greedy.
GREEDY_BELOW = 1e-5
DEFAULT_TEMPERATURE = 1.0

# Fields with which a replay is exact, whatever their value.
_EXACT = frozenset(
    {
        "model", "messages", "prompt", "stream", "stream_options", "stream_interval", "user",
        "temperature", "top_p", "top_k",
        "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids", "stop_token_ids",
        "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens",
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "documents", "reasoning_effort", "tools", "parallel_tool_calls", "return_token_ids",
        "return_tokens_as_token_ids", "return_prompt_text", "priority", "request_id", "cache_salt",
        "session_id", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "verbosity",
    }
)  # fmt: skip
_NULL = b"null"
ABSENT = (b"", _NULL)
# vLLM reads a number in a string as well.
WHOLE_NUMBER = msgspec.json.Decoder(int, strict=False)
_temperature = msgspec.json.Decoder(float | None)


class _Kind(msgspec.Struct):
    type: str = ""


class _Part(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None


_kind = msgspec.json.Decoder(_Kind)
# Bytes of a member that are parsed at once.
MAX_PARSED = 256 * 1024
_SEVERAL = re.compile(rb'\[[ \t\r\n]*+["\[]')
_messages = msgspec.json.Decoder(list[_Message])


class Ways(msgspec.Struct, frozen=True):
    """The ways in which a stream can go on."""

    replay: bool = False
    verify: bool = False
    # Why it cannot be replayed, one of a bounded number of words; "" where it can.
    reason: str = ""

    @property
    def any(self) -> bool:
        return self.replay or self.verify


def choose_ways(
    endpoint: str,
    names: Iterable[str],
    value: Callable[[str], bytes],
    facts: EngineFacts,
    *,
    stored: bool = False,
) -> Ways:
    """Return how a stream can go on.

    `endpoint` is its label, `names` are those of the request's members, and `value` returns a
    member as the engine gets it, encoded, b"" if there is none. `facts` are the engine's. `stored`:
    the engine stores the response.
    """
    if endpoint not in ENDPOINTS:
        return Ways(reason="endpoint")
    if stored:
        return Ways(reason="stored")
    if value("use_beam_search") not in (*ABSENT, b"false"):
        return Ways(reason="beam_search")
    greedy = _is_greedy(value("temperature"), facts)
    seeded = value("seed") not in ABSENT
    # Their lists in the chunks are not compared.
    asks_ids = value("return_token_ids") not in (*ABSENT, b"false")
    reason = _why_not_replayed(endpoint, names, value, greedy=greedy)
    # Before, null was no limit of a completion, and a limit has to be reduced.
    by_version = endpoint == CHAT or value("max_tokens") == _NULL
    if not reason and by_version and not takes_prompt_ids(facts):
        reason = "version"
    return Ways(replay=not reason, verify=(greedy or seeded) and not asks_ids, reason=reason)


def _why_not_replayed(
    endpoint: str, names: Iterable[str], value: Callable[[str], bytes], *, greedy: bool
) -> str:
    """Return why a request cannot be replayed; "" where it can."""
    if endpoint not in (CHAT, COMPLETIONS):
        return "endpoint"
    for name in names:
        if name in _EXACT or (encoded := value(name)) in ABSENT:
            continue
        if name not in _CONDITIONAL:
            return "other_field"
        word, is_exact = _CONDITIONAL[name]
        if not is_exact(encoded) and not (name == "seed" and greedy):
            return word
    if endpoint == CHAT:
        return "media" if _has_media(value("messages")) else ""
    if _is_several_prompts(value("prompt")):
        return "several_choices"
    return "" if value("logprobs") in ABSENT else "logprobs"


def takes_prompt_ids(facts: EngineFacts) -> bool:
    """Return whether an engine takes token IDs in place of a chat's messages.

    An engine that says so by its version and then does not is found out by its first answer
    (`replay.Splice`).
    """
    found = _VERSION.match(facts.version or "")
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_WITH_IDS


def _one_of(*values: bytes) -> Callable[[bytes], bool]:
    return frozenset(values).__contains__


def _is_zero(value: bytes) -> bool:
    try:
        return bool(_temperature.decode(value) == 0)
    except msgspec.DecodeError:
        return False


def _is_whole(value: bytes) -> bool:
    try:
        WHOLE_NUMBER.decode(value)
    except msgspec.DecodeError:
        return False
    return True


def _is_text(value: bytes) -> bool:
    if len(value) > MAX_PARSED:
        return False
    try:
        return _kind.decode(value).type == "text"
    except msgspec.DecodeError:
        return False


_is_one = _one_of(b"1")
_is_false = _one_of(b"false")
_is_empty = _one_of(b"[]", b'""', b"{}")
# Fields with which a replay is exact for some values: the word for the others, and the rule.
_CONDITIONAL: Mapping[str, tuple[str, Callable[[bytes], bool]]] = MappingProxyType(
    {
        # They are reduced by the answer so far. vLLM reads more forms of a number.
        "max_tokens": ("other_field", _is_whole),
        "max_completion_tokens": ("other_field", _is_whole),
        "min_tokens": ("other_field", _is_whole),
        "n": ("several_choices", _is_one),
        "best_of": ("several_choices", _is_one),
        "response_format": ("structured_output", _is_text),
        "structured_outputs": ("structured_output", _is_empty),
        "tool_choice": ("forced_tool", _one_of(b'"auto"', b'"none"')),
        "stop": ("stop", _is_empty),
        "include_stop_str_in_output": ("stop", _is_false),
        "frequency_penalty": ("penalties", _is_zero),
        "presence_penalty": ("penalties", _is_zero),
        "bad_words": ("bad_words", _is_empty),
        "thinking_token_budget": ("thinking_budget", _is_empty),
        "seed": ("seed", _is_empty),
        "echo": ("echo", _is_false),
        "include_reasoning": ("hidden_reasoning", _one_of(b"true")),
        # Completions have a number here, which is refused below.
        "logprobs": ("logprobs", lambda _: True),
        "top_logprobs": ("logprobs", lambda _: True),
        "use_beam_search": ("beam_search", _is_false),
        "prompt_embeds": ("media", _is_empty),
        "suffix": ("other_field", _is_empty),
        "kv_transfer_params": ("kv_transfer", _is_empty),
        "truncate_prompt_tokens": ("truncation", _is_empty),
    }
)
# Every word that `Ways.reason` can be.
REASONS = frozenset(
    {"endpoint", "stored", "beam_search", "media", "other_field", "version"}
    | {word for word, _ in _CONDITIONAL.values()}
)


def _is_greedy(temperature: bytes, facts: EngineFacts) -> bool:
    """Return whether an engine takes the likeliest token each time."""
    try:
        found = _temperature.decode(temperature or _NULL)
    except msgspec.DecodeError:
        return False  # vLLM reads a number in a string as well; this one need not be continued
    if found is None:
        default = (facts.sampling_defaults or {}).get("temperature")
        found = float(default) if isinstance(default, (int, float)) else DEFAULT_TEMPERATURE
    return bool(found < GREEDY_BELOW)


def _is_several_prompts(prompt: bytes) -> bool:
    """Return whether a completion's prompt is a list of prompts, not a text or a list of IDs."""
    return _SEVERAL.match(prompt) is not None


def _has_media(messages: bytes) -> bool:
    """Return whether the messages of a chat have other content than text, as far as is known."""
    if messages.find(b'"type"') < 0:
        return False
    if len(messages) > MAX_PARSED:
        return True
    try:
        found = _messages.decode(messages)
    except msgspec.DecodeError:
        return True  # of a shape that is not known
    return any(
        isinstance(part, _Part) and part.type != "text"
        for message in found
        if isinstance(message.content, list)
        for part in message.content
    )
