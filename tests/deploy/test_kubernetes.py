"""The manifests as kubectl puts them together: valid, and in agreement with each other."""

import os
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from app.settings import QueueSettings, ServerSettings, load_settings
from tests.deploy.image import CACHE, ROOT, STATE

K8S = ROOT / "deploy" / "k8s"
BASE = K8S / "base"
OPERATOR = K8S / "overlays" / "prometheus-operator"
# The oldest Kubernetes that upstream still mends, and the newest that the validator knows.
VERSIONS = ("1.32", kubernetes_validate.latest_version())
# Kinds of the Prometheus operator; its schemas are not Kubernetes'.
CUSTOM = {"ServiceMonitor"}

Manifest = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl puts the manifests together"),
]


@cache
def built(directory: Path) -> tuple[Manifest, ...]:
    """The manifests that `kubectl apply -k` would send."""
    text = subprocess.run(
        ["kubectl", "kustomize", directory], capture_output=True, text=True, check=True
    ).stdout
    return tuple(yaml.safe_load_all(text))


def of_kind(kind: str, directory: Path = BASE) -> dict[str, Manifest]:
    """The manifests of one kind, by name."""
    return {m["metadata"]["name"]: m for m in built(directory) if m["kind"] == kind}


def pods(directory: Path = BASE) -> dict[str, Manifest]:
    """The pod template of every Deployment, by the Deployment's name."""
    return {name: d["spec"]["template"] for name, d in of_kind("Deployment", directory).items()}


def containers() -> Iterator[tuple[Manifest, Manifest]]:
    """Every container, with the specification of its pod."""
    for pod in pods().values():
        for container in pod["spec"]["containers"]:
            yield pod["spec"], container


