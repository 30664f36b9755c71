"""Import of vLLM command lines."""

from typing import Any

import pytest

from app.config_import import ImportFault, ImportResult, from_vllm
from engines.spec import ProcessSpec
from tests.app.config_import.conftest import Check, notes


def engine_of(check: Check, text: str) -> tuple[ProcessSpec, ImportResult]:
    """Return the one engine of an imported command line, as the gateway reads it."""
    imported = from_vllm(text)
    [model] = check(imported).models
    [engine] = model.engines
    assert isinstance(engine, ProcessSpec)
    return engine, imported


# Where the command is


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/m --max-model-len 4096",
        "/opt/venv/bin/vllm serve org/m --max_model_len=4096",
        "vllm serve --model org/m --max-model-len 4096",
        "vllm serve --max-model-len 4096 org/m",
        "vllm serve \\\n  org/m \\\n  --max-model-len 4096",
        "python -m vllm.entrypoints.openai.api_server --model org/m --max-model-len 4096",
        "python3.11 -m vllm.entrypoints.openai.api_server --model=org/m --max-model-len 4096",
        "nohup vllm serve org/m --max-model-len 4096 > log.txt 2>&1 &",
        "bash -lc 'exec vllm serve org/m --max-model-len 4096'",
        "docker run --rm -it --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:v0.10.0 "
        "--model org/m --max-model-len 4096",
        "podman run -d --name v docker.io/rocm/vllm:latest vllm serve org/m --max-model-len 4096",
        "docker run --entrypoint python3 vllm/vllm-openai -m vllm.entrypoints.openai.api_server "
        "--model org/m --max-model-len 4096",
        "docker run my/image bash -c 'vllm serve org/m --max-model-len 4096'",
    ],
)
def test_model_and_flags_are_found_in_every_way_to_start_vllm(check: Check, text: str) -> None:
    engine, _ = engine_of(check, text)
    assert engine.model == "org/m"
    assert engine.args == {"max-model-len": 4096}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no command of vLLM in it"),
        ("llama-server -m x.gguf", "`llama-server -m` is left out"),
        ("docker stop vllm", "no command of vLLM in it"),
        ("docker run ghcr.io/ggml-org/llama.cpp:server -m x", "no command of vLLM in it"),
        ("vllm bench serve", "no command of vLLM in it"),
        ("vllm serve 'org/m", "not complete: no closing quotation"),
        ("vllm serve --max-model-len 4096", "names no model"),
        ("vllm serve $MODEL", "shell variable MODEL"),
        ("vllm serve ${MODEL:-org/m}", "shell variable MODEL:-org/m"),
        ("vllm serve " + "m" * 300, "should have at most 256 characters"),
        ("vllm serve m" + " " * 2_000_000, "is longer than"),
        ("vllm serve m\udcff", "is not UTF-8"),
    ],
)
def test_text_without_a_vllm_server_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ImportFault) as raised:
        from_vllm(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_servers_become_two_models(check: Check) -> None:
    imported = from_vllm("vllm serve a --port 8001 & vllm serve b --port 8002")
    settings = check(imported)
    assert [model.name for model in settings.models] == ["a", "b"]
    assert settings.server.port == 8001
    assert "server.port: is taken from the first server" in notes(imported)


def test_other_commands_have_a_note() -> None:
    imported = from_vllm("cd /srv && numactl -N 0 vllm serve m")
    assert "`cd srv` is left out" in notes(imported)
    assert "`numactl -N` before vLLM is left out" in notes(imported)


# Flags


@pytest.mark.parametrize(
    ("flags", "args"),
    [
        ("-tp 2 -pp=2", {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}),
        ("-O3", {"optimization-level": 3}),
        ("--enable-prefix-caching", {"enable-prefix-caching": True}),
        ("--no-enable-prefix-caching", {"enable-prefix-caching": False}),
        ("--gpu-memory-utilization 0.92", {"gpu-memory-utilization": 0.92}),
        ("--max-model-len 32k", {"max-model-len": "32k"}),
        ("--seed -1", {"seed": -1}),
        ("--revision 007", {"revision": "007"}),
        ("--dtype=bfloat16", {"dtype": "bfloat16"}),
        ("--lora-target-modules o_proj k_proj", {"lora-target-modules": ["o_proj", "k_proj"]}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph-capture-sizes": ["1", "2", "4"]}),
        ('--limit-mm-per-prompt \'{"image": 2}\'', {"limit-mm-per-prompt": {"image": 2}}),
        ("--hf-overrides.max_position_embeddings 99 --hf-overrides.rope.type x",
         {"hf-overrides": {"max_position_embeddings": 99, "rope": {"type": "x"}}}),
        ("--compilation-config.sizes+ 1 -cc.sizes+ 2", {"compilation-config": {"sizes": [1, 2]}}),
        ("--enforce-eager --trust-remote-code", {"enforce-eager": True, "trust-remote-code": True}),
    ],
)  # fmt: skip
def test_flags_have_their_natural_form_in_yaml(
    check: Check, flags: str, args: dict[str, Any]
) -> None:
    engine, imported = engine_of(check, f"vllm serve m {flags}")
    assert engine.args == args
    assert notes(imported).count("\n") == 0  # that of keys alone


@pytest.mark.parametrize("switch", ["--enforce-eager", "--worker-use-ray --enforce-eager"])
def test_switch_before_the_model_does_not_consume_it(check: Check, switch: str) -> None:
    engine, _ = engine_of(check, f"vllm serve {switch} org/m --dtype auto")
    assert engine.model == "org/m"
    assert engine.args == {"enforce-eager": True, "dtype": "auto"}


def test_imported_flags_become_the_same_arguments(check: Check) -> None:
    words = ["--tensor-parallel-size=2", "--enforce-eager", "--dtype=auto", "--no-async-scheduling"]
    engine, _ = engine_of(check, f"vllm serve m {' '.join(words)}")
    assert engine.argv() == words


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--uds /run/x", "chooses the sockets"),
        ("--root-path /llm", "strip a prefix"),
        ("--ssl-certfile c.pem", "terminate TLS in a proxy"),
        ("--config v.yaml", "the file is not read"),
        ("--headless", "run the other nodes yourself"),
        ("--api-server-count 4", "use replicas"),
        ("--api-server 4", "use replicas"),
        ("--middleware a.b", "the gateway loads no middleware"),
        ("--dtype $DTYPE", "shell variable DTYPE"),
        ("--dtype `cat x`", "belongs to no flag"),
        ("--allowed-media-domains https://x/", "is not a host name"),
        ("--dtype auto --dtype half", "--dtype is given twice"),
        ("stray", "'stray' belongs to no flag"),
        ("--enable-reasoning", "--enable-reasoning: vLLM no longer has it: reasoning-parser alone"),
        ("--disable-log-requests", "requests are no longer logged by default"),
        ("--swap-space 8", "computed again, not swapped"),
        ("--num-scheduler-steps 8", "multi-step scheduling is gone"),
    ],
)
def test_flag_that_the_gateway_sets_is_left_out_with_a_note(
    check: Check, flag: str, said: str
) -> None:
    engine, imported = engine_of(check, f"vllm serve m {flag}")
    assert said in notes(imported)
    assert set(engine.args) <= {"dtype"}


