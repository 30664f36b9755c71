"""What a `docker run` or `podman run` gives to a server: image, variables, ports, paths, GPUs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from app.importing.shell import assignment

PROGRAMS = frozenset({"docker", "podman", "nerdctl"})
# Options of `run` that take no value; every other takes one.
_SWITCHES = frozenset(
    {
        "--detach", "--disable-content-trust", "--init", "--interactive", "--no-healthcheck",
        "--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "--read-only",
        "--replace", "--rm", "--sig-proxy", "--tty",
    }
)  # fmt: skip
_SHORT_SWITCHES = re.compile(r"-[ditqP]+")
_LONG = {"-e": "--env", "-p": "--publish", "-v": "--volume"}


@dataclass(slots=True)
class Container:
    """A container as far as an engine outside of one needs it."""

    image: str = ""
    words: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)  # path on the host by path inside
    host: str | None = None
    port: int | None = None
    gpus: int | list[int] | None = None
    notes: list[str] = field(default_factory=list)

    def on_host(self, path: str) -> str:
        """Return where a path inside of the container is on the host; other texts as they are."""
        for inside, outside in self.volumes.items():
            if path == inside or path.startswith(f"{inside.rstrip('/')}/"):
                return outside.rstrip("/") + path[len(inside.rstrip("/")) :]
        return path


def read(words: list[str]) -> Container | None:
    """Return the container that a command runs, None for another command such as `stop`."""
    before = list(takewhile(lambda word: word != "run", words[1:3]))
    if words[len(before) + 1 : len(before) + 2] != ["run"]:
        return None
    rest = words[len(before) + 2 :]
    rest.reverse()  # the next word is the last
    box = Container()
    while rest and rest[-1].startswith("-"):
        word = rest.pop()
        if re.match(r"-[epv].", word):
            option, value = word[:2], word[2:].removeprefix("=")
        else:
            option, joined, value = word.partition("=")
            if option in _SWITCHES or _SHORT_SWITCHES.fullmatch(word):
                continue
            if not joined:
                value = rest.pop() if rest else ""
        _set(box, _LONG.get(option, option), value)
    if not rest:
        return None
    box.image = rest.pop()
    box.words = rest[::-1]
    return box


def _set(box: Container, option: str, value: str) -> None:
    match option:
        case "--env":
            name, text = assignment(value) or (value, f"${value}")
            box.env[name] = text
        case "--env-file":
            box.notes.append("--env-file: its file is not read; set its variables in env")
        case "--publish":
            box.host, box.port = _published(value)
        case "--volume" | "--mount":
            box.volumes |= dict(_volume(option, value))
        case "--gpus":
            box.gpus = _gpus(value)
        case "--entrypoint":
            box.entrypoint = value.split()


def _published(value: str) -> tuple[str | None, int | None]:
    """Return address and port on the host of `[ADDRESS:]PORT:PORT`."""
    *before, _ = value.partition("/")[0].split(":")
    port = int(before[-1]) if before and re.fullmatch(r"[0-9]{1,5}", before[-1]) else None
    return (":".join(before[:-1]) or None), port


def _volume(option: str, value: str) -> Iterator[tuple[str, str]]:
    if option == "--mount":
        parts = dict(part.partition("=")[::2] for part in value.split(","))
        outside = parts.get("source") or parts.get("src") or ""
        inside = parts.get("target") or parts.get("dst") or parts.get("destination") or ""
    else:
        outside, _, rest = value.partition(":")
        inside = rest.partition(":")[0]
    # Another first character is the name of a volume, whose place only Docker knows.
    if inside.startswith("/") and outside.startswith(("/", "~", ".")):
        yield inside, outside


def _gpus(value: str) -> int | list[int] | None:
    text = value.strip("\"'")
    if text.isascii() and text.isdigit() and len(text) < 4 and int(text):
        return int(text)
    devices = text.removeprefix("device=")
    if devices != text and re.fullmatch(r"\d{1,4}(?:,\d{1,4})*", devices, re.ASCII):
        return [int(device) for device in dict.fromkeys(devices.split(","))]
    return None