def labels(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"]["labels"])


def selects(selector: Mapping[str, Any], of: Mapping[str, str]) -> bool:
    """Return whether a label selector matches these labels."""
    assert set(selector) <= {"matchLabels"}
    expected: Mapping[str, str] = selector.get("matchLabels", {})
    return expected.items() <= of.items()


def config() -> str:
    (held,) = of_kind("ConfigMap").values()
    return str(held["data"]["gateway.yaml"])


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_would_take_every_manifest(version: str) -> None:
    manifests = [m for m in built(OPERATOR) if m["kind"] not in CUSTOM]
    assert {(m["kind"], m["metadata"]["name"]) for m in manifests} > {
        (m["kind"], m["metadata"]["name"]) for m in built(BASE)
    }
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_fault_in_a_manifest_would_be_seen() -> None:
    (deployment,) = [m for n, m in of_kind("Deployment").items() if n == "gateway"]
    faulty = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(faulty, VERSIONS[-1], strict=True)


def test_every_service_finds_its_pods_and_their_port() -> None:
    services = of_kind("Service")
    assert set(services) == {"gateway", "vllm-qwen-0", "vllm-qwen-1"} == set(pods())
    for name, service in services.items():
        found = [
            other
            for other, pod in pods().items()
            if service["spec"]["selector"].items() <= labels(pod).items()
        ]
        assert found == [name]
        (port,) = service["spec"]["ports"]
        (container,) = pods()[name]["spec"]["containers"]
        assert [p["name"] for p in container["ports"]] == [port["targetPort"]]


def test_every_deployment_selects_its_own_pods_only() -> None:
    for name, deployment in of_kind("Deployment").items():
        taken = [
            n for n, pod in pods().items() if selects(deployment["spec"]["selector"], labels(pod))
        ]
        assert taken == [name]
    (budget,) = of_kind("PodDisruptionBudget").values()
    assert selects(budget["spec"]["selector"], labels(pods()["gateway"]))


def test_the_configuration_is_one_and_names_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("GATEWAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_API_KEY", "sk-engine-0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "gateway.yaml"
    file.write_text(config())
    settings = load_settings(file)
    assert settings.server.host == "0.0.0.0", "probes and the Service connect to the pod's address"
    addresses = {
        urlsplit(engine["url"])
        for model in yaml.safe_load(config())["models"]
        for engine in model["engines"]
    }
    services = {n: s for n, s in of_kind("Service").items() if n != "gateway"}
    assert {address.hostname for address in addresses} == set(services)
    for address in addresses:
        (port,) = services[str(address.hostname)]["spec"]["ports"]
        assert address.port == port["port"]

    gateway = pods()["gateway"]["spec"]
    hook = gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert hook.endswith("time.sleep(10)")
    assert gateway["terminationGracePeriodSeconds"] >= 10 + settings.server.drain_timeout_s + 20
    # What streams through a gateway may outlast no engine that ends.
    for name in services:
        engine = pods()[name]["spec"]
        (argument,) = [
            a for a in engine["containers"][0]["args"] if a.startswith("--shutdown-timeout=")
        ]
        assert engine["terminationGracePeriodSeconds"] > int(argument.split("=")[1])


def test_the_gateway_finds_what_its_image_expects() -> None:
    (container,) = pods()["gateway"]["spec"]["containers"]
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert set(mounts) == {"/etc/vllm-gateway", STATE, "/tmp"}
    assert not CACHE.startswith(STATE)
    (port,) = container["ports"]
    assert port["containerPort"] == ServerSettings().port
    volumes = {v["name"]: v for v in pods()["gateway"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] in of_kind("ConfigMap")
    for probe, path in (
        ("livenessProbe", "/health"),
        ("startupProbe", "/health"),
        ("readinessProbe", "/ready"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}


def test_no_pod_may_more_than_it_needs() -> None:
    """Pod Security Standards, `restricted`, which the namespace enforces; and a root read only."""
    (namespace,) = of_kind("Namespace").values()
    assert labels(namespace)["pod-security.kubernetes.io/enforce"] == "restricted"
    seen = 0
    for pod, container in containers():
        seen += 1
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["fsGroup"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert ":" in container["image"], "the image has no tag"
        assert not container["image"].endswith(":latest")
        # Secrets come from the Secret alone.
        for variable in container.get("env", ()):
            if variable["name"].endswith(("KEY", "TOKEN")):
                assert "secretKeyRef" in variable["valueFrom"]
    assert seen == 3


def policies_for(pod: Manifest, direction: str) -> list[Manifest]:
    """The policies that select a pod and rule one direction."""
    return [
        policy["spec"]
        for policy in of_kind("NetworkPolicy").values()
        if direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], labels(pod))
    ]


def may_reach(source: Manifest, target: Manifest, port: int) -> bool:
    """Return whether the source's egress and the target's ingress allow a connection."""

    def allowed(one: Manifest, other: Manifest, direction: str, peers: str) -> bool:
        ruling = policies_for(one, direction)
        assert ruling, "without a policy all is allowed"
        rules = chain.from_iterable(policy.get(direction.lower(), ()) for policy in ruling)
        return any(
            any(
                set(peer) == {"podSelector"} and selects(peer["podSelector"], labels(other))
                for peer in rule[peers]
            )
            and any(p["protocol"] == "TCP" and p["port"] == port for p in rule["ports"])
            for rule in rules
        )

    return allowed(source, target, "Egress", "to") and allowed(target, source, "Ingress", "from")


def test_only_the_gateway_reaches_engines() -> None:
    gateway = pods()["gateway"]
    engines = [pod for name, pod in pods().items() if name != "gateway"]
    stranger = {"metadata": {"labels": {"app.kubernetes.io/name": "notebook"}}}
    assert len(engines) == 2
    for engine in engines:
        assert may_reach(gateway, engine, 8000)
        assert not may_reach(gateway, engine, 22)
        assert not may_reach(stranger, engine, 8000)
        assert not may_reach(engine, gateway, 8000)
        for other in engines:
            assert not may_reach(engine, other, 8000)
        # Nor from another namespace: each peer that may come is a pod of this one.
        for policy in policies_for(engine, "Ingress"):
            for rule in policy.get("ingress", ()):
                assert all(set(peer) == {"podSelector"} for peer in rule["from"])
        # Out of the cluster only: the addresses inside are taken away.
        peers = [
            peer
            for policy in policies_for(engine, "Egress")
            for rule in policy.get("egress", ())
            for peer in rule["to"]
            if "ipBlock" in peer
        ]
        (block,) = [peer["ipBlock"] for peer in peers]
        assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])


def test_the_autoscaler_looks_at_a_series_of_ours() -> None:
    (scaler,) = of_kind("HorizontalPodAutoscaler", OPERATOR).values()
    target = scaler["spec"]["scaleTargetRef"]["name"]
    assert "replicas" not in of_kind("Deployment", OPERATOR)[target]["spec"]
    (queue,) = [m["pods"] for m in scaler["spec"]["metrics"] if m["type"] == "Pods"]
    assert queue["metric"]["name"] == "gateway_queue_depth"
    assert int(queue["target"]["averageValue"]) * 4 == QueueSettings().max_waiting
    adapter = yaml.safe_load((OPERATOR / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == queue["metric"]["name"]
    # A share of what is requested, so something must be.
    (container,) = pods(OPERATOR)[target]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"]


def test_prometheus_finds_both_pages() -> None:
    (monitor,) = of_kind("ServiceMonitor", OPERATOR).values()
    service = of_kind("Service", OPERATOR)["gateway"]
    assert selects(monitor["spec"]["selector"], labels(service))
    assert monitor["metadata"]["namespace"] == service["metadata"]["namespace"]
    ports = [port["name"] for port in service["spec"]["ports"]]
    endpoints = monitor["spec"]["endpoints"]
    assert [e["path"] for e in endpoints] == ["/metrics", "/metrics/engines"]
    for endpoint in endpoints:
        assert endpoint["port"] in ports


def test_the_rules_of_prometheus_become_one_manifest(tmp_path: Path) -> None:
    script = runpy.run_path(str(K8S / "prometheus_rule.py"))
    files = [tmp_path / "a.yml", tmp_path / "b.yml"]
    for file in files:
        rules = [{"record": "r", "expr": "1"}]
        file.write_text(yaml.safe_dump({"groups": [{"name": file.stem, "rules": rules}]}))
    made = script["prometheus_rule"](files)
    assert made["kind"] == "PrometheusRule"
    assert [group["name"] for group in made["spec"]["groups"]] == ["a", "b"]
    (monitor,) = of_kind("ServiceMonitor", OPERATOR).values()
    assert made["metadata"]["namespace"] == monitor["metadata"]["namespace"]
    assert made["apiVersion"] == monitor["apiVersion"]
    assert script["RULES"] == ROOT / "deploy" / "prometheus" / "rules"
