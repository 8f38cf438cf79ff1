"""Prometheus and Grafana's files: whatever they name is what a real server shows."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trustme
import yaml

from routetrace.client import Agreement, RouteClient
from routetrace.server.common.addresses import split_address
from routetrace.server.common.metrics import Metrics
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.composed import SERVICES, compose_config
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/routetrace.json").read_text("utf-8"))
SCRAPE = yaml.safe_load((DOCKER / "prometheus/prometheus.yaml").read_text("utf-8"))
ALERTS = yaml.safe_load((DOCKER / "prometheus/alerts.yaml").read_text("utf-8"))
ALERT_TESTS = yaml.safe_load((DOCKER.parent / "tests/alerts/alerts.test.yaml").read_text("utf-8"))
SOURCES = yaml.safe_load(
    (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text("utf-8")
)
PROVIDERS = yaml.safe_load(
    (DOCKER / "grafana/provisioning/dashboards/routetrace.yaml").read_text("utf-8")
)

QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
RULES = {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}
EXPRESSIONS = QUERIES | RULES

# What Prometheus adds to what it scrapes.
ADDED_METRICS, ADDED_LABELS = {"up": set()}, {"instance", "job"}
METRIC = re.compile(r"\b((?:routetrace|grpc_server|process)_\w+|up)\b(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Iterator[dict[str, set[str]]]:
    """Metric -> labels of a server with TLS, a quota, an agent and some calls."""
    files = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(files / "cert.pem")
    (files / "key.pem").touch(0o600)
    issued.private_key_pem.write_to_path(files / "key.pem")

    def scrape(**settings: Any) -> dict[str, set[str]]:
        with run_server(
            metrics_listen="127.0.0.1:0", run_quota="1GiB", sweep_interval_seconds=0.1, **settings
        ) as server:
            feeder = None
            if not settings:
                feeder = Feeder(server.target, LAYOUT)
                handle = feeder.begin("t")
                feeder.step(rows_of(LAYOUT, 5), [[handle, 0, 5]])
                feeder.finish(handle, 6)
                feeder.flush()
                beat = pb.Heartbeat(offered_rows=6, acknowledged_rows=5, dropped_rows={"x": 1})
                feeder.stream._out.put(pb.IngestRequest(heartbeat=beat))
                with RouteClient(server.target) as client:
                    client.get("t")
                    client.report_agreement(1, Agreement())
                wait_for(lambda: Scraped(server.metrics_target).value("routetrace_counted_traces"))
            url = f"http://{server.metrics_target}/metrics"
            with urllib.request.urlopen(url, timeout=20) as answer:
                found = read_exposition(answer.read().decode())
            if feeder:
                feeder.close()
            return found

    found = scrape()
    secure = scrape(tls_cert=files / "cert.pem", tls_key=files / "key.pem")
    found = {name: found.get(name, set()) | labels for name, labels in (secure | found).items()}
    # Families that have no sample yet: of counters with labels that are known.
    metrics = Metrics()
    for metric in vars(metrics).values():
        for family in getattr(metric, "describe", list)():
            for suffix in ("", "_total", "_bucket", "_sum", "_count"):
                labels = {*metric._labelnames, *(("le",) if suffix == "_bucket" else ())}
                found.setdefault(family.name + suffix, set()).update(labels)
    return found


def read_exposition(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
        elif line.startswith("# TYPE"):
            found.setdefault(line.split()[2], set())
    return found


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_metric_and_label_exists(name, shown):
    expression = EXPRESSIONS[name]
    used = METRIC.findall(expression)
    assert used, expression
    known = shown | ADDED_METRICS
    labels: set[str] = set(ADDED_LABELS)
    for metric, selector in used:
        assert metric in known, metric
        own = known[metric] | ADDED_LABELS
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", selector)) <= own, (metric, own)
        labels |= own
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= labels


def test_nothing_that_is_shown_goes_unseen(shown):
    """Every metric of ours is in the dashboard or in an alert."""
    seen = {metric for text in EXPRESSIONS.values() for metric, _ in METRIC.findall(text)}
    kinds = {re.sub(r"_(bucket|sum|count|total|created)$", "", metric) for metric in seen}
    ours = {
        re.sub(r"_(bucket|sum|count|total|created)$", "", metric)
        for metric in shown
        if metric.startswith("routetrace_")
    }
    assert ours - kinds == set()


def test_every_alert_is_tested_to_fire_and_not_to_fire():
    """The tests themselves run in `make test-alerts`."""
    fires = dict.fromkeys(RULES, False)
    silent = dict.fromkeys(RULES, False)
    for group in ALERT_TESTS["tests"]:
        for case in group["alert_rule_test"]:
            wanted = case.get("exp_alerts", [])
            series = {entry["series"] for entry in group["input_series"]}
            fires[case["alertname"]] |= bool(wanted)
            silent[case["alertname"]] |= len(series) > len(wanted)
    assert fires.keys() == silent.keys() == RULES.keys()
    assert all(fires.values())
    assert all(silent.values())


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_brackets_match(name):
    opened: list[str] = []
    for char in re.sub(r'"[^"]*"', "", EXPRESSIONS[name]):
        if char in "([{":
            opened.append(char)
        elif char in ")]}":
            assert opened.pop() + char in {"()", "[]", "{}"}
    assert not opened


def test_labels_that_words_name_are_there():
    """Legends and summaries fill in labels that their expressions keep."""
    texts = [
        (target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]
    texts += [
        (rule["expr"], re.sub(r"\$labels\.", "", rule["annotations"]["summary"]))
        for group in ALERTS["groups"]
        for rule in group["rules"]
    ]
    for expression, text in texts:
        grouped = re.findall(r"\bby \(([^)]*)\)", expression)
        kept = {label.strip() for labels in grouped for label in labels.split(",")} - {"le"}
        wanted = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", text))
        if grouped or re.match(r"(sum|min|max)\(", expression):
            assert wanted <= kept, (expression, text)


# What the classic dashboard model asks of the parts that are used here.
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer"},
        "type": {"enum": ["row", "timeseries", "stat", "gauge"]},
        "gridPos": {
            "type": "object",
            "required": ["h", "w", "x", "y"],
            "additionalProperties": {"type": "integer", "minimum": 0},
        },
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["refId", "expr", "datasource", "legendFormat"],
                "properties": {"refId": {"type": "string", "pattern": "^[A-H]$"}},
            },
        },
        "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
    },
    "if": {"properties": {"type": {"not": {"const": "row"}}}},
    "then": {"required": ["targets", "datasource", "fieldConfig", "options", "description"]},
}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "items": PANEL},
    },
}


def test_dashboard_fits_the_schema():
    jsonschema.validate(DASHBOARD, SCHEMA)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_variables_are_defined_and_used():
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = " ".join(QUERIES.values())
    assert set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"} == defined


def test_grafana_finds_its_source_and_its_dashboard():
    (source,) = SOURCES["datasources"]
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    service = SERVICES["prometheus"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in service["ports"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = PROVIDERS["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/routetrace.json"


def test_prometheus_scrapes_where_the_server_shows(server_environment):
    (job,) = SCRAPE["scrape_configs"]
    _, port = split_address(compose_config().metrics_listen)
    assert job["static_configs"] == [{"targets": [f"server:{port}"]}]
    assert all((DOCKER / "prometheus" / name).is_file() for name in SCRAPE["rule_files"])
    mount, _, _ = SERVICES["prometheus"]["volumes"][0].partition(":/")
    assert (DOCKER / mount).resolve() == DOCKER / "prometheus"
    assert f'job="{job["job_name"]}"' in RULES["RoutetraceDown"]
