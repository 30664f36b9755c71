"""compose.yaml as Compose reads it: valid, and in agreement with the gateway and its image."""

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import compose_spec
import pytest
import yaml

from app.settings import ServerSettings, Settings, load_settings
from tests.deploy.dockerfile import read
from tests.deploy.image import CACHE, DOCKERFILE, ROOT, STATE
from tests.services import PostgresServer

COMPOSE = ROOT / "deploy" / "compose.yaml"
EXAMPLE = ROOT / "deploy" / "docker" / "compose.env.example"
PROFILES = {"remote": "gateway", "cpu": "gateway-cpu", "gpu": "gateway-gpu"}
SECRET = "abcdefghijklmnopqrstuvwxyz"


def example() -> dict[str, str]:
    """The example of deploy/.env."""
    lines = EXAMPLE.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def filled_in() -> dict[str, str]:
    return {name: value or SECRET for name, value in example().items()}


def interpolated(value: object, variables: dict[str, str]) -> Any:
    """Put variables in as Compose does: ${NAME}, ${NAME:-default}, ${NAME:?message}, $$."""

    def put(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        found = variables.get(match["name"]) or (match["default"] or "")
        if not found and match["message"]:
            raise KeyError(match["name"])
        return found

    if isinstance(value, dict):
        return {name: interpolated(item, variables) for name, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, variables) for item in value]
    if isinstance(value, str):
        pattern = r"\$\$|\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?(?P<message>[^}]+))?\}"
        return re.sub(pattern, put, value)
    return value


def composed() -> dict[str, Any]:
    """The file with the example's variables, filled in."""
    data = interpolated(yaml.safe_load(COMPOSE.read_text()), filled_in())
    assert isinstance(data, dict)
    return data


def as_yaml(data: dict[str, Any]) -> str:
    # Docker's own word for the host's address, which the parser does not know.
    return yaml.safe_dump(data).replace("host-gateway", "192.0.2.1")


@cache
def services() -> dict[str, dict[str, Any]]:
    return dict(composed()["services"])


def gateways() -> Iterator[tuple[str, dict[str, Any]]]:
    for profile, name in PROFILES.items():
        yield profile, services()[name]


