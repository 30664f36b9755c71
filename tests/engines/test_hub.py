"""Models that must be downloaded, and hubs that cannot be reached."""

import socket
from pathlib import Path

import pytest

from engines.hub import find_hub, hub_fault
from tests.gateway import free_port

MODEL = "org/model-1.5B"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of an engine whose hub refuses connections."""
    return {"HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}


def test_hub_that_cannot_be_reached_is_named_with_what_to_set(env: dict[str, str]) -> None:
    fault = hub_fault(MODEL, {}, env)
    assert fault is not None
    host = env["HF_ENDPOINT"].removeprefix("http://")
    assert fault.startswith(
        f"model {MODEL} is not on this machine, and the Hugging Face hub cannot be reached: "
        f"{host}: Connection refused; set env: HF_ENDPOINT to a mirror"
    )
    assert "VLLM_USE_MODELSCOPE" in fault
    assert "directory" in fault


def test_host_without_an_address_is_named(env: dict[str, str]) -> None:
    fault = hub_fault(MODEL, {}, {**env, "HF_ENDPOINT": "https://hub.invalid"})
    assert fault is not None
    assert "hub.invalid:443: the name cannot be resolved" in fault


def test_hub_that_accepts_connections_is_no_fault(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub_fault(MODEL, {}, {**env, "HF_ENDPOINT": endpoint}) is None


def test_proxy_is_asked_in_place_of_the_hub(env: dict[str, str]) -> None:
    port = free_port()
    proxied = {**env, "HTTPS_PROXY": f"http://user:canary@127.0.0.1:{port}"}
    fault = hub_fault(MODEL, {}, proxied)
    assert fault is not None
    assert f"the proxy 127.0.0.1:{port}: Connection refused" in fault
    assert "canary" not in fault


@pytest.mark.parametrize(
    ("place", "variables", "args"),
    [
        (".cache/huggingface/hub", {}, {}),
        ("home/hub", {"HF_HOME": "~/home"}, {}),
        ("hub", {"HF_HUB_CACHE": "~/hub"}, {}),
        ("xdg/huggingface/hub", {"XDG_CACHE_HOME": "~/xdg"}, {}),
        ("there", {}, {"download-dir": "~/there"}),
    ],
)
def test_model_in_the_cache_needs_no_hub(
    env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    variables: dict[str, str],
    args: dict[str, object],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = tmp_path / place / "models--org--model-1.5B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert find_hub(MODEL, args, {**env, **variables}) is not None, "it has no file yet"
    (snapshot / "config.json").write_text("{}")
    assert find_hub(MODEL, args, {**env, **variables}) is None


@pytest.mark.parametrize(
    "place",
    ["models/org--model-1.5B/snapshots/master", "models/org/model-1___5B", "hub/org/model-1.5B"],
)
@pytest.mark.parametrize("root", [".cache/modelscope", "own"])
def test_modelscope_has_a_host_and_a_cache_of_its_own(
    env: dict[str, str], tmp_path: Path, root: str, place: str
) -> None:
    variables = {**env, "VLLM_USE_MODELSCOPE": "true"}
    if root == "own":
        variables["MODELSCOPE_CACHE"] = str(tmp_path / root)
    hub = find_hub(MODEL, {}, variables)
    assert hub is not None
    assert (hub.name, hub.host, hub.port) == ("ModelScope", "www.modelscope.cn", 443)
    cached = tmp_path / root / place
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    assert find_hub(MODEL, {}, variables) is None


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"MODELSCOPE_ENDPOINT": "http://mirror:8080"}, ("mirror", 8080)),
        ({"MODELSCOPE_DOMAIN": "www.modelscope.ai"}, ("www.modelscope.ai", 443)),
        ({"MODELSCOPE_ENDPOINT": "mirror", "MODELSCOPE_DOMAIN": "other"}, ("mirror", 443)),
    ],
)
def test_another_site_of_modelscope_is_asked(
    env: dict[str, str], variables: dict[str, str], place: tuple[str, int]
) -> None:
    hub = find_hub(MODEL, {}, {**env, "VLLM_USE_MODELSCOPE": "true", **variables})
    assert hub is not None
    assert (hub.host, hub.port) == place


@pytest.mark.parametrize(
    ("model", "variables"),
    [
        ("s3://bucket/model", {}),
        ("/models/none", {}),
        ("name", {}),
        (MODEL, {"HF_HUB_OFFLINE": "1"}),
        (MODEL, {"TRANSFORMERS_OFFLINE": "true"}),
        (MODEL, {"HF_ENDPOINT": "http://[::1"}),
    ],
)
def test_what_is_not_downloaded_from_a_hub_is_not_checked(
    env: dict[str, str], model: str, variables: dict[str, str]
) -> None:
    assert find_hub(model, {}, {**env, **variables}) is None


def test_directory_named_like_a_repository_needs_no_hub(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_hub(MODEL, {}, env) is not None
    Path(MODEL).mkdir(parents=True)
    assert find_hub(MODEL, {}, env) is None