def test_names_address_and_origins_are_imported(check: Check) -> None:
    imported = from_vllm(
        "vllm serve org/m --served-model-name m gpt-4o --host 127.0.0.1 --port 8081 "
        "--allowed-origins '[\"https://a.example\"]' --allowed-media-domains images.example.com"
    )
    settings = check(imported)
    [model] = settings.models
    assert model.names == ("m", "gpt-4o")
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8081)
    assert settings.server.cors_origins == ("https://a.example",)
    assert model.media.domains == ("images.example.com",)


def test_adapters_are_imported(check: Check) -> None:
    imported = from_vllm(
        "docker run -v /srv/loras:/loras vllm/vllm-openai --model /m --served-model-name m "
        """--enable-lora --lora-modules a=/loras/a '{"name": "b", "path": "owner/b"}' '{' c= d=$D"""
    )
    [model] = check(imported).models
    assert [(one.name, one.source) for one in model.adapters or ()] == [
        ("a", "/srv/loras/a"),
        ("b", "owner/b"),
    ]
    assert notes(imported).count("--lora-modules: an adapter is left out: ") == 3


def test_invalid_port_has_a_note(check: Check) -> None:
    imported = from_vllm("vllm serve m --port 99999")
    assert check(imported).models
    assert "server: is left as it is: port:" in notes(imported)


