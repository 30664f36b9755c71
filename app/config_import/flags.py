"""Parses the flags of `vllm serve` without vLLM, into values as they are written in YAML."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engines.output import is_secret, redact_line
from engines.spec import RESERVED_FLAGS, FlagValue

# Short names of vLLM's parser.
_SHORT = {
    "-ac": "attention-config", "-asc": "api-server-count", "-cc": "compilation-config",
    "-dc": "diffusion-config", "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size", "-dpa": "data-parallel-address", "-dpb": "data-parallel-backend",
    "-dpe": "data-parallel-external-lb", "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local", "-dpm": "data-parallel-multi-port-external-lb",
    "-dpn": "data-parallel-rank", "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank", "-ep": "enable-expert-parallel", "-n": "nnodes",
    "-pcp": "prefill-context-parallel-size", "-pp": "pipeline-parallel-size",
    "-q": "quantization", "-r": "node-rank", "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}  # fmt: skip
# Flags that take every value up to the next flag; others take one.
_LISTS = frozenset(
    {
        "allowed-media-domains", "api-key", "collect-detailed-traces", "cpu-offload-params",
        "cudagraph-capture-sizes", "ignore-patterns", "kv-cache-dtype-skip-layers",
        "logits-processors", "lora-modules", "lora-target-modules", "numa-bind-cpus",
        "numa-bind-nodes", "offload-params", "served-model-name", "sleep-preserve-parameter-names",
    }
)  # fmt: skip
# Flags without a value. The next word may be the model: `vllm serve --enforce-eager MODEL`.
_SWITCH = re.compile(
    r"(?:no|enable|disable|enforce|trust|skip|return|fail-on|use)-.*|allow-credentials"
    r"|allow-deprecated-quantization|async-scheduling|fully-sharded-loras|grpc|headless"
    r"|interleave-mm-strings|kv-sharing-fast-prefill|language-model-only|mm-encoder-only"
    r"|numa-bind|tokens-only|data-parallel-(?:hybrid|external|multi-port-external)-lb"
    r"|exclude-tools-when-tool-choice-none"
    r"|calculate-kv-scales|engine-use-ray|guided-decoding-disable-.*|worker-use-ray"
)
_OPTIMIZATION = re.compile(r"-O=?([0-3])")
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(slots=True)
class Flags:
    """The flags of a command, by name without dashes, and the words that belong to no flag."""

    values: dict[str, FlagValue] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    secret: list[str] = field(default_factory=list)

    def take(self, name: str) -> FlagValue:
        """Remove a flag and return its value, None if it is not given."""
        return self.values.pop(name, None)

    def take_words(self, name: str) -> list[str]:
        """Remove a flag and return its values as words."""
        match self.take(name):
            case None | bool():
                return []
            case list() as members:
                return [str(member) for member in members]
            case value:
                return [str(value)]


def read_flags(words: Iterable[str]) -> Flags:
    """Return the flags among the words that follow `vllm serve`."""
    flags = Flags()
    rest = [*words]
    rest.reverse()  # so that pop() takes the next word
    while rest:
        word = rest.pop()
        if not _FLAG.match(word):
            flags.words.append(word)
            continue
        name, given = _name(word)
        _add(flags, name, _values(name, rest) if given is None else [given])
    return flags


def _name(word: str) -> tuple[str, str | None]:
    """Return the long name of a flag, and its value if joined by `=`."""
    if match := _OPTIMIZATION.fullmatch(word):
        return "optimization-level", match[1]
    name, joined, value = word.partition("=")
    stem, dot, path = name.partition(".")
    long = _SHORT.get(stem) or stem.lstrip("-").replace("_", "-")
    if "." not in name:
        long = _reserved(long)
    return long + dot + path, value if joined else None


def _reserved(name: str) -> str:
    """Return the reserved flag that a name abbreviates by argparse's rules, else the name."""
    meant = [flag for flag in RESERVED_FLAGS if flag.startswith(name)]
    return meant[0] if name not in RESERVED_FLAGS and len(meant) == 1 else name


def _values(name: str, rest: list[str]) -> list[str]:
    """Take a flag's values from the words after it."""
    values: list[str] = []
    while rest and not _FLAG.match(rest[-1]) and not _SWITCH.fullmatch(name):
        values.append(rest.pop())
        if name not in _LISTS:
            break
    return values


def _add(flags: Flags, name: str, values: list[str]) -> None:
    stem, dot, path = name.partition(".")
    text = " ".join(values)
    if is_secret(path or stem, text) or redact_line(text) != text:
        flags.secret.append(stem)
        return
    if dot:
        _add_member(flags, stem, path, text)
        return
    if stem in flags.values and stem not in flags.repeated:
        flags.repeated.append(stem)
    if not values and stem.startswith("no-") and stem not in RESERVED_FLAGS:
        flags.values[stem.removeprefix("no-")] = False
    elif not values:
        flags.values[stem] = True
    elif stem in _LISTS and len(values) > 1:
        flags.values[stem] = [*values]
    else:
        flags.values[stem] = _value(values[0])


def _add_member(flags: Flags, stem: str, path: str, text: str) -> None:
    """Set a member of a flag's JSON value, as in `--hf-overrides.max_position 1`."""
    whole = flags.values.get(stem)
    if not isinstance(whole, dict):
        whole = flags.values[stem] = {}
    *parents, last = path.removesuffix("+").split(".")
    inner: dict[str, Any] = whole
    for parent in parents:
        member = inner.setdefault(parent, {})
        inner = member if isinstance(member, dict) else inner
    value = _json(text)
    if path.endswith("+"):
        before = inner.get(last)
        inner[last] = [*(before if isinstance(before, list) else []), value]
    else:
        inner[last] = value


def _value(text: str) -> FlagValue:
    """Return a value as it is written in YAML; as a flag it becomes the same text again."""
    if re.fullmatch(r"-?(?:0|[1-9]\d{0,17})", text) and text != "-0":
        return int(text)
    if re.fullmatch(r"-?\d{1,3}\.\d{1,9}", text) and str(float(text)) == text:
        return float(text)
    if text.startswith("{"):
        value = _json(text)
        if isinstance(value, dict):
            return value
    return text


def _json(text: str) -> Any:
    """Return the value of a JSON text, or the text if it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _no_constant(name: str) -> object:
    raise ValueError(name)
