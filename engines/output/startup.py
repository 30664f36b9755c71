"""Reads the log of an engine's start line by line: facts, progress, and the failure if it fails.

Pure: text in, values out. The patterns match the messages of vLLM 0.7 to 0.33, which differ a
little between versions. A traceback is prefixed line by line, often printed by two processes, and
followed by a second error that only reports the first one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from engines.base import EngineFacts, Progress
from engines.output.failure import MAX_REASON, StartFailure, classify

# "(APIServer pid=12) ERROR 11-21 05:30:00 [core.py:100] ", each part optional; 0.8 adds a rank,
# Ray an address, and up to 0.7 the file stands without its left bracket
_PREFIX = re.compile(
    r"^(?:\([\w -]{0,60}(?:rank=\d{1,6} )?pid=\d{1,10}(?:, ip=[\w.:]{1,60})?\)\s?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"(?:[\w.]{1,80}:\d{1,6}\] ?)?(?:\[[^\]]*\] ?)*)?"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# The configuration of an engine is one line of about 5 KiB (0.32); no message is longer.
HEAD = 32 * 1024
# The end of a longer line has the newest state of a progress bar.
TAIL = 1024
MAX_BAR_STATES = 32

# "ValueError: text", "pydantic_core._pydantic_core.ValidationError: text"
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?P<name>(?=[A-Z])\w*(?:Error|Exception|Exit|Interrupt))"
    r"(?:: (?P<text>.*))?$"
)
_USAGE = re.compile(r"^[\w./-]+: error: (?P<text>.+)$")
# uvicorn's own, when it cannot listen: "ERROR:    [Errno 98] error while attempting to bind on ..."
_UVICORN = re.compile(r"^ERROR:\s+(?P<text>\[Errno \d+\] .+)$")
_VALUE = re.compile(r"^\s+(?:Value|Assertion) error, (?P<text>.+)$")
_PYDANTIC_TAIL = re.compile(r"\s*\[type=\w+, input_value=.*$")
# "gpu_memory_utilization", and below it "  Input should be less than 1 [type=less_than, ..."
_FIELD = re.compile(r"^(?P<field>[A-Za-z_][\w.]{0,80})$")
_INPUT = re.compile(r"^\s+(?P<text>\S.{0,300}?) \[type=\w+, input_value=(?P<value>[^,]{0,60}), ")
_FRAME = re.compile(r'^\s+File "[^"]*", line \d+, in (?P<function>\w+)')
# Errors that only report that something else failed; "root cause" is in nearly all of them.
_ECHOES = ("root cause", "Failed core proc", "WorkerProc initialization failed")
# Errors that describe a library's internals, reworded for the author of the configuration.
_REWORDED = {
    "LocalEntryNotFoundError": "the model is neither a directory here nor in the local "
    "Hugging Face cache, and downloads are off (HF_HUB_OFFLINE)",
}
# Exceptions of a requested exit are no failures.
_REQUESTED_EXITS = frozenset({"SystemExit", "KeyboardInterrupt"})
_SERVING = "Application startup complete."


def strip_decoration(line: str) -> str:
    """Return a log line without process prefix, level, colors and control characters."""
    return _PREFIX.sub("", _CONTROL.sub("", _ANSI.sub("", line))).rstrip()


# Progress

_STARTING = "starting"
_PULL = "pulling the image"
_CONFIGURATION = "reading the configuration"
_ENGINE = "starting the engine"
_DOWNLOAD = "downloading the model"
_WEIGHTS = "loading weights"
_PROFILE = "profiling memory"
_COMPILE = "compiling"
_KV_CACHE = "making the KV cache"
_GRAPHS = "capturing graphs"
_WARM_UP = "warming up"
_API = "starting the API server"
_SERVING_PHASE = "serving"
# A start passes these in order. One rank may still load while another one compiles: the phase is
# that of the most advanced rank.
PHASES = (
    _STARTING, _PULL, _CONFIGURATION, _ENGINE, _DOWNLOAD, _WEIGHTS, _PROFILE, _COMPILE, _KV_CACHE,
    _GRAPHS, _WARM_UP, _API, _SERVING_PHASE,
)  # fmt: skip
_RANK = {phase: rank for rank, phase in enumerate(PHASES)}
# The beginnings of lines that mark the start of a phase.
_BEGINNINGS: tuple[tuple[str, str], ...] = (
    ("Pulling image", _PULL),
    ("vLLM API server version", _CONFIGURATION),
    ("non-default args:", _CONFIGURATION),
    ("Resolved architecture:", _CONFIGURATION),
    ("Initializing a V", _ENGINE),
    ("Initializing an LLM", _ENGINE),
    ("Starting to load model", _WEIGHTS),
    ("Using model weights format", _WEIGHTS),
    ("Loading weights took", _WEIGHTS),
    ("Using cache directory:", _COMPILE),
    ("Dynamo bytecode transform", _COMPILE),
    ("Compiling a graph", _COMPILE),
    ("Model loading took", _PROFILE),
    ("Loading model weights took", _PROFILE),
    ("torch.compile t", _COMPILE),
    ("Memory profiling takes", _KV_CACHE),
    ("Available KV cache memory:", _KV_CACHE),
    ("GPU KV cache size:", _KV_CACHE),
    ("CPU KV cache size:", _KV_CACHE),
    ("# cuda blocks:", _KV_CACHE),
    ("# GPU blocks:", _KV_CACHE),
    ("# CPU blocks:", _KV_CACHE),
    ("Capturing ", _GRAPHS),
    ("Graph capturing finished", _WARM_UP),
    ("init engine (", _API),
    ("Starting vLLM", _API),
    ("Started server process", _API),
)
# tqdm: "Loading safetensors checkpoint shards:  67% Completed | 2/3 [00:00<00:00,  3.58it/s]"
_BAR = re.compile(
    r"^(?P<what>[^:%|]{1,120}): +(?P<percent>\d{1,3})%"
    r"(?:[^\[]{0,200}?[ |](?P<done>\d{1,9})/(?P<total>\d{1,9}) \[)?"
)
_BARS: tuple[tuple[re.Pattern[str], str], ...] = (
    # container_run.py
    (re.compile(r"^Pulling image$"), _PULL),
    (re.compile(r"^(?:Loading|Multi-thread loading) .*(?:shards|weights)"), _WEIGHTS),
    (re.compile(r"^Fetching \d+ files"), _DOWNLOAD),
    (re.compile(r"^[\w./-]+\.(?:safetensors|bin|pt|gguf)(?:\.\w+)?$"), _DOWNLOAD),
    (re.compile(r"^Capturing (?:CUDA|cuda) ?graph"), _GRAPHS),
)

# Facts

_FLOAT = r"\d{1,9}(?:\.\d{1,9})?"
_CONFIG = re.compile(
    r"(?P<key>(?<![\w.])(?:model|dtype|max_seq_len|tensor_parallel_size|pipeline_parallel_size|"
    r"data_parallel_size|quantization))="
    r"(?:'(?P<single>[^']{0,4096})'|\"(?P<double>[^\"]{0,4096})\"|(?P<bare>[^,'\"\s]{1,100}),)"
)
_CONFIG_NUMBERS = {
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
}
_SETTING = re.compile(
    r"'(?P<key>\w{1,60})': (?:(?P<number>-?\d{1,9}(?:\.\d{1,17})?(?:e-?\d{1,3})?)"
    r"|(?P<flag>True|False)|'(?P<text>[^']{0,200})')(?=[,}])"
)
_QUOTED = re.compile(r"'(\w{1,40})'")
# Attention backends have identifiers (FLASH_ATTN) or names (Flash Attention). Backends of other
# layers (experts, Mamba, vision) do not count.
_BACKEND = re.compile(
    r"^Using (?:AttentionBackendEnum\.)?(?P<backend>[A-Z][A-Z0-9_]{1,40}|"
    r"(?=[\w ]*(?:Attention|Attn|MLA|FlashInfer|XFormers|SDPA|Triton|Pallas|TurboQuant))"
    r"(?![\w ]*(?:MoE|MOE|Mamba|SSM))[A-Z][\w ]{1,40}?)(?: attention)? backend"
    r"(?: on V1 engine| on XPU)?(?: by default for .*| out of potential backends: .*"
    r"| \(selected via .*)?\.?$"
)

Facts = Mapping[str, object]


def _number(text: str) -> int:
    return int(text.replace(",", "")[:15])


def _configuration(match: re.Match[str]) -> Facts:
    found: dict[str, object] = {"version": match["version"]}
    for part in _CONFIG.finditer(match["config"]):
        key = part["key"]
        value = part["single"] or part["double"] or part["bare"]
        if value is None or value == "None" or key in found:
            continue
        if key in _CONFIG_NUMBERS:
            if value.isdecimal() and value.isascii():
                found.setdefault(_CONFIG_NUMBERS[key], int(value))
        else:
            found[key] = value.removeprefix("torch.")
    return found


def _sampling(match: re.Match[str]) -> Facts:
    settings: dict[str, float | int | str | bool] = {}
    for part in list(_SETTING.finditer(match["settings"]))[:32]:
        if part["flag"] is not None:
            settings[part["key"]] = part["flag"] == "True"
        elif part["number"] is None:
            settings[part["key"]] = part["text"]
        elif part["number"].lstrip("-").isdecimal():
            settings[part["key"]] = int(part["number"])
        else:
            settings[part["key"]] = float(part["number"])
    return {"sampling_defaults": settings} if settings else {}


def _tasks(match: re.Match[str]) -> Facts:
    tasks = list(dict.fromkeys(_QUOTED.findall(match["tasks"])))[:32]
    # Printed from a set, in no particular order, up to 0.9.
    ordered = sorted(tasks) if match["tasks"].startswith("{") else tasks
    return {"supported_tasks": tuple(ordered)} if tasks else {}


def _text(field: str) -> Callable[[re.Match[str]], Facts]:
    return lambda match: {field: match[1]}


def _figures(*fields: str) -> Callable[[re.Match[str]], Facts]:
    """Return a function that reads these fields from a match's groups, in this order."""
    whole = ("max_model_len", "kv_cache_tokens")
    return lambda match: {
        field: _number(value) if field in whole else float(value)
        for field, value in zip(fields, match.groups(), strict=True)
        if value is not None
    }


