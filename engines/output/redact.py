"""What must not be shown of an engine's command line, its log and its errors. Pure.

vLLM takes secrets as flags (`--hf-token`) and writes its flags into its log (`non-default args`),
so both are shown with `***` in the place of whatever is named like a secret.
"""

import json
import re
import shlex

HIDDEN = "***"
# The words of a name: `hf-token`, `HF_TOKEN` and `hfToken` have the same two.
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRETS = frozenset(
    {
        "apikey", "apikeys", "authorization", "credential", "credentials", "key", "keys",
        "passphrase", "passwd", "password", "passwords", "secret", "secrets", "token",
    }
)  # fmt: skip
# What `--long-prefill-token-threshold=512` and `eos_token_id: 2` have, and no secret is.
_HARMLESS = re.compile(r"-?\d+(?:\.\d+)?|none|null|true|false", re.IGNORECASE)
# "KeyError: 'layers.0'" names a class, not a key.
_CLASS = re.compile(r"(?:Error|Exception|Warning)$")
# Passwords that are one word with what stands before them (PGPASSWORD), and short ones, which mean
# something else in lower case (`pass_config`).
_ENDINGS = ("password", "passwd")
_SHORT = re.compile(r"[A-Z][A-Z0-9_]*_(?:PASS|PAT|PWD)")
# Without the slash that the next beginning needs: what one match has read, no other reads. A
# password may hold an @: the last one ends it.
_USERINFO = re.compile(r"(?<=://)[^\s/@'\":]*+:[^\s/'\"]*(?=@)")
# name=, 'name': and --name before a value.
_NAME = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z][\w.-]{0,63})"
    r"(?P<between>[\"']?\s{0,4}[:=]\s{0,4}|[ ]{1,4})"
)
# What is secret by its form, whatever stands before it: keys in the style of OpenAI's and ours,
# the tokens of Hugging Face, GitHub, GitLab and AWS, secrets of webhooks, credentials of a header
# (RFC 9110, section 11.6.2).
_FORM = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|whsec_[A-Za-z0-9+/]{16,}=*)"
    r"|(?:(?<=\bBearer )|(?<=\bBasic ))[\w.~+/-]{8,}=*",
    re.ASCII | re.IGNORECASE,
)
# What ends a value that begins with one of these; any other is one word.
_CLOSING = {"[": "]", '"': '"', "'": "'"}
_BARE = re.compile(r"[^\s,;)}\]]+")


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a flag, a variable or a field of that name holds something to hide."""
    if _CLASS.search(name):
        return False
    words = {word.lower() for word in _WORD.findall(name)}
    found = words & _SECRETS
    if found == {"token"} and _HARMLESS.fullmatch(value.strip("'\"")):
        return False
    return bool(found) or name.lower().endswith(_ENDINGS) or _SHORT.fullmatch(name) is not None


def hidden_by_form(text: str) -> str:
    """Return a text without what is secret whatever stands before it: keys, credentials of URLs."""
    return _FORM.sub(HIDDEN, _USERINFO.sub(HIDDEN, text))


def hidden(line: str) -> str:
    """Return a line of a log or an error without the values of secrets, in linear time."""
    line = hidden_by_form(line)
    shown: list[str] = []
    at = done = 0
    absent: set[str] = set()
    while found := _NAME.search(line, at):
        at, start, name = found.end("name"), found.end(), found["name"]
        # With nothing but a blank between them it must be a flag: prose has keys and tokens too.
        flag = name.startswith("--") and line[start : start + 1] != "-"
        # The name is judged first: reading the value of every name would be quadratic.
        if not ((found["between"].strip() or flag) and is_secret(name)):
            continue
        end = _end_of_value(line, start, absent)
        if end > start and is_secret(name, line[start:end]):
            shown += (line[done:start], HIDDEN)
            at = done = end
    return "".join((*shown, line[done:]))


def _end_of_value(line: str, start: int, absent: set[str]) -> int:
    """Return the end of the value that begins at `start`; `start` if there is none.

    `absent` collects the closing characters that the rest of the line does not contain, so that
    each is searched for in vain only once.
    """
    closing = _CLOSING.get(line[start : start + 1])
    if closing is not None and closing not in absent:
        end = line.find(closing, start + 1)
        if end >= 0:
            return end + 1
        absent.add(closing)
    bare = _BARE.match(line, start)
    return bare.end() if bare else start


def command(text: str) -> str:
    """Return a command line, as a shell reads it, without the values of secrets."""
    try:
        words = shlex.split(text)
    except ValueError:
        return hidden(text)
    shown: list[str] = []
    flag = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            flag = "" if equals else name
            shown.append(f"{name}={_value(name, value)}" if equals else name)
        else:
            shown.append(_value(flag, word))
    return text if shown == words else shlex.join(shown)


def variable(name: str, value: str) -> str:
    """Return an environment variable as a shell would set it, the value of a secret hidden."""
    shown = hidden(_value(name, value))
    return f"{name}={shown if shown == HIDDEN else shlex.quote(shown)}"


def _value(flag: str, value: str) -> str:
    if is_secret(flag, value):
        return HIDDEN
    if value.startswith(("{", "[")):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return hidden(value)
        clean = _members(read)
        return value if clean == read else json.dumps(clean)
    return _USERINFO.sub(HIDDEN, value)


def _members(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: HIDDEN if is_secret(name, str(member)) else _members(member)
            for name, member in value.items()
        }
    if isinstance(value, list):
        return [_members(member) for member in value]
    return _USERINFO.sub(HIDDEN, value) if isinstance(value, str) else value
