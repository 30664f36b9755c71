"""The manifests as kubectl puts them together: valid, and in agreement with each other."""

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from ipaddress import ip_network
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.settings import QueueSettings, ServerSettings, Settings, load_settings
from engines.spec import RemoteSpec
from engines.spec.remote import Discovery
from tests.deploy.image import CACHE, ROOT, STATE

K8S = ROOT / "deploy" / "k8s"
BASE = K8S / "base"
OPERATOR = K8S / "overlays" / "prometheus-operator"
SLICES = K8S / "overlays" / "endpoint-slices"
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
    """The pod template of every Deployment and StatefulSet, by its name."""
    return {name: one["spec"]["template"] for name, one in workloads(directory).items()}


def workloads(directory: Path = BASE) -> dict[str, Manifest]:
    """Every Deployment and StatefulSet, by its name."""
    return of_kind("Deployment", directory) | of_kind("StatefulSet", directory)


def engines() -> dict[str, Manifest]:
    """The pod template of the engines of every model, by the name of their Service."""
    return {name: pod for name, pod in pods().items() if name != "gateway"}


def containers(directory: Path) -> Iterator[tuple[Manifest, Manifest]]:
    """Every container, with the specification of its pod."""
    for pod in pods(directory).values():
        for container in pod["spec"]["containers"]:
            yield pod["spec"], container


