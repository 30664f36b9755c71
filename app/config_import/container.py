"""Parses `docker run` and `podman run`: image, variables, ports, volumes and GPUs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from app.config_import.shell import parse_assignment

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


@dataclass(slots=True, kw_only=True)
class Container:
    """The parts of a container that matter for an engine without one."""

    image: str = ""
    words: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)  # host path by path in the container
    host: str | None = None
    port: int | None = None
    gpus: int | list[int] | None = None
    notes: list[str] = field(default_factory=list)

    def host_path(self, path: str) -> str:
        """Return the host path of a path in the container; other texts unchanged."""
        for inside, outside in self.volumes.items():
            if path == inside or path.startswith(f"{inside.rstrip('/')}/"):
                return outside.rstrip("/") + path[len(inside.rstrip("/")) :]
        return path


def read_container(words: list[str]) -> Container | None:
    """Return the container that a command runs, None for other commands such as `stop`."""
    before = list(takewhile(lambda word: word != "run", words[1:3]))
    if words[len(before) + 1 : len(before) + 2] != ["run"]:
        return None
    rest = words[len(before) + 2 :]
    rest.reverse()  # so that pop() takes the next word
    container = Container()
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
        _set(container, _LONG.get(option, option), value)
    if not rest:
        return None
    container.image = rest.pop()
    container.words = rest[::-1]
    return container


def _set(container: Container, option: str, value: str) -> None:
    match option:
        case "--env":
            name, text = parse_assignment(value) or (value, f"${value}")
            container.env[name] = text
        case "--env-file":
            container.notes.append("--env-file: the file is not read; set its variables in env")
        case "--publish":
            container.host, container.port = _parse_publish(value)
        case "--volume" | "--mount":
            container.volumes |= dict(_parse_volume(option, value))
        case "--gpus":
            container.gpus = _parse_gpus(value)
        case "--entrypoint":
            container.entrypoint = value.split()


def _parse_publish(value: str) -> tuple[str | None, int | None]:
    """Return the host address and port of `[ADDRESS:]PORT:PORT`."""
    *before, _ = value.partition("/")[0].split(":")
    port = int(before[-1]) if before and re.fullmatch(r"[0-9]{1,5}", before[-1]) else None
    return (":".join(before[:-1]) or None), port


def _parse_volume(option: str, value: str) -> Iterator[tuple[str, str]]:
    if option == "--mount":
        parts = dict(part.partition("=")[::2] for part in value.split(","))
        outside = parts.get("source") or parts.get("src") or ""
        inside = parts.get("target") or parts.get("dst") or parts.get("destination") or ""
    else:
        outside, _, rest = value.partition(":")
        inside = rest.partition(":")[0]
    # Other sources are named volumes, whose path is known to Docker alone.
    if inside.startswith("/") and outside.startswith(("/", "~", ".")):
        yield inside, outside


def _parse_gpus(value: str) -> int | list[int] | None:
    text = value.strip("\"'")
    if text.isascii() and text.isdigit() and len(text) < 4 and int(text):
        return int(text)
    devices = text.removeprefix("device=")
    if devices != text and re.fullmatch(r"\d{1,4}(?:,\d{1,4})*", devices, re.ASCII):
        return [int(device) for device in dict.fromkeys(devices.split(","))]
    return None
