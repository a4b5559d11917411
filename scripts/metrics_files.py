#!/usr/bin/env python3
"""Writes what is made of the metrics' declarations: the table of docs/operations.md, and Grafana's
dashboard, deploy/grafana/ratoon.json.

    python scripts/metrics_files.py           # writes them
    python scripts/metrics_files.py --check   # exits 1 if they are not current; `make lint` runs it

A panel shows one figure, or a few of one unit, of all chosen policies against time. Panels of the
last row show one policy against the seq of its reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.metrics import METRICS, POLICY_LABEL, REPORT_SEQ, Metric, MetricKind

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operations.md"
DASHBOARD = ROOT / "deploy" / "grafana" / "ratoon.json"
BEGIN, END = "<!-- metrics: written by scripts/metrics_files.py -->", "<!-- end of metrics -->"
_BY_NAME = {metric.name.removeprefix("ratoon_"): metric for metric in METRICS}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 8, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """Metrics of one panel, by their names without "ratoon_"."""

    title: str
    names: tuple[str, ...]


def _row(*panels: str | tuple[str, ...]) -> tuple[Panel, ...]:
    """Panels by title; one without names shows the metric that its title names."""
    return tuple(
        Panel(each.replace("_", " ").capitalize(), (each,))
        if isinstance(each, str)
        else Panel(each[0], each[1:])
        for each in panels
    )


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Policies": _row(
        ("Policies", "policy_info"),
        ("Kernel backends", "backend_info"),
        ("Versions in use", "build_info"),
        ("Failed policies, and those put away", "policy_failed", "policy_released"),
        ("Seconds since the last step", "last_step_timestamp_seconds"),
        ("Warnings", "warnings_total"),
        ("Steps", "steps_total"),
        ("Skipped steps", "skipped_steps_total"),
        ("Version of the weights", "policy_version", "published_version"),
    ),
    "Learning": _row(
        ("Reward", "reward_mean", "reward_min", "reward_max"),
        ("Standard deviation of rewards", "reward_std"),
        ("Groups with equal rewards", "zero_variance_fraction"),
        "loss",
        "entropy",
        ("KL", "kl", "old_kl", "sampler_kl"),
        ("KL to the teacher", "teacher_kl"),
        ("Mass of the teacher's tokens", "teacher_mass", "policy_mass"),
        ("Loss of the value head", "value_loss"),
        ("Values and returns", "value_mean", "return_mean"),
        ("Variance that values explain", "explained_variance"),
        ("Clipped values", "value_clip_fraction"),
        ("Gradient norm", "grad_norm"),
        "learning_rate",
        ("Norms of update and weights", "update_norm", "weight_norm"),
        ("KL of a step", "step_kl"),
        ("Clipped tokens", "clip_fraction"),
        ("Clipped tokens by sign of advantage", "clip_fraction_by_sign"),
        ("Importance ratio", "ratio_quantile", "ratio_mean"),
        ("Advantage", "advantage_mean", "advantage_std"),
    ),
    "Rollouts": _row(
        ("Response length", "response_length_quantile", "response_length_mean"),
        ("Truncated rollouts", "truncated_fraction"),
        ("Staleness, versions", "staleness_mean", "token_staleness_mean", "staleness_max"),
        ("Log-prob minus the sampler's", "sampler_gap_mean", "sampler_gap_abs_mean"),
        ("Largest gap to the sampler", "sampler_gap_max"),
        ("Dropped rollouts", "dropped_sequences_total"),
        ("Clamped terms", "clamped_terms_total"),
        (
            "Rollout correction, shares",
            *("correction_masked_fraction", "correction_truncated_fraction"),
            "correction_ess_fraction",
        ),
        ("Rollout correction, weight", "correction_weight_mean"),
        ("Receivers' lag, versions", "receiver_lag_versions"),
    ),
    "Speed and memory": _row(
        ("Tokens per second", "tokens_per_second"),
        ("Saving from shared prefixes", "token_reduction_ratio"),
        ("Tokens", "tokens_total"),
        ("Seconds by phase", "phase_seconds"),
        ("Seconds to publish", "publish_seconds"),
        ("Memory", "peak_memory_bytes", "planned_memory_bytes"),
        ("Excess of the longest rank", "rank_gap_ratio"),
        ("Micro-batches", "micro_batches_total"),
        ("Weights that a step changed", "changed_share"),
    ),
    "Experts": _row(
        ("Load of the busiest expert over the mean", "router_max_load_ratio"),
        ("Unused experts", "router_unused_experts"),
        ("Entropy of routers", "router_entropy"),
        ("Balance loss", "router_aux_loss"),
        ("Recorded routes that routers would not take", "route_mismatch"),
        ("Tokens packed again for their routes", "route_conflicts"),
    ),
    "Self-checks": _row(
        ("Self-checks", "self_checks_total"),
        (
            "Difference of log-probs",
            *("self_check_logprob_max_difference", "self_check_logprob_mean_difference"),
        ),
        (
            "Difference of gradients",
            "self_check_gradient_difference_ratio",
            "self_check_worst_parameter_difference_ratio",
        ),
    ),
    "Service": _row(
        ("Open operations", "open_operations"),
        ("Operations", "operations_total"),
        ("Forwards without a key", "unsequenced_forwards_total"),
        ("Requests", "requests_total"),
        ("Seconds to answer", "request_seconds"),
        ("Refusals", "refusals_total"),
        ("Unknown fields, Tinker wire", "tinker_unknown_fields_total"),
        ("Checkpoints", "checkpoints_total"),
        ("Recoveries", "recoveries_total"),
        ("Replayed operations", "replayed_operations_total"),
        ("Publications that failed", "publish_failures_total"),
        ("Seq of the newest report", "report_seq"),
    ),
}
BY_SEQ = _row(
    ("Reward", "reward_mean", "reward_min", "reward_max"),
    "loss",
    "entropy",
    ("KL", "kl", "old_kl", "sampler_kl"),
    ("Gradient norm", "grad_norm"),
    ("Response length, mean", "response_length_mean"),
)


def table() -> list[str]:
    """Rows of the table of all metrics, its head first."""
    rows = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        what = metric.help.replace("|", "\\|")
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {what} |")
    return rows


def page(text: str) -> str:
    """The page with today's table in it."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n" + "\n".join(table()) + f"\n\n{END}{after}"


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model of the dashboard, for version 11."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in (*ROWS.items(), ("By seq: $policy", BY_SEQ)):
        by_seq = row is BY_SEQ
        head = {"type": "row", "title": title, "collapsed": False, "panels": []}
        repeated = {"repeat": "policy"} if by_seq else {}
        panels.append({**head, **repeated, "gridPos": _place(top, 0, 24, 1)})
        make = _against_seq if by_seq else _against_time
        for number, panel in enumerate(row):
            down, across = divmod(number, 24 // _WIDTH)
            place = _place(top + 1 + down * _HEIGHT, across * _WIDTH, _WIDTH, _HEIGHT)
            panels.append({**make(panel), "gridPos": place})
        top = panels[-1]["gridPos"]["y"] + _HEIGHT
    for number, made in enumerate(panels, start=1):
        made["id"] = number
    return {
        "title": "Ratoon",
        "uid": "ratoon",
        "description": "Policies, their reports and the service. Written by a script.",
        "tags": ["ratoon"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource(), _policies()]},
        "annotations": {"list": [_warnings()]},
        "panels": panels,
    }


