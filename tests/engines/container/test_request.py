"""What the daemon is asked for, and which daemon."""

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.container import find_socket
from engines.container.request import Daemon, create_request, default_user
from engines.guard.container_run import split_reference
from engines.guard.docker_api import DaemonUnavailable, DockerApi
from engines.output.startup import StartupLog
from engines.process import LauncherMissing
from engines.spec import ContainerSpec

DOCKER = Daemon(podman=False, rootless=False)
PODMAN = Daemon(podman=True, rootless=False)


def spec(**fields: Any) -> ContainerSpec:
    fields = {"kind": "container", "image": "vllm/vllm-openai:v0.32.0", "model": "m", **fields}
    return ContainerSpec.model_validate(fields)


def host_config(daemon: Daemon, gpus: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    body = create_request(
        spec(**fields),
        daemon,
        name="demo-0",
        label="x",
        command=["--model=m"],
        env={},
        user="1:1",
        socket_directory=Path("/s"),
        scratch=Path("/t"),
        gpus=gpus,
    )
    config: dict[str, Any] = body["HostConfig"]
    return config


def test_docker_gets_device_requests_and_podman_cdi_names() -> None:
    assert host_config(DOCKER, [0, 3])["DeviceRequests"] == [
        {"DeviceIDs": ["0", "3"], "Capabilities": [["gpu"]]}
    ]
    names = [device["PathOnHost"] for device in host_config(PODMAN, [0, 3])["Devices"]]
    assert names == ["nvidia.com/gpu=0", "nvidia.com/gpu=3"]


def test_container_gets_no_gpu_unless_it_is_assigned_one() -> None:
    assert not {"DeviceRequests", "Devices"} & host_config(DOCKER).keys()


def test_rights_are_dropped_by_default() -> None:
    config = host_config(DOCKER)
    assert config["CapDrop"] == ["ALL"]
    assert config["CapAdd"] == []
    assert config["SecurityOpt"] == ["no-new-privileges"]
    assert config["ReadonlyRootfs"] is True
    assert "PortBindings" not in config


def test_daemon_is_known_by_what_it_says() -> None:
    info = {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}
    assert Daemon.of(info, podman=True) == Daemon(podman=True, rootless=True)
    assert Daemon.of({"SecurityOptions": None}, podman=False) == DOCKER


def test_user_is_the_gateways_also_where_the_daemon_is_rootless() -> None:
    assert default_user(DOCKER, 1000, 100) == "1000:100"
    assert default_user(Daemon(podman=True, rootless=True), 1000, 100) == "0:0"


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("vllm/vllm-openai", ("vllm/vllm-openai", "latest")),
        ("vllm/vllm-openai:v1", ("vllm/vllm-openai", "v1")),
        ("host:5000/a/b", ("host:5000/a/b", "latest")),
        ("host:5000/a/b:v1", ("host:5000/a/b", "v1")),
        (f"a/b:v1@sha256:{'0' * 64}", ("a/b", f"sha256:{'0' * 64}")),
    ],
)
def test_reference_of_an_image_is_split(image: str, parts: tuple[str, str]) -> None:
    assert spec(image=image).image == image
    assert split_reference(image) == parts


@pytest.mark.parametrize(
    "fields",
    [
        {"image": "vllm openai"},
        {"image": "a/b@sha256:12"},
        {"image": "../images/json?all=1#"},
        {"volumes": ["/models"]},
        {"volumes": ["/models:models"]},
        {"volumes": ["/x:/run/vllm-gateway"]},
        {"user": "root"},
        {"entrypoint": []},
        {"shm_gib": 0},
    ],
)
def test_faulty_setting_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec(**fields)


def test_relative_volume_becomes_absolute_and_a_name_stays(tmp_path: Path) -> None:
    volumes = ["./models:/models:ro", "cache:/cache"]
    assert spec(volumes=volumes).binds == [f"{Path.cwd()}/models:/models:ro", "cache:/cache"]


def test_model_that_each_start_downloads_again_is_noted() -> None:
    note = spec(model="org/name").doubtful_model()
    assert note is not None
    assert note.startswith("each start downloads org/name again, unless the image has it: keep")
    assert spec(model="org/name", volumes=["cache:/cache"]).doubtful_model() is None
    assert spec(model="/models/name").doubtful_model() is None


def test_socket_is_the_configured_one_else_that_of_docker_host() -> None:
    environment = {"DOCKER_HOST": "unix:///run/other.sock"}
    assert find_socket(Path("/a.sock"), environment) == Path("/a.sock")
    assert find_socket(None, environment) == Path("/run/other.sock")
    with pytest.raises(LauncherMissing, match="DOCKER_HOST is tcp://box:2375"):
        find_socket(None, {"DOCKER_HOST": "tcp://box:2375"})


def test_socket_of_the_users_own_podman_is_found(tmp_path: Path) -> None:
    own = tmp_path / "podman" / "podman.sock"
    own.parent.mkdir()
    own.touch()
    assert find_socket(None, {"XDG_RUNTIME_DIR": str(tmp_path)}) == own


def test_socket_without_permission_is_reported_with_what_to_do() -> None:
    fault = DockerApi("/run/docker.sock").unavailable(PermissionError(13, "Permission denied"))
    assert isinstance(fault, DaemonUnavailable)
    assert str(fault).startswith("no permission for the socket /run/docker.sock: the user of")


def test_daemon_that_hangs_is_found_at_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.guard.docker_api.PING_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "d.sock"))
        listener.listen()
        with pytest.raises(DaemonUnavailable, match=r"d\.sock does not respond: timed out"):
            DockerApi(str(tmp_path / "d.sock")).call("DELETE", "/containers/x")


def test_progress_of_a_pull_is_read_from_the_log() -> None:
    log = StartupLog()
    log.feed("Pulling image localhost:5000/a/b:1")
    log.feed("Pulling image: 41% | 3200/7800 [MiB]")
    assert log.progress is not None
    assert (log.progress.phase, log.progress.done, log.progress.total) == (
        "pulling the image",
        3200,
        7800,
    )


@pytest.mark.parametrize(
    ("line", "permanent"),
    [
        ("image a/b:1 is not on this machine, and pull is never", True),
        ("cannot pull image a/b:1: manifest unknown", True),
        ("cannot pull image a/b:1: write /x: No space left on device", False),
        ("cannot pull image a/b:1: the connection to the daemon broke off", False),
        ("cannot pull image a/b:1: dial tcp: lookup x: no such host", False),
    ],
)
def test_fault_of_an_image_is_permanent_unless_it_may_pass(line: str, permanent: bool) -> None:
    log = StartupLog()
    log.feed(f"ContainerError: {line}")
    assert log.failure is not None
    assert log.failure.permanent is permanent
    assert str(log.failure).startswith(line)
