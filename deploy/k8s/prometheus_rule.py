"""Print the rules of deploy/prometheus/rules as one PrometheusRule, for the Prometheus operator.

python deploy/k8s/prometheus_rule.py | kubectl apply -f -
"""

import sys
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[1] / "prometheus" / "rules"


def prometheus_rule(files: list[Path]) -> dict[str, Any]:
    """Return the manifest with the groups of all files, in their order."""
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gateway", "namespace": "vllm"},
        "spec": {"groups": groups},
    }


if __name__ == "__main__":
    yaml.safe_dump(prometheus_rule(sorted(RULES.glob("*.yml"))), sys.stdout, sort_keys=False)