_FACTS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Facts]], ...] = (
    (re.compile(r"^vLLM API server version v?(\d[\w.+-]{0,60})"), _text("version")),
    (re.compile(r"^[█▄▀ ]+version v?(\d[\w.+-]{0,60})$"), _text("version")),
    (
        re.compile(
            r"^Initializing an? (?:V\d )?LLM engine \(v(?P<version>\d[\w.+-]{0,60})\) "
            r"with config: (?P<config>.*)$"
        ),
        _configuration,
    ),
    (re.compile(r"^Resolved architecture: (\w{1,100})$"), _text("architecture")),
    (re.compile(r"^Using max model len (\d{1,12})$"), _figures("max_model_len")),
    (_BACKEND, _text("attention_backend")),
    (re.compile(rf"^Loading weights took ({_FLOAT}) seconds"), _figures("weights_load_s")),
    (re.compile(rf"^Loading model weights took ({_FLOAT}) Gi?B"), _figures("weights_gib")),
    (
        re.compile(rf"^Model loading took ({_FLOAT}) Gi?B (?:memory )?and ({_FLOAT}) seconds"),
        _figures("weights_gib", "weights_load_s"),
    ),
    (re.compile(rf"^Available KV cache memory: ({_FLOAT}) GiB"), _figures("kv_cache_gib")),
    (
        # the V0 engine, 0.7 to 0.9
        re.compile(
            r"^model weights take .{1,200}the rest of the memory reserved for KV Cache is "
            rf"({_FLOAT})GiB"
        ),
        _figures("kv_cache_gib"),
    ),
    (
        re.compile(
            rf"^Initial free memory {_FLOAT} GiB, reserved ({_FLOAT}) GiB memory for KV Cache"
        ),
        _figures("kv_cache_gib"),
    ),
    (
        re.compile(rf"^(?:Explicitly|Auto) set \(({_FLOAT})/{_FLOAT}\) GiB for KV cache"),
        _figures("kv_cache_gib"),
    ),
    (
        # two lines up to 0.21, one since 0.28
        re.compile(
            r"^[GC]PU KV cache size: (\d[\d,]{0,14}) tokens"
            rf"(?:, Maximum concurrency for [\d,]{{1,15}} tokens per request: ({_FLOAT})x)?"
        ),
        _figures("kv_cache_tokens", "max_concurrency"),
    ),
    (
        re.compile(rf"^Maximum concurrency for [\d,]{{1,15}} tokens per request: ({_FLOAT})x"),
        _figures("max_concurrency"),
    ),
    (re.compile(rf"^torch\.compile t(?:akes|ook) ({_FLOAT}) s in total"), _figures("compile_s")),
    (
        re.compile(rf"^Graph capturing finished in ({_FLOAT}) secs?, took ({_FLOAT}) GiB"),
        _figures("graph_capture_s", "graph_capture_gib"),
    ),
    (re.compile(rf"^init engine \([^)]{{1,100}}\) took ({_FLOAT}) s"), _figures("init_s")),
    (
        # 0.21 to 0.33
        re.compile(
            r"^Default vLLM sampling parameters have been overridden by .{1,200}?: "
            r"`(?P<settings>\{.{0,2000}?\})`"
        ),
        _sampling,
    ),
    (
        # 0.8 to 0.14; "model" is the model's generation_config.json
        re.compile(
            r"^Using default \w{1,20} sampling params from model: (?P<settings>\{.{0,2000}?\})$"
        ),
        _sampling,
    ),
    (
        re.compile(r"^Detected the chat template content format to be '(\w{1,40})'"),
        _text("chat_template_format"),
    ),
    (
        re.compile(
            r"^(?:Supported[ _]tasks: |This model supports multiple tasks: )"
            r"(?P<tasks>[\[{].{1,1000}[\]}])"
        ),
        _tasks,
    ),
)
_BLOCKS = re.compile(r"^# (?:cuda|GPU|CPU|gpu|rocm|xpu) blocks: (?P<blocks>\d{1,12})(?:,|$)")
_CONCURRENCY = re.compile(
    r"^Maximum concurrency for (?P<length>\d[\d,]{0,14}) tokens per request: "
    rf"(?P<times>{_FLOAT})x"
)
# The engine runs with another length than requested.
_FITTED = re.compile(
    r"^(?:Auto-fit max_model_len: reduced from \d{1,12} to |Updated max_model_len to )"
    r"(?P<length>\d{1,12})"
)