def binds(service: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Source, target and whether it is read only, of each volume."""
    for volume in service.get("volumes", ()):
        source, target, *mode = volume.split(":")
        yield source, target, mode == ["ro"]


def test_the_file_is_compose() -> None:
    read_back = compose_spec.PyCompose.from_yaml(as_yaml(composed()))
    assert set(read_back.service_names()) == set(services())


def test_a_fault_in_the_file_would_be_seen() -> None:
    faulty = composed()
    faulty["services"]["redis"]["healthcheck"]["interval"] = "often"
    with pytest.raises(ValueError, match="interval"):
        compose_spec.PyCompose.from_yaml(as_yaml(faulty))


def test_one_gateway_runs_in_each_profile() -> None:
    by_profile = {
        tuple(service["profiles"]): name
        for name, service in services().items()
        if "profiles" in service
    }
    assert by_profile == {(profile,): name for profile, name in PROFILES.items()}
    assert example()["COMPOSE_PROFILES"] in PROFILES
    for name, service in services().items():
        needed = service.get("depends_on", {})
        for other, how in needed.items():
            assert "profiles" not in services()[other], f"{name} needs {other}"
            assert how == {"condition": "service_healthy"}
            assert services()[other]["healthcheck"]


def test_every_variable_is_in_the_example_and_used() -> None:
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", COMPOSE.read_text()))
    assert used | {"COMPOSE_PROFILES"} == set(example())
    # Published secrets would be used as they are.
    for name, value in example().items():
        assert not value or not name.endswith(("PASSWORD", "KEY", "KEYS", "TOKEN"))


@pytest.mark.parametrize(
    "name",
    [name for name in example() if name.endswith("PASSWORD")] + ["GATEWAY_ADMIN_KEY"],
)
def test_without_a_secret_nothing_starts(name: str) -> None:
    variables = {**filled_in(), name: ""}
    with pytest.raises(KeyError, match=name):
        interpolated(yaml.safe_load(COMPOSE.read_text()), variables)


def test_nothing_runs_with_more_rights_than_it_needs() -> None:
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid"}, name
        tag = service["image"].partition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), f"{name}: {service['image']} is not a version"


def test_only_the_gateway_and_grafana_are_reached_from_the_host() -> None:
    networks = composed()["networks"]
    assert {name for name, network in networks.items() if not network.get("internal")} == {"front"}
    published = {name for name, service in services().items() if "ports" in service}
    assert published == {*PROFILES.values(), "grafana"}
    on_front = {name for name, service in services().items() if "front" in service["networks"]}
    assert on_front == published
    for name in published:
        (port,) = services()[name]["ports"]
        assert port.startswith("127.0.0.1:"), "open to the network only where somebody says so"


def test_what_is_mounted_is_in_the_repository() -> None:
    volumes = composed()["volumes"]
    mounted = 0
    for name, service in services().items():
        for source, target, read_only in binds(service):
            if not source.startswith("."):
                assert source in volumes, f"{name}: {source}"
                continue
            mounted += 1
            assert read_only, f"{name}: {target}"
            assert (COMPOSE.parent / source).exists(), source
    assert mounted >= 7


def test_a_gateway_has_what_its_image_expects() -> None:
    stages = read(DOCKERFILE)
    for profile, service in gateways():
        target = service["build"]["target"]
        assert target in stages
        assert service["build"]["dockerfile"] == str(DOCKERFILE.relative_to(ROOT))
        mounts = {where: what for what, where, _ in binds(service)}
        assert mounts["/etc/vllm-gateway/gateway.yaml"] == f"./docker/gateway.{profile}.yaml"
        expected = {STATE} if target == "gateway" else {STATE, CACHE}
        assert {where for where in mounts if where.startswith("/var")} == expected
        assert service["init"] is True
        (port,) = service["ports"]
        assert port.endswith(f":{ServerSettings().port}")
    devices = services()["gateway-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_gateway_starts_with_these_files_and_variables(
    profile: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(os.environ):
        if name.startswith("GATEWAY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    service = services()[PROFILES[profile]]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    settings = load_settings(ROOT / "deploy" / "docker" / f"gateway.{profile}.yaml")
    assert settings.models
    assert settings.server.host == "0.0.0.0", "Docker's proxy connects to the container's address"
    ours = {n for n in service["environment"] if n.startswith("GATEWAY_")}
    sections = {f"GATEWAY_{field.upper()}" for field in Settings.model_fields}
    assert {name.split("__")[0] for name in ours} <= sections

    database = settings.state.database_url.get_secret_value()
    postgres = services()["postgres"]["environment"]
    user, password = postgres["POSTGRES_USER"], postgres["POSTGRES_PASSWORD"]
    assert database == f"postgresql+asyncpg://{user}:{password}@postgres/{postgres['POSTGRES_DB']}"
    assert settings.state.redis_url is not None
    redis = services()["redis"]["environment"]["REDIS_PASSWORD"]
    assert settings.state.redis_url.get_secret_value() == f"redis://:{redis}@redis:6379/0"

    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace >= settings.server.drain_timeout_s + 20


def test_prometheus_knows_every_gateway_by_one_name() -> None:
    for _, service in gateways():
        assert service["networks"]["watch"] == {"aliases": ["gateway"]}
    assert services()["prometheus"]["networks"] == ["watch"]


@pytest.mark.services
@pytest.mark.slow
async def test_grafana_may_read_the_ledger_and_nothing_more(
    postgres_server: PostgresServer,
) -> None:
    """The script that the PostgreSQL image runs, and tables that are made after it."""
    owner = postgres_server.create("ledger_reader_test").replace("+asyncpg", "")
    connection = await asyncpg.connect(owner)
    try:
        host, port = await connection.fetchrow(
            "select inet_server_addr()::text, inet_server_port()"
        )
        user = await connection.fetchval("select current_user")
        environment = {
            **os.environ,
            "POSTGRES_USER": user,
            "POSTGRES_DB": "ledger_reader_test",
            "LEDGER_READER_PASSWORD": "it's quoted",
            "PGHOST": (host or "127.0.0.1").split("/")[0],
            "PGPORT": str(port),
        }
        script = ROOT / "deploy" / "docker" / "ledger-reader.sh"
        subprocess.run(["/bin/sh", script], env=environment, check=True)
        await connection.execute("create table later (n int); insert into later values (7)")
        reader = await asyncpg.connect(
            host=environment["PGHOST"],
            port=int(port),
            user="ledger_reader",
            password="it's quoted",
            database="ledger_reader_test",
        )
        try:
            assert await reader.fetchval("select n from later") == 7
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await reader.execute("insert into later values (8)")
        finally:
            await reader.close()
    finally:
        await connection.close()
