"""Classifies the error that ended a start of vLLM: its text in, cause and advice out.

The patterns match the messages of vLLM 0.7 to 0.33 and of its libraries. Advice names settings of
the gateway's configuration file, and is given only if the error is specific enough.
"""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_REASON = 400


class Cause(enum.StrEnum):
    """The kind of a failure."""

    MEMORY_BUSY = "memory_busy"
    MEMORY_WEIGHTS = "memory_weights"
    MEMORY_KV_CACHE = "memory_kv_cache"
    MEMORY = "memory"
    MAX_LENGTH = "max_length"
    UNKNOWN_FLAG = "unknown_flag"
    BAD_VALUE = "bad_value"
    MISSING_FILES = "missing_files"
    CORRUPT_FILES = "corrupt_files"
    NO_PERMISSION = "no_permission"
    DOWNLOAD = "download"
    ADDRESS_IN_USE = "address_in_use"
    PARSER_TOKENS = "parser_tokens"
    UNKNOWN_PARSER = "unknown_parser"
    UNSUPPORTED_MODEL = "unsupported_model"
    UNSUPPORTED_PLATFORM = "unsupported_platform"
    NO_DEVICE = "no_device"
    PARALLEL_SIZE = "parallel_size"
    IMAGE = "container_image"
    OTHER = "other"

    @property
    def words(self) -> str:
        """The kind in words that clients may read: nothing of the configuration is in them."""
        return "its configuration" if self is Cause.OTHER else self.value.replace("_", " ")