# Variables and secrets


def test_variables_before_the_command_become_those_of_the_engine(check: Check) -> None:
    engine, _ = engine_of(
        check, "env VLLM_USE_V1=1 OMP_NUM_THREADS='4' CUDA_VISIBLE_DEVICES=0,2 vllm serve m"
    )
    assert engine.env == {"VLLM_USE_V1": "1", "OMP_NUM_THREADS": "4"}
    assert engine.gpus == [0, 2]


SECRET = "sk-aVeryLongSecretOfSomebody0123456789"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"vllm serve m --api-key {SECRET}", "set GATEWAY_API_KEYS"),
        (f"vllm serve m --api-key={SECRET}", "set GATEWAY_API_KEYS"),
        (f"vllm serve m --api_key {SECRET} two", "set GATEWAY_API_KEYS"),
        (f"VLLM_API_KEY={SECRET} vllm serve m", "set GATEWAY_API_KEYS"),
        (f"HF_TOKEN={SECRET} vllm serve m", "HF_TOKEN: its value is not copied"),
        (f"AWS_SECRET_ACCESS_KEY={SECRET} vllm serve m", "AWS_SECRET_ACCESS_KEY: its value is not"),
        (f"HARMLESS={SECRET} vllm serve m", "HARMLESS: its value is not copied"),
        (f"GATEWAY_ADMIN_KEY={SECRET} vllm serve m", "an engine never inherits it"),
        (f"vllm serve m --hf-token {SECRET}", "set HF_TOKEN"),
        (f"vllm serve m --harmless {SECRET}", "--harmless: its value is not copied"),
        (f"vllm serve m --kv.auth_token {SECRET}", "--kv: its value is not copied"),
        (f"""vllm serve m --kv-transfer-config '{{"password": "{SECRET}"}}'""", "not copied"),
        (f"docker run -e HF_TOKEN={SECRET} vllm/vllm-openai --model m", "HF_TOKEN: its value"),
        (f"docker run --env HF_TOKEN={SECRET} vllm/vllm-openai --model m", "HF_TOKEN: its value"),
        (f"curl -H {SECRET} && vllm serve m", "is left out"),
    ],
)
def test_no_secret_reaches_the_file_or_a_note(check: Check, text: str, said: str) -> None:
    engine, imported = engine_of(check, text)
    assert said in notes(imported)
    assert SECRET not in repr(imported)
    assert SECRET not in engine.model_dump_json()


def test_secrets_not_inherited_by_default_are_added_to_inherit_env(check: Check) -> None:
    engine, _ = engine_of(check, f"AWS_SECRET_ACCESS_KEY={SECRET} HF_TOKEN=$HF_TOKEN vllm serve m")
    assert engine.inherit_env == ["AWS_SECRET_ACCESS_KEY"]
    assert engine.env == {}


# Containers


def test_container_becomes_a_process_with_host_paths(check: Check) -> None:
    imported = from_vllm(
        "docker run --gpus '\"device=2,3\"' --shm-size=16g -v /mnt/models:/models:ro "
        "-v cache:/root --mount type=bind,source=/srv/templates,target=/t -e VLLM_USE_V1=1 "
        "-p 127.0.0.1:8081:8000 vllm/vllm-openai:v0.10.0 --model /models/qwen "
        "--chat-template /t/a.jinja --port 8000"
    )
    settings = check(imported)
    [engine] = settings.models[0].engines
    assert isinstance(engine, ProcessSpec)
    assert engine.model == "/mnt/models/qwen"
    assert engine.args == {"chat-template": "/srv/templates/a.jinja"}
    assert engine.gpus == [2, 3]
    assert engine.env == {"VLLM_USE_V1": "1"}
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8081)
    assert "the image vllm/vllm-openai:v0.10.0 is not used" in notes(imported)


def test_gpus_and_host_variables_of_a_container_are_imported(check: Check) -> None:
    engine, imported = engine_of(
        check, "docker run --gpus=2 -e HF_TOKEN -eA=b --env-file .env vllm/vllm-openai --model m"
    )
    assert (engine.gpus, engine.env) == (2, {"A": "b"})
    assert "--env-file: the file is not read" in notes(imported)
