"""Alerts and Grafana's dashboard, against the metrics that there are and by Prometheus's tool."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratoon.metrics import METRICS, MetricKind
from ratoon.warning_kinds import WarningKind

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "metrics_files.py"))
LABELS = {metric.name: {*metric.labels} for metric in METRICS} | {"up": {"job", "instance"}}


@pytest.fixture
def promtool() -> str:
    binary = shutil.which("promtool")
    if binary is None:
        # `.ci/run` installs it, so there its absence is a failure.
        assert not os.environ.get("CI"), "promtool is not installed"
        pytest.skip("promtool is not installed: scripts/install-test-services.sh")
    return binary


def _alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


def _run(*command: str | Path) -> None:
    parts = [str(part) for part in command]
    done = subprocess.run(parts, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _queries() -> Iterator[str]:
    """Expressions of all panels and marks, the dashboard's variables filled in."""
    dashboard = SCRIPT["dashboard"]()
    targets = [each for panel in dashboard["panels"] for each in panel.get("targets", [])]
    for expression in [each["expr"] for each in (*targets, *dashboard["annotations"]["list"])]:
        yield expression.replace("$__rate_interval", "1m").replace("$policy", "p")


def test_rules_and_scrapes_are_what_prometheus_takes(promtool: str) -> None:
    _run(promtool, "check", "config", DEPLOY / "prometheus.yml")
    _run(promtool, "check", "config", "--syntax-only", DEPLOY / "prometheus-tls.yml")
    _run(promtool, "check", "rules", DEPLOY / "alerts.yml")


def test_alerts_fire_when_they_should(promtool: str) -> None:
    """`tests/deploy/alerts.yml` has series of good and of bad runs, and which alert each fires."""
    cases = ROOT / "tests" / "deploy" / "alerts.yml"
    _run(promtool, "test", "rules", cases)
    tests = [each for case in yaml.safe_load(cases.read_text())["tests"] for each in _asked(case)]
    names = [rule["alert"] for rule in _alerts()]
    for is_fired in (True, False):
        assert {name for name, fired in tests if fired is is_fired} == {*names}


def _asked(case: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(each["alertname"], "exp_alerts" in each) for each in case["alert_rule_test"]]


def test_every_kind_of_warning_is_of_one_alert() -> None:
    asked = [re.search(r'ratoon_warnings_total\{kind=~"([^"]*)"', r["expr"]) for r in _alerts()]
    kinds = [kind for found in asked if found for kind in found[1].split("|")]
    assert sorted(kinds) == sorted(kind.value for kind in WarningKind)


def test_alerts_and_panels_ask_for_series_that_there_are() -> None:
    """A label that is misspelt selects nothing, and nobody would see it."""
    asked = [*(rule["expr"] for rule in _alerts()), *_queries()]
    series = re.compile(r"\b(up|ratoon_\w+)(?:\{(.*?)\})?")
    found = [each for text in asked for each in series.findall(text)]
    assert len(found) > len(METRICS)
    for name, selector in found:
        plain = name.removesuffix("_bucket")
        assert plain in LABELS, name
        assert {*re.findall(r"(\w+)=", selector)} <= LABELS[plain], (name, selector)


def test_the_dashboard_shows_every_metric_in_one_panel(promtool: str, tmp_path: Path) -> None:
    shown = [name for row in SCRIPT["ROWS"].values() for panel in row for name in panel.names]
    assert sorted(shown) == sorted(metric.name.removeprefix("ratoon_") for metric in METRICS)
    rules = [{"record": f"q:{n}", "expr": query} for n, query in enumerate(_queries())]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    _run(promtool, "check", "rules", path)


def test_the_dashboard_draws_panels_by_seq_too() -> None:
    """Against time most steps of a fast policy lie between two others' pixels."""
    model = json.loads((DEPLOY / "grafana" / "ratoon.json").read_text())
    row = next(panel for panel in model["panels"] if panel.get("repeat") == "policy")
    below = [p for p in model["panels"] if p["gridPos"]["y"] > row["gridPos"]["y"]]
    assert len(below) >= 6
    for panel in below:
        assert (panel["type"], panel["options"]["xField"]) == ("trend", "seq")
        assert panel["targets"][0]["expr"] == 'ratoon_report_seq{policy_id="$policy"}'
    places = [(p["gridPos"]["y"], p["gridPos"]["x"]) for p in model["panels"]]
    assert len({*places}) == len(places)
    counters = {m.name for m in METRICS if m.kind is MetricKind.COUNTER}
    lines = [t["expr"] for p in model["panels"] for t in p.get("targets", [])]
    assert all("increase(" in line for line in lines if any(name in line for name in counters))