def as_text(model: dict[str, Any]) -> str:
    """The dashboard's JSON, each panel on a line of its own."""
    panels = ",\n".join(json.dumps(panel) for panel in model["panels"])
    head = json.dumps({**model, "panels": []}, indent=1)
    return head.replace('"panels": []', f'"panels": [\n{panels}\n]') + "\n"


def _place(y: int, x: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _policies() -> dict[str, Any]:
    query = f"label_values(ratoon_policy_version, {POLICY_LABEL})"
    return {
        "name": "policy",
        "label": "Policy",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "policies"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def _warnings() -> dict[str, Any]:
    """Warnings as marks over all panels."""
    metric = _BY_NAME["warnings_total"]
    return {
        "name": "Warnings",
        "enable": True,
        "iconColor": "orange",
        "datasource": _SOURCE,
        "expr": f"sum by (policy_id, kind) (increase({_series(metric)}[1m])) > 0",
        "step": "1m",
        "titleFormat": "{{policy_id}}: {{kind}}",
    }


def _against_time(panel: Panel) -> dict[str, Any]:
    """A panel against time; what metrics without a value say with their labels is a table."""
    chosen = [_BY_NAME[name] for name in panel.names]
    if all(metric.name.endswith("_info") for metric in chosen):
        hidden = {"Time": True, "Value": True, "__name__": True, "instance": True, "job": True}
        return {
            **_base("table", panel.title, chosen, ""),
            "targets": _targets(([(_series(metric), "")] for metric in chosen), "table"),
            "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}],
        }
    many = len(chosen) > 1
    options = {"legend": {"displayMode": "list", "placement": "bottom"}}
    return {
        **_base("timeseries", panel.title, chosen, _unit(chosen[0])),
        "options": {**options, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": _targets(_queries(metric, named=many) for metric in chosen),
    }


def _against_seq(panel: Panel) -> dict[str, Any]:
    """A panel of one policy against the seq of its reports, the newest value of each."""
    chosen = [_BY_NAME[name] for name in panel.names]
    of_one = f'{{{POLICY_LABEL}="$policy"}}'
    queries = [[(f"{metric.name}{of_one}", "")] for metric in (REPORT_SEQ, *chosen)]
    columns = [f"Value #{chr(ord('A') + place)}" for place in range(len(queries))]
    last = {"operation": "aggregate", "aggregations": ["lastNotNull"]}
    names = {
        f"{column} (lastNotNull)": name
        for column, name in zip(columns[1:], panel.names, strict=True)
    }
    return {
        **_base("trend", panel.title, chosen, _unit(chosen[0])),
        "options": {"xField": "seq", "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": _targets(queries, "table"),
        "transformations": [
            {"id": "joinByField", "options": {"byField": "Time", "mode": "outer"}},
            {
                "id": "groupBy",
                "options": {
                    "fields": {
                        columns[0]: {"operation": "groupby", "aggregations": []},
                        **dict.fromkeys(columns[1:], last),
                    }
                },
            },
            {"id": "organize", "options": {"renameByName": {columns[0]: "seq", **names}}},
        ],
    }


def _base(kind: str, title: str, chosen: Sequence[Metric], unit: str) -> dict[str, Any]:
    custom = {"spanNulls": True, "showPoints": "auto"} if kind != "table" else {}
    return {
        "type": kind,
        "title": title,
        "description": "\n\n".join(metric.help for metric in chosen),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
    }


def _targets(
    queries: Iterable[Iterable[tuple[str, str]]], form: str = "time_series"
) -> list[dict[str, Any]]:
    """Queries (expression, legend), by metric, as Grafana's targets."""
    flat = [query for of_metric in queries for query in of_metric]
    is_now = form == "table" and len(flat) == 1
    return [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "expr": expression,
            "format": form,
            "instant": is_now,
            "range": not is_now,
            **({"legendFormat": legend} if legend else {}),
        }
        for place, (expression, legend) in enumerate(flat)
    ]


def _series(metric: Metric, suffix: str = "") -> str:
    chosen = f'{{{POLICY_LABEL}=~"$policy"}}' if POLICY_LABEL in metric.labels else ""
    # Creations and deletions are of no policy.
    if metric.name == "ratoon_operations_total":
        chosen = f'{{{POLICY_LABEL}=~"$policy|"}}'
    return f"{metric.name}{suffix}{chosen}"


def _queries(metric: Metric, *, named: bool) -> Iterator[tuple[str, str]]:
    """(expression, legend) of each line of a metric; `named`: others are in the panel."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    if named:
        legend += " " + metric.name.removeprefix("ratoon_").replace("_", " ")
    by = f"sum by ({', '.join(metric.labels)})"
    match metric.kind:
        case MetricKind.COUNTER:
            yield f"{by} (increase({_series(metric)}[$__rate_interval]))", legend
        case MetricKind.HISTOGRAM:
            by = f"sum by ({', '.join((*metric.labels, 'le'))})"
            buckets = f"{by} (rate({_series(metric, '_bucket')}[$__rate_interval]))"
            for share in ("0.5", "0.95"):
                yield f"histogram_quantile({share}, {buckets})", f"{legend} {share}"
        case MetricKind.GAUGE if metric.name.endswith("_timestamp_seconds"):
            yield f"time() - {_series(metric)}", legend
        case MetricKind.GAUGE:
            yield _series(metric), legend


def _unit(metric: Metric) -> str:
    """Grafana's name of the unit that the metric's name says."""
    units = {
        "_seconds": "s",
        "_bytes": "bytes",
        "_fraction": "percentunit",
        "_share": "percentunit",
    }
    return next((unit for end, unit in units.items() if metric.name.endswith(end)), "short")


def main() -> None:
    """Write both files, or check them."""
    text = PAGE.read_text(encoding="utf-8")
    made = {PAGE: page(text), DASHBOARD: as_text(dashboard())}
    if "--check" not in sys.argv[1:]:
        for path, content in made.items():
            path.write_text(content, encoding="utf-8")
        return
    stale = [
        str(path.relative_to(ROOT))
        for path, content in made.items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    if stale:
        sys.exit(f"not current: {', '.join(stale)}; run scripts/metrics_files.py")


if __name__ == "__main__":
    main()
