"""Selects the environment variables that an engine inherits. Pure, standard library only.

An engine may run code that comes with a model, and its environment can be read in /proc. It
inherits the variables that vLLM and its libraries read, and no secret that is for the gateway: keys
of remote servers, a database password, headers of a collector, cloud credentials.
`inherit_env` of an engine adds to the list; `env` sets a variable.
"""

from collections.abc import Collection, Mapping

from engines.output import is_secret

# The gateway's own settings, its keys among them.
PRIVATE_PREFIX = "GATEWAY_"
# With it, vLLM would require a key, which the gateway does not send to its own engines.
API_KEY = "VLLM_API_KEY"

_NAMES = frozenset(
    {
        # the system
        "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "PATH", "SHELL",
        "TEMP", "TMP", "TMPDIR", "TZ", "TZDIR", "USER", "VIRTUAL_ENV",
        # downloads; a proxy's URL may contain a password, without which downloads fail
        "ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY",
        "all_proxy", "https_proxy", "http_proxy", "no_proxy",
        "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE",
        "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN",
        # compilers, which Triton and torch.compile run
        "CC", "CFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "CXX", "CXXFLAGS", "C_INCLUDE_PATH",
        "LDFLAGS", "LIBRARY_PATH", "MAX_JOBS",
        # others that vLLM or PyTorch read
        "ATEN_CPU_CAPABILITY", "DO_NOT_TRACK", "FORCE_COLOR", "GPU_MAX_HW_QUEUES",
        "GPU_PINNED_MIN_XFER_SIZE", "NO_COLOR",
    }
)  # fmt: skip
_PREFIXES = (
    # the system and Python
    "CONDA_", "LC_", "MALLOC_", "PYTHON", "XDG_",
    # NVIDIA's, AMD's, Intel's and Google's accelerators
    "CUBLAS", "CUDA", "CUDNN", "NVCC_", "NVIDIA_", "NVSHMEM_",
    "AITER_", "AMD_", "HIP", "HSA_", "MIOPEN_", "ROCBLAS_", "ROCM_", "ROCR_",
    "HABANA_", "ONEAPI_", "SYCL_", "ZE_", "LIBTPU_", "PJRT_", "TPU_", "XLA_",
    # between processes and machines
    "CCL_", "FI_", "GLOO_", "NCCL_", "RAY_", "UCX_",
    # threads and arithmetic
    "BLIS_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_",
    # vLLM and its libraries
    "VLLM_", "AOTINDUCTOR_", "DG_", "FLASHINFER_", "FLASH_ATTENTION_", "HF_", "HUGGINGFACE_",
    "INDUCTOR_", "LMCACHE_", "MODELSCOPE_", "MOONCAKE_", "NIXL_", "OTEL_", "OUTLINES_", "PYTORCH_",
    "RUNAI_STREAMER_", "SAFETENSORS_", "TIKTOKEN_", "TILELANG_", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TRITON_", "XGRAMMAR_",
)  # fmt: skip


def inherited(
    environment: Mapping[str, str], more: Collection[str] = (), withheld: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables of an environment that an engine inherits.

    `more` has names and prefixes (`AWS_*`) in addition to the list; `withheld` has names that are
    left out even so.
    """
    listed = [name for name, value in environment.items() if _listed(name, value)]
    return requested(environment, [*more, *listed], withheld)


def requested(
    environment: Mapping[str, str], names: Collection[str], withheld: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables of an environment that `names` and its prefixes (`AWS_*`) select.

    `withheld` has names that are left out even so.
    """
    exact = {name for name in names if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
    return {
        name: value
        for name, value in environment.items()
        if not never_inherited(name)
        and name not in withheld
        and (name in exact or name.startswith(prefixes))
    }


def never_inherited(name: str) -> bool:
    """Return whether a variable is withheld from every engine, whatever its settings are."""
    return name.startswith(PRIVATE_PREFIX) or name == API_KEY


def _listed(name: str, value: str) -> bool:
    # A prefix names the owner of a variable; the variable may be a secret: NVIDIA_API_KEY.
    secret = is_secret(name, value) or name.endswith("HEADERS")
    return name in _NAMES or (name.startswith(_PREFIXES) and not secret)
