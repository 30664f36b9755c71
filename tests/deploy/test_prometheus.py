"""The configuration and the rules for Prometheus, by Prometheus' own tools.

The tests of the rules are run as their page says: tests/docs/test_commands.py.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.telemetry.metrics import DURATION_BUCKETS, TTFT_BUCKETS
from tests.e2e.deployment import ROOT

HOME = ROOT / "deploy" / "prometheus"
ALERTS = yaml.safe_load((HOME / "rules" / "alerts.yml").read_text())["groups"]
RECORDING = yaml.safe_load((HOME / "rules" / "recording.yml").read_text())["groups"]
TESTS = sorted((HOME / "tests").glob("*.yml"))
OF_ALERT = re.compile(r'ALERTS\{alertname="(\w+)", alertstate="firing"\}')


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)


def rules(groups: Any) -> list[dict[str, Any]]:
    return [rule for group in groups for rule in group["rules"]]


def test_configuration_and_the_rules_it_names_are_valid() -> None:
    checked = promtool("check", "config", "--lint-fatal", "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    assert "2 rule files found" in checked.stdout


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for file in TESTS:
        for case in yaml.safe_load(file.read_text())["tests"]:
            for check in case["promql_expr_test"]:
                if found := OF_ALERT.search(check["expr"]):
                    (fires if check["exp_samples"] else silent).add(found[1])
    alerts = {rule["alert"] for rule in rules(ALERTS)}
    assert fires == alerts
    assert silent == alerts


@pytest.mark.parametrize("rule", rules(ALERTS), ids=lambda rule: rule["alert"])
def test_alert_says_how_bad_it_is_what_to_do_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    said = rule["annotations"]
    assert len(said["summary"]) < 130
    assert len(said["description"]) > 80
    found = re.fullmatch(r"({{.*}})(.*)#(.*)", said["runbook_url"])
    assert found is not None
    base, page, anchor = found.groups()
    assert base == "{{ $externalLabels.gateway_docs }}"
    assert anchor == rule["alert"].lower()
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert rule["alert"] in headings


def test_runbook_tells_of_no_alert_that_is_gone() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "dashboards.md").read_text(), re.M)
    assert headings == [rule["alert"] for rule in rules(ALERTS)]


def test_recorded_names_tell_level_metric_and_operations() -> None:
    for rule in rules(RECORDING):
        assert re.fullmatch(r"[a-z_]+:gateway_[a-z_]+:[a-z_]+[0-9a-z]*", rule["record"]), rule


def test_objectives_are_bounds_of_buckets() -> None:
    text = (HOME / "rules" / "recording.yml").read_text()
    asked = dict(re.findall(r'(gateway_\w+)_bucket\{le="([\d.]+)"\}', text))
    assert asked == {
        "gateway_time_to_first_token_seconds": "5.0",
        "gateway_queue_wait_seconds": "5.0",
    }
    assert 5.0 in TTFT_BUCKETS
    assert 5.0 in DURATION_BUCKETS