# Another start may succeed without a change: another process may have freed the resource.
_TRANSIENT = frozenset(
    {
        Cause.MEMORY_BUSY, Cause.MEMORY_WEIGHTS, Cause.MEMORY, Cause.DOWNLOAD,
        Cause.ADDRESS_IN_USE, Cause.OTHER,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why an engine did not start.

    `reason` is the engine's own message in one line, `advice` what to change in the configuration
    file. If it is `permanent`, another start without a change fails again.
    """

    cause: Cause
    reason: str
    advice: str | None
    permanent: bool

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.!')}; {self.advice}" if self.advice else self.reason


_Advice = str | Callable[[re.Match[str]], str | None] | None


def _kv_cache(match: re.Match[str]) -> str:
    need = match["need"]  # rounded: what a small model needs is 0.0
    more = f"{need} GiB" if float(need) > 0 else "more memory"
    found = re.search(r"estimated maximum model length is (\d{1,9})", match.string)
    if found and int(found[1]) > 0:
        return f"set args: {{max-model-len: {found[1]}}} or less, or give the KV cache {more}"
    return f"lower args: max-model-len, or give the KV cache {more}"


def _busy(match: re.Match[str]) -> str:
    free, total = float(match["free"]), float(match["total"])
    others = "end what else uses the device"
    share = int(free / total * 100) / 100 if total > 0 else 0
    return f"{others}, or set args: {{gpu-memory-utilization: {share:g}}}" if share else others


def _max_length(match: re.Match[str]) -> str:
    return f"set args: {{max-model-len: {match['length']}}} or less"


def _unknown_flags(match: re.Match[str]) -> str | None:
    names = dict.fromkeys(re.findall(r"--([A-Za-z][\w.-]{0,60})", match.string))
    return f"remove {', '.join(names)} from args" if names else None


def _heads(match: re.Match[str]) -> str:
    heads = int(match["heads"])
    fit = [str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0]
    return f"set args: tensor-parallel-size to a divisor of {heads}: {', '.join(fit)}"


def _devices(match: re.Match[str]) -> str:
    return f"the parallel sizes in args may take {match['have']} GPUs in all"


def _numa_nodes(match: re.Match[str]) -> str:
    have = len((match["nodes"] or "0").split(","))
    return (
        "on a CPU each rank needs a NUMA node of its own: tensor-parallel-size times "
        f"pipeline-parallel-size in args may be {have} at most, or bind threads by env: "
        "VLLM_CPU_OMP_THREADS_BIND"
    )


def _parser(match: re.Match[str]) -> str:
    flag = "tool-call-parser" if "tool" in match.string.lower() else "reasoning-parser"
    return f"the tokenizer of this model has no such tokens: choose another args: {flag}"


_DOWNLOAD_ADVICE = (
    "mend model if it is meant to be a directory, download the model beforehand, or see that this "
    "machine reaches the hub (env: HTTPS_PROXY, HF_ENDPOINT for a mirror, VLLM_USE_MODELSCOPE: "
    "true for ModelScope)"
)
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
# The first match decides. Matched against the error's text.
_CAUSES: tuple[tuple[Cause, re.Pattern[str], _Advice], ...] = (
    # Lines of our own, in which a daemon's message may look like one of vLLM's.
    (
        Cause.OTHER,
        re.compile(r"(?i)^cannot pull image .*(?:no space left|connection|timeout|lookup|EOF)"),
        None,
    ),
    (
        Cause.IMAGE,
        re.compile(r"^(?:cannot pull image|image \S{1,300} is not on this machine)"),
        "check image, and that this machine may pull it",
    ),
    (
        Cause.NO_DEVICE,
        re.compile(r"^the container does not start: .*(?:nvidia|device driver|CDI device)"),
        "install the NVIDIA Container Toolkit, for Podman with its CDI specification",
    ),
    (
        Cause.UNSUPPORTED_PLATFORM,
        re.compile(r"^the container does not start: .*error setting rlimit"),
        "Podman may not set its limits, as inside another container: write lower ones into "
        'containers.conf, default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]',
    ),
    (Cause.OTHER, re.compile(r"^the container does not start: "), None),
    (
        Cause.MEMORY_KV_CACHE,
        # 0.8 to 0.33; "models's" up to 0.21
        re.compile(
            r"To serve at least one request with the models?'s max seq len .{0,40}?"
            rf"\((?P<need>{_NUMBER}) Gi?B KV cache is needed"
        ),
        _kv_cache,
    ),
    (
        Cause.MEMORY_KV_CACHE,
        # the V0 engine, 0.7 to 0.9
        re.compile(
            r"max seq len \(\d+\) is larger than the maximum number of tokens that can be stored "
            r"in KV cache \((?P<length>\d{1,9})\)"
        ),
        _max_length,
    ),
    (
        Cause.MEMORY,
        re.compile(
            r"No available memory for the cache blocks|Cannot auto-fit max_model_len|"
            r"leaving none for the KV cache"
        ),
        "nothing is left for the KV cache: raise args: gpu-memory-utilization (on a CPU env: "
        "VLLM_CPU_KVCACHE_SPACE), or lower args: max-num-batched-tokens",
    ),
    (
        Cause.MEMORY_BUSY,
        re.compile(
            rf"Free memory on device[^(]{{0,40}}\((?P<free>{_NUMBER})/(?P<total>{_NUMBER}) GiB\) "
            r"on startup is less than"
        ),
        _busy,
    ),
    (
        Cause.MEMORY_BUSY,
        # the CPU build, 0.21 to 0.33
        re.compile(r"Available memory on node \S{1,20} .{0,80}is less than requested memory"),
        "lower args: kv-cache-memory-bytes or env: VLLM_CPU_KVCACHE_SPACE, or end what else uses "
        "the memory",
    ),
    (
        Cause.MEMORY,
        re.compile(r"out of memory occurred when (?:warming up|capturing)"),
        "lower args: max-num-seqs or gpu-memory-utilization",
    ),
    (
        Cause.MAX_LENGTH,
        re.compile(
            r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len "
            r"\([\w.]{1,60}=(?P<length>\d{1,9})"
        ),
        _max_length,
    ),
    (
        Cause.MAX_LENGTH,
        re.compile(
            r"max_num_batched_tokens \(\d+\) is smaller than max_model_len \((?P<length>\d{1,9})\)"
        ),
        lambda match: f"set args: {{max-num-batched-tokens: {match['length']}}} or more",
    ),
    (Cause.UNKNOWN_FLAG, re.compile(r"^unrecognized arguments: "), _unknown_flags),
    (
        Cause.UNKNOWN_FLAG,
        re.compile(r"^ambiguous option: --(?P<flag>[\w-]{1,60})"),
        lambda match: f"write {match['flag']} out in args",
    ),
    (
        Cause.BAD_VALUE,
        re.compile(r"^argument (?:-\w[ ,/]*)*--(?P<flag>[A-Za-z][\w.-]{0,60})"),
        lambda match: f"change {match['flag']} in args",
    ),
    (
        # vLLM reads most of its variables with int(), which does not name them
        Cause.BAD_VALUE,
        re.compile(r"invalid literal for int\(\) with base 10"),
        "a number is expected: look at the VLLM_ variables in env",
    ),
    (
        Cause.BAD_VALUE,
        re.compile(r"(?i)bfloat16 is only supported on GPUs with compute capability"),
        "set args: {dtype: half}",
    ),
    (
        Cause.BAD_VALUE,
        re.compile(
            r"Unknown quantization method|quantization method specified in the|"
            r"not supported for quantization method|Cannot find the config file for \w{1,30}$"
        ),
        "remove quantization from args: vLLM reads it from the model",
    ),
    (
        Cause.BAD_VALUE,
        re.compile(r"trust_remote_code=True|set the option `?trust_remote_code"),
        "if you trust the model's own code, set args: {trust-remote-code: true}",
    ),
    (
        Cause.NO_PERMISSION,
        re.compile(r"(?i)gated repo|access to model .{1,120} is restricted|40[13] Client Error"),
        "ask for access to the model, and set HF_TOKEN in env",
    ),
    (
        Cause.NO_PERMISSION,
        re.compile(r"\[Errno 13\] Permission denied"),
        "let the user that runs the gateway read it",
    ),
    (
        Cause.DOWNLOAD,
        re.compile(
            r"(?i)couldn't connect to|max retries exceeded|connection (?:error|refused|reset)|"
            r"read timed out|5\d\d Server Error|name resolution"
        ),
        _DOWNLOAD_ADVICE,
    ),
    (
        Cause.MISSING_FILES,
        re.compile(r"Please install modelscope"),
        "in a clone: `uv pip install --python .venv modelscope`, since .venv has no pip",
    ),
    (
        # without a route to the hub; a directory is checked before the start
        Cause.DOWNLOAD,
        re.compile(
            r"Invalid repository ID or local directory specified: "
            r"'[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}'"
        ),
        _DOWNLOAD_ADVICE,
    ),
    (
        Cause.CORRUPT_FILES,
        re.compile(
            r"Error while deserializing|incomplete metadata|is not a valid JSON file|"
            r"HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|invalid load key|"
            r"PytorchStreamReader failed"
        ),
        "a file of the model is damaged or cut short: fetch it again",
    ),
    (
        Cause.MISSING_FILES,
        re.compile(
            r"Cannot find any model weights|Cannot find any safetensors|does not appear to have "
            r"(?:a file|files) named|no file named|"
            r"Could not detect config format|Invalid repository ID or local directory|"
            r"Unrecognized model in|Can't load the configuration|Can't load tokenizer|"
            r"Couldn't instantiate the backend tokenizer"
        ),
        "check model: the directory must hold config.json, the weights (*.safetensors) and the "
        "tokenizer",
    ),
    (
        Cause.MISSING_FILES,
        re.compile(
            r"local Hugging Face cache|is not a local folder and is not a valid model|"
            r"Repository Not Found|couldn't find them in the cached files|is not cached|"
            r"outgoing traffic has been disabled"
        ),
        "check model, or let it be downloaded: env: {HF_HUB_OFFLINE: 0}",
    ),
    (
        Cause.NO_DEVICE,
        re.compile(r"lib(?:cuda|cudart|amdhip64|ze_loader)\S{0,20}: cannot "
            r"open shared object file"),
        "this vLLM was built for a device whose driver is not here: install it, or the CPU build",
    ),
    # Any program or library may be missing: the error says which.
    (Cause.MISSING_FILES, re.compile(r"No such file or directory"), None),
    (
        Cause.ADDRESS_IN_USE,
        re.compile(r"(?i)address already in use|EADDRINUSE|failed to listen on any local network"),
        "end what listens there, another engine perhaps",
    ),
    (Cause.PARSER_TOKENS, re.compile(r"could not locate .{1,80}token"), _parser),
    (
        Cause.UNKNOWN_PARSER,
        re.compile(
            r"(?i)^(?:invalid )?(?P<kind>reasoning|tool)(?: call)?[ _-](?:parser|helper):? .{1,80}"
            r"(?:not found|chose from)"
        ),
        lambda match: (
            "change tool-call-parser in args"
            if match["kind"].lower() == "tool"
            else "change reasoning-parser in args"
        ),
    ),
    (
        Cause.UNSUPPORTED_MODEL,
        re.compile(
            r"^Model architectures .{1,200}? (?:are|is) not supported|has no vLLM implementation|"
            r"does not recognize this architecture|failed to be inspected"
        ),
        "this version of vLLM does not know the model: a newer one may",
    ),
    (
        Cause.UNSUPPORTED_PLATFORM,
        re.compile(r"Sleep mode is not supported on current platform"),
        "remove enable-sleep-mode from args, and sleep_level",
    ),
    (
        Cause.UNSUPPORTED_PLATFORM,
        re.compile(r"(?:not|only) supported (?:on|for) (?:the )?(?:current|this|CPU|GPUs)"),
        None,
    ),
    (
        Cause.NO_DEVICE,
        re.compile(
            r"Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver|"
            r"CUDA driver initialization failed|CUDA driver version is insufficient"
        ),
        "vLLM sees no device that it was built for: check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
        "install the CPU build",
    ),
    (
        Cause.PARALLEL_SIZE,
        re.compile(
            r"attention heads \((?P<heads>[1-9]\d{0,5})\) must be divisible by "
            r"tensor parallel size"
        ),
        _heads,
    ),
    (
        Cause.PARALLEL_SIZE,
        re.compile(r"number of available GPUs \((?P<have>\d{1,5})\)"),
        _devices,
    ),
    (
        Cause.PARALLEL_SIZE,
        # the CPU build: each rank is bound to its own NUMA node
        re.compile(
            r"Not enough allowed NUMA nodes .{0,80}?(?:Allowed NUMA nodes are "
            r"\[(?P<nodes>[\d, ]{0,200})\]|$)"
        ),
        _numa_nodes,
    ),
    (
        Cause.PARALLEL_SIZE,
        re.compile(
            r"invalid device ordinal|exceeds the total number of available|must be divisible by "
            r"(?:tensor|pipeline)|placement group requiring"
        ),
        "lower args: tensor-parallel-size or pipeline-parallel-size",
    ),
)  # fmt: skip
_OUT_OF_MEMORY = re.compile(
    r"(?i)out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate|"
    r"not enough GPU memory|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_WEIGHTS_ADVICE = (
    "the weights need more memory: a smaller or quantized model, more GPUs "
    "(args: tensor-parallel-size), or end what else uses the device"
)
_MEMORY_ADVICE = "lower args: gpu-memory-utilization, max-num-seqs or max-model-len"
# The beginning of an error's own advice, which names flags of the command line.
_VLLM_ADVICE = re.compile(
    r",? (?:please set the environment variable|Of the allocated memory|"
    r"Try (?:increasing|lowering)|To allow overriding this maximum|Decrease |"
    r"Please (?:verify the following|increase|pass|reduce|try to bind)|If this is intentional|"
    r"Supported architectures: |See https?://)"
)


def classify(text: str, *, loading_weights: bool = False, refused: bool = False) -> StartFailure:
    """Return the failure that an error's text describes.

    `loading_weights`: the engine failed while it loaded its weights. `refused`: the error rejects
    the configuration, so another start would fail again.
    """
    words = " ".join(text.split())
    cause, advice = Cause.OTHER, None
    for known, pattern, found in _CAUSES:
        if match := pattern.search(words):
            cause = known
            advice = found(match) if callable(found) else found
            break
    else:
        if _OUT_OF_MEMORY.search(words):
            cause = Cause.MEMORY_WEIGHTS if loading_weights else Cause.MEMORY
            advice = _WEIGHTS_ADVICE if loading_weights else _MEMORY_ADVICE
        elif refused:
            cause = Cause.BAD_VALUE
    if advice is not None and (own_advice := _VLLM_ADVICE.search(words, 1)):
        words = words[: own_advice.start()]
    if len(words) > MAX_REASON:
        words = words[: MAX_REASON - 1].rstrip() + "…"
    return StartFailure(cause, words.strip(), advice, cause not in _TRANSIENT)