class StartupLog:
    """Facts, progress and failure in the lines read so far. Bounded in memory; never raises."""

    def __init__(self) -> None:
        self._facts = EngineFacts()
        self._progress: Progress | None = None
        self._failure: StartFailure | None = None
        self._echo: StartFailure | None = None
        self._validation = False  # a value error belongs to the pydantic error above it
        self._field = ""
        self._function = ""  # the innermost frame of the current traceback
        self._blocks: int | None = None

    @property
    def facts(self) -> EngineFacts:
        """The engine's facts. The first value of each stays: later lines are about other parts."""
        return self._facts

    @property
    def progress(self) -> Progress | None:
        """The progress of the start; None before the first line."""
        return self._progress

    @property
    def failure(self) -> StartFailure | None:
        """The failure of the start; None if the engine serves, whatever errors came before."""
        return self._failure or self._echo

    def feed(self, line: str) -> None:
        """Read one raw line of the log: with prefixes, colors, carriage returns, garbage."""
        if len(line) > HEAD + TAIL:
            line = line[:HEAD] + "\r" + line[-TAIL:]
        if "\r" not in line or "%" not in line:
            self._read(strip_decoration(line))
            return
        # A progress bar overwrites itself: one line holds many states, of which the last counts.
        parts = line.split("\r")
        for part in parts[:1] + parts[1:][-MAX_BAR_STATES:]:
            self._read(strip_decoration(part))

    def _read(self, line: str) -> None:
        if self._progress is None:
            self._progress = Progress(_STARTING)
        if not line:
            return
        if line.endswith(_SERVING):
            self._enter_phase(_SERVING_PHASE)
            self._failure = self._echo = None
            return
        self._read_progress(line)
        self._read_facts(line)
        self._read_error(line)

    def _enter_phase(self, phase: str, done: int | None = None, total: int | None = None) -> None:
        now = self._progress
        if now is not None and _RANK[phase] < _RANK[now.phase]:
            return
        if now is None or now.phase != phase or total is not None:
            self._progress = Progress(phase, done, total)

    def _read_progress(self, line: str) -> None:
        if "%" in line and (bar := _BAR.match(line)):
            for pattern, phase in _BARS:
                if pattern.search(bar["what"]):
                    counted = bar["total"] is not None and int(bar["total"]) > 0
                    done = int(bar["done"] if counted else bar["percent"])
                    total = int(bar["total"]) if counted else 100
                    self._enter_phase(phase, min(done, total), total)
                    return
        for beginning, phase in _BEGINNINGS:
            if line.startswith(beginning):
                self._enter_phase(phase)
                return

    def _read_facts(self, line: str) -> None:
        for pattern, read in _FACTS:
            if match := pattern.match(line):
                self._add_facts(read(match))
        if match := _FITTED.match(line):
            self._facts = replace(self._facts, max_model_len=int(match["length"]))
        elif match := _BLOCKS.match(line):
            self._blocks = int(match["blocks"])
        elif self._blocks and (match := _CONCURRENCY.match(line)):
            # The block size is not logged: compute it from the two lines.
            size = round(float(match["times"]) * _number(match["length"]) / self._blocks)
            if size:
                self._add_facts({"kv_cache_tokens": self._blocks * size})

    def _add_facts(self, found: Facts) -> None:
        facts = self._facts
        # mypy cannot know that the names and types match the fields
        new = {name: value for name, value in found.items() if getattr(facts, name) is None}
        if new:
            self._facts = replace(facts, **new)  # type: ignore[arg-type]

    def _read_error(self, line: str) -> None:
        if match := _FRAME.match(line):
            self._function = match["function"]
        elif match := _USAGE.match(line):
            self._failure = self._classify(match["text"], refused=True)
        elif match := _UVICORN.match(line):
            self._failure = self._classify(match["text"])
        elif self._validation and (match := _VALUE.match(line)):
            self._failure = self._classify(_PYDANTIC_TAIL.sub("", match["text"]), refused=True)
            self._validation = False
        elif self._validation and (match := _FIELD.match(line)):
            self._field = match["field"].replace("_", "-")
        elif self._validation and self._field and (match := _INPUT.match(line)):
            text = f"argument --{self._field}: {match['text']}, not {match['value']}"
            self._failure = self._classify(text, refused=True)
            self._validation = False
        elif (match := _EXCEPTION.match(line)) and match["name"] not in _REQUESTED_EXITS:
            self._read_exception(match["name"], match["text"] or match["name"])

    def _read_exception(self, name: str, text: str) -> None:
        if name == "KeyError" and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]  # a KeyError prints its argument as a literal
        text = _REWORDED.get(name, text)
        self._validation, self._field = name == "ValidationError", ""
        if any(mark in text for mark in _ECHOES):
            self._echo = self._classify(text)
        else:
            self._failure = self._classify(text)
        self._function = ""

    def _classify(self, text: str, *, refused: bool = False) -> StartFailure:
        loading = self._progress is not None and self._progress.phase == _WEIGHTS
        if "safetensors" in self._function and "deserializing" not in text:
            # A damaged header raises any error, of json or of integers.
            text = f"Error while deserializing a safetensors file: {text}"
        return classify(text[: 8 * MAX_REASON], loading_weights=loading, refused=refused)


def find_start_failure(lines: Iterable[str]) -> StartFailure | None:
    """Return the failure of the start with this log, None if the log has none."""
    log = StartupLog()
    for line in lines:
        log.feed(line)
    return log.failure