def labels(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"]["labels"])


def selects(selector: Mapping[str, Any], of: Mapping[str, str]) -> bool:
    """Return whether a label selector matches these labels."""
    assert set(selector) <= {"matchLabels"}
    expected: Mapping[str, str] = selector.get("matchLabels", {})
    return expected.items() <= of.items()


def config(directory: Path = BASE) -> str:
    (held,) = of_kind("ConfigMap", directory).values()
    return str(held["data"]["gateway.yaml"])


@pytest.fixture
def engine_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment like the gateway's pod: the key of the engines, and no other setting."""
    for name in list(os.environ):
        if name.startswith("GATEWAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_API_KEY", "sk-engine-0123456789abcdef")
    monkeypatch.chdir(tmp_path)


def load(text: str, directory: Path) -> Settings:
    file = directory / "gateway.yaml"
    file.write_text(text)
    return load_settings(file)


def discoveries(settings: Settings) -> dict[str, Discovery]:
    """What every model discovers its engines by, by the model's name."""
    found = {}
    for model in settings.models:
        (engine,) = model.engines
        assert isinstance(engine, RemoteSpec)
        assert engine.discover is not None
        found[model.name] = engine.discover
    return found


@pytest.mark.parametrize("overlay", [OPERATOR, SLICES], ids=lambda overlay: overlay.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_would_take_every_manifest(version: str, overlay: Path) -> None:
    manifests = [m for m in built(overlay) if m["kind"] not in CUSTOM]
    assert {(m["kind"], m["metadata"]["name"]) for m in manifests if m["kind"] != "ConfigMap"} > {
        (m["kind"], m["metadata"]["name"]) for m in built(BASE) if m["kind"] != "ConfigMap"
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
    assert set(services) == {"gateway", "vllm-qwen"} == set(pods())
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


def test_every_workload_selects_its_own_pods_only() -> None:
    for name, workload in workloads().items():
        taken = [
            n for n, pod in pods().items() if selects(workload["spec"]["selector"], labels(pod))
        ]
        assert taken == [name]
    (budget,) = of_kind("PodDisruptionBudget").values()
    assert selects(budget["spec"]["selector"], labels(pods()["gateway"]))


@pytest.mark.usefixtures("engine_key")
def test_the_configuration_finds_the_engines_of_every_model_by_dns(tmp_path: Path) -> None:
    settings = load(config(), tmp_path)
    assert settings.server.host == "0.0.0.0", "probes and the Service connect to the pod's address"
    found = {one.dns: one.port for one in discoveries(settings).values()}
    services = {n: s for n, s in of_kind("Service").items() if n != "gateway"}
    assert set(found) == {
        f"{name}.{service['metadata']['namespace']}.svc" for name, service in services.items()
    }
    for name, service in services.items():
        # A headless Service maps no ports: the addresses are those of the pods.
        assert service["spec"]["clusterIP"] == "None"
        (port,) = engines()[name]["spec"]["containers"][0]["ports"]
        assert found[f"{name}.{service['metadata']['namespace']}.svc"] == port["containerPort"]
        assert service["spec"]["ipFamilyPolicy"] == "SingleStack", "each engine is listed once"
        # Neither a pod that loads nor one that terminates has to be tried.
        assert "publishNotReadyAddresses" not in service["spec"]


@pytest.mark.usefixtures("engine_key")
def test_endpoint_slices_are_those_of_the_same_services(tmp_path: Path) -> None:
    by_dns, by_slices = yaml.safe_load(config()), yaml.safe_load(config(SLICES))
    found = discoveries(load(config(SLICES), tmp_path))
    for model in (*by_dns["models"], *by_slices["models"]):
        for engine in model["engines"]:
            del engine["discover"]
    assert by_dns == by_slices, "the configurations differ in nothing else"
    services = {n: s for n, s in of_kind("Service", SLICES).items() if n != "gateway"}
    ports = {}
    for one in found.values():
        assert one.kubernetes is not None
        assert one.kubernetes.namespace is None, "the Role is of the gateway's own namespace"
        # The label that Kubernetes itself gives to the slices of a Service.
        label, _, name = one.kubernetes.selector.partition("=")
        assert label == "kubernetes.io/service-name"
        ports[name] = one.kubernetes.port
    assert ports == {n: s["spec"]["ports"][0]["name"] for n, s in services.items()}


def test_only_the_gateway_that_watches_has_rights_and_only_these() -> None:
    for directory in (BASE, OPERATOR):
        assert not of_kind("Role", directory)
        assert not of_kind("RoleBinding", directory)
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        assert not of_kind(kind, SLICES)
    (role,) = of_kind("Role", SLICES).values()
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (binding,) = of_kind("RoleBinding", SLICES).values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    namespace = role["metadata"]["namespace"]
    pod = pods(SLICES)["gateway"]["spec"]
    account = {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": namespace}
    assert binding["subjects"] == [account]
    assert account["name"] in of_kind("ServiceAccount", SLICES)
    assert binding["metadata"]["namespace"] == namespace
    # The pod's setting takes precedence over the account's.
    mounted = {n: p["spec"]["automountServiceAccountToken"] for n, p in pods(SLICES).items()}
    assert mounted == {"gateway": True, "vllm-qwen": False}


def test_only_the_gateway_reaches_the_api_server() -> None:
    added = set(of_kind("NetworkPolicy", SLICES)) - set(of_kind("NetworkPolicy"))
    (policy,) = (of_kind("NetworkPolicy", SLICES)[name]["spec"] for name in added)
    assert policy["policyTypes"] == ["Egress"]
    assert selects(policy["podSelector"], labels(pods()["gateway"]))
    assert not any(selects(policy["podSelector"], labels(pod)) for pod in engines().values())
    (rule,) = policy["egress"]
    assert {port["port"] for port in rule["ports"]} == {443, 6443}
    for peer in rule["to"]:
        assert ip_network(peer["ipBlock"]["cidr"]).is_private or (
            peer["ipBlock"]["cidr"] == "100.64.0.0/10"
        )


def test_a_component_changes_no_other_manifest() -> None:
    """EndpointSlices go together with the Prometheus operator: they touch different manifests."""
    before = {(m["kind"], m["metadata"]["name"]): m for m in built(BASE)}
    after = {(m["kind"], m["metadata"]["name"]): m for m in built(SLICES)}
    changed = {kind for kind, name in before if before[kind, name] != after.get((kind, name))}
    assert changed == {"ConfigMap", "Deployment"}


@pytest.mark.usefixtures("engine_key")
def test_streams_outlast_neither_the_gateway_nor_an_engine(tmp_path: Path) -> None:
    settings = load(config(), tmp_path)
    gateway = pods()["gateway"]["spec"]
    hook = gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert hook.endswith("time.sleep(10)")
    assert gateway["terminationGracePeriodSeconds"] >= 10 + settings.server.drain_timeout_s + 20
    # What streams through a gateway may outlast no engine that ends.
    for pod in engines().values():
        (argument,) = [
            a for a in pod["spec"]["containers"][0]["args"] if a.startswith("--shutdown-timeout=")
        ]
        assert pod["spec"]["terminationGracePeriodSeconds"] > int(argument.split("=")[1])


def test_every_engine_has_a_name_and_a_disk_of_its_own() -> None:
    assert set(of_kind("StatefulSet")) == set(engines())
    for name, workload in of_kind("StatefulSet").items():
        assert workload["spec"]["serviceName"] == name
        assert of_kind("Service")[name]["spec"]["clusterIP"] == "None"
        (claim,) = workload["spec"]["volumeClaimTemplates"]
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
        spec = workload["spec"]["template"]["spec"]
        mounts = {m["name"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounts == {
            claim["metadata"]["name"],
            *(volume["name"] for volume in spec["volumes"]),
        }


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


@pytest.mark.parametrize("directory", [BASE, SLICES], ids=lambda directory: directory.name)
def test_no_pod_may_more_than_it_needs(directory: Path) -> None:
    """Pod Security Standards, `restricted`, which the namespace enforces; and a root read only."""
    (namespace,) = of_kind("Namespace").values()
    assert labels(namespace)["pod-security.kubernetes.io/enforce"] == "restricted"
    seen = 0
    for pod, container in containers(directory):
        seen += 1
        token = directory == SLICES and container["name"] == "gateway"
        assert pod["automountServiceAccountToken"] is token
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
    assert seen == 2


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
    stranger = {"metadata": {"labels": {"app.kubernetes.io/name": "notebook"}}}
    for engine in engines().values():
        assert may_reach(gateway, engine, 8000)
        assert not may_reach(gateway, engine, 22)
        assert not may_reach(stranger, engine, 8000)
        assert not may_reach(engine, gateway, 8000)
        for other in engines().values():
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
    scaler = of_kind("HorizontalPodAutoscaler", OPERATOR)["gateway"]
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


def test_engines_are_scaled_by_the_demand_for_their_model() -> None:
    scaler = of_kind("HorizontalPodAutoscaler", OPERATOR)["vllm-qwen"]
    target = scaler["spec"]["scaleTargetRef"]
    assert target["kind"] == "StatefulSet"
    workload = of_kind("StatefulSet", OPERATOR)[target["name"]]
    assert "replicas" not in workload["spec"]
    assert (
        of_kind("StatefulSet")[target["name"]]["spec"]["replicas"]
        == (scaler["spec"]["minReplicas"])
    )
    (metric,) = [m["external"]["metric"] for m in scaler["spec"]["metrics"]]
    (model,) = yaml.safe_load(config())["models"]
    assert metric["selector"]["matchLabels"] == {"model": model["name"]}
    adapter = yaml.safe_load((OPERATOR / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["external"]
    assert rule["name"]["as"] == metric["name"]
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for series in re.findall(r"gateway_\w+", rule["metricsQuery"]):
        assert f"| `{series}` | gauge | model |" in documented


def test_demand_is_the_sum_over_all_gateways(tmp_path: Path) -> None:
    adapter = yaml.safe_load((OPERATOR / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["external"]
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="vllm",model="qwen"')
    values = {"requests_in_flight": (30, 40), "queue_depth": (0, 5)}
    series = [
        {
            "series": f'gateway_{name}{{namespace="{where}",model="{model}",pod="gateway-{pod}"}}',
            "values": str(value),
        }
        for name, both in values.items()
        for pod, value in enumerate(both)
        for where, model in (("vllm", "qwen"), ("vllm", "other"), ("elsewhere", "qwen"))
    ]
    samples = [{"labels": '{model="qwen"}', "value": 75}]
    check = {"expr": query, "eval_time": "0m", "exp_samples": samples}
    file = tmp_path / "demand.yml"
    file.write_text(
        yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": [check]}]})
    )
    ran = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


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
