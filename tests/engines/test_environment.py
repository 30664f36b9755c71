"""The environment of an engine: variables of vLLM, and no secrets of others."""

import pytest

from engines.environment import inherited

# Variables of the gateway or of other programs, which an engine does not need.
SECRETS = (
    "GATEWAY_API_KEYS", "GATEWAY_ADMIN_KEY", "GPU_BOX_KEY", "OPENAI_API_KEY", "VLLM_API_KEY",
    "PGPASSWORD", "DATABASE_URL", "REDIS_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_SECRET",
    "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "NVIDIA_API_KEY",
    "NGC_API_KEY", "CONDA_TOKEN", "KUBERNETES_SERVICE_HOST", "SSH_AUTH_SOCK", "NOTIFY_SOCKET",
    "S3_SECRET_ACCESS_KEY", "WANDB_API_KEY", "CI_JOB_TOKEN",
)  # fmt: skip
NEEDED = (
    "PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
    "PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    "HTTPS_PROXY", "no_proxy", "CC", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES",
    "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_TLS", "HIP_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY",
    "MALLOC_ARENA_MAX", "TORCHINDUCTOR_CACHE_DIR", "TORCH_CUDA_ARCH_LIST", "TRITON_CACHE_DIR",
    "PYTORCH_CUDA_ALLOC_CONF", "FLASHINFER_WORKSPACE_BASE", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "VLLM_CPU_KVCACHE_SPACE", "VLLM_HOST_IP", "LMCACHE_CONFIG_FILE",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME", "RAY_ADDRESS",
)  # fmt: skip


def of(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "canary")


@pytest.mark.parametrize("name", NEEDED)
def test_variables_of_vllm_are_inherited(name: str) -> None:
    assert inherited(of(name)) == of(name)


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_of_others_are_not_inherited(name: str) -> None:
    assert inherited(of(name)) == {}


def test_number_in_a_variable_that_only_looks_like_a_secret_is_inherited() -> None:
    numbers = {
        "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "512",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    assert inherited(numbers) == numbers


def test_settings_add_names_and_prefixes() -> None:
    given = of("AWS_REGION", "AWS_SECRET_ACCESS_KEY", "AWSOME", "ONE", "OTHER")
    more = ("AWS_*", "ONE", "MISSING")
    assert inherited(given, more) == of("AWS_REGION", "AWS_SECRET_ACCESS_KEY", "ONE")


@pytest.mark.parametrize("name", ["GATEWAY_ADMIN_KEY", "VLLM_API_KEY"])
@pytest.mark.parametrize("how", ["name", "prefix"])
def test_settings_cannot_add_forbidden_variables(name: str, how: str) -> None:
    assert inherited(of(name), [name if how == "name" else f"{name[:4]}*"]) == {}


def test_withheld_key_of_a_remote_engine_is_not_inherited() -> None:
    given = of("HF_TOKEN", "VLLM_REMOTE", "GPU_BOX_KEY", "PATH")
    withheld = {"HF_TOKEN", "VLLM_REMOTE", "GPU_BOX_KEY"}
    assert inherited(given, ["GPU_*"], withheld) == of("PATH")
