"""Redacts secrets in engines' command lines, logs and errors. Pure.

vLLM takes secrets as flags (`--hf-token`) and logs its flags (`non-default args`), so in both the
value of everything that is named like a secret is shown as `***`.
"""

import json
import re
import shlex
from functools import lru_cache

REDACTED = "***"
# The words of a name: `hf-token`, `HF_TOKEN` and `hfToken` have the same two.
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRETS = frozenset(
    {
        "apikey", "apikeys", "authorization", "credential", "credentials", "key", "keys",
        "passphrase", "passwd", "password", "passwords", "secret", "secrets", "token",
    }
)  # fmt: skip
# Values as in `--long-prefill-token-threshold=512` and `eos_token_id: 2`, which are no secrets.
_HARMLESS = re.compile(r"-?\d+(?:\.\d+)?|none|null|true|false", re.IGNORECASE)
# "KeyError: 'layers.0'" names a class, not a key.
_CLASS = re.compile(r"(?:Error|Exception|Warning)$")
# Names with a prefix in the same word (PGPASSWORD), and short ones, which mean something else in
# lower case (`pass_config`).
_ENDINGS = ("password", "passwd")
_SHORT = re.compile(r"[A-Z][A-Z0-9_]*_(?:PASS|PAT|PWD)")
# No slash, which the next match would need: no text is read by two matches. A password may contain
# an @: the last one ends it.
_USERINFO = re.compile(r"(?<=://)[^\s/@'\":]*+:[^\s/'\"]*(?=@)")
# name=, 'name': and --name before a value.
_NAME = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z][\w.-]{0,63})"
    r"(?P<between>[\"']?\s{0,4}[:=]\s{0,4}|[ ]{1,4})"
)
# Secrets by their form, under any name: keys in the style of OpenAI's and ours, tokens of Hugging
# Face, GitHub, GitLab and AWS, webhook secrets, credentials of a header (RFC 9110, section 11.6.2).
_FORM = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|whsec_[A-Za-z0-9+/]{16,}=*)"
    r"|(?:(?<=\bBearer )|(?<=\bBasic ))[\w.~+/-]{8,}=*",
    re.ASCII | re.IGNORECASE,
)
# The end of a value, by its first character; any other value is one word.
_CLOSING = {"[": "]", '"': '"', "'": "'"}
_BARE = re.compile(r"[^\s,;)}\]]+")


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a flag, variable or field of this name and value is a secret."""
    if _CLASS.search(name):
        return False
    words = {word.lower() for word in _WORD.findall(name)}
    found = words & _SECRETS
    if found == {"token"} and _HARMLESS.fullmatch(value.strip("'\"")):
        return False
    return bool(found) or name.lower().endswith(_ENDINGS) or _SHORT.fullmatch(name) is not None


def redact_by_form(text: str) -> str:
    """Redact what is secret by its form, under any name: keys, credentials in URLs."""
    return _FORM.sub(REDACTED, _USERINFO.sub(REDACTED, text))


def redact_line(line: str) -> str:
    """Redact the values of secrets in a line of a log or an error, in linear time."""
    line = redact_by_form(line)
    shown: list[str] = []
    at = done = 0
    absent: set[str] = set()
    while found := _NAME.search(line, at):
        at, start, name = found.end("name"), found.end(), found["name"]
        # With only a blank in between it must be a flag: prose contains keys and tokens, too.
        flag = name.startswith("--") and line[start : start + 1] != "-"
        # The name is checked first: reading the value of every name would be quadratic.
        if not ((found["between"].strip() or flag) and is_secret(name)):
            continue
        end = _end_of_value(line, start, absent)
        if end > start and is_secret(name, line[start:end]):
            shown += (line[done:start], REDACTED)
            at = done = end
    return "".join((*shown, line[done:]))


def _end_of_value(line: str, start: int, absent: set[str]) -> int:
    """Return the end of the value that begins at `start`; `start` if there is none.

    `absent` collects the closing characters that the rest of the line does not contain, so that
    each is searched for only once.
    """
    closing = _CLOSING.get(line[start : start + 1])
    if closing is not None and closing not in absent:
        end = line.find(closing, start + 1)
        if end >= 0:
            return end + 1
        absent.add(closing)
    bare = _BARE.match(line, start)
    return bare.end() if bare else start


@lru_cache(maxsize=1024)  # pages read those of all engines every second: 1 ms each
def redact_command(text: str) -> str:
    """Redact the values of secrets in a command line, as a shell reads it."""
    try:
        words = shlex.split(text)
    except ValueError:
        return redact_line(text)
    shown: list[str] = []
    flag = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            flag = "" if equals else name
            shown.append(f"{name}={_redact_value(name, value)}" if equals else name)
        else:
            shown.append(_redact_value(flag, word))
    return text if shown == words else shlex.join(shown)


def redact_variable(name: str, value: str) -> str:
    """Return an environment variable as a shell would set it, with a secret value redacted."""
    shown = redact_line(_redact_value(name, value))
    return f"{name}={shown if shown == REDACTED else shlex.quote(shown)}"


def _redact_value(flag: str, value: str) -> str:
    if is_secret(flag, value):
        return REDACTED
    if value.startswith(("{", "[")):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return redact_line(value)
        clean = _redact_members(read)
        return value if clean == read else json.dumps(clean)
    return _USERINFO.sub(REDACTED, value)


def _redact_members(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: REDACTED if is_secret(name, str(member)) else _redact_members(member)
            for name, member in value.items()
        }
    if isinstance(value, list):
        return [_redact_members(member) for member in value]
    return _USERINFO.sub(REDACTED, value) if isinstance(value, str) else value
