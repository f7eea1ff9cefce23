"""A Prometheus and an Alertmanager with what is shipped for them, and shorter intervals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from docs.tools.dashboards import DASHBOARDS, dashboard
from fedstrata.deploy.kits.units import TLS
from tests.helpers.commands import PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = ROOT / "deploy" / "prometheus"
INTERVAL_S: Final = 2
Labels = Mapping[str, str]
Row = tuple[Labels, float]
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus is not installed",
)


class Prometheus:
    """A running one, asked by HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer; what is wrong with a query is in the error."""
        with urllib.request.urlopen(
            f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[Row]:
        """Return the series of an expression now."""
        found = self.get("/api/v1/query", query=expr)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(row["metric"], float(row["value"][1])) for row in found["result"]]

    def healthy(self) -> set[tuple[str, str, str]]:
        """Return role, parent and node of each target that answers."""
        targets = self.get("/api/v1/targets", state="active")["activeTargets"]
        labels = [target["labels"] for target in targets if target["health"] == "up"]
        return {(each["role"], each.get("parent", ""), each.get("node", "")) for each in labels}

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {labels["alertname"] for labels, _ in self.query('ALERTS{alertstate="firing"}')}

    def last(self) -> dict[str, list[Row]]:
        """Return what was seen last, of roles that have ended too."""
        names = {
            "round": "",
            "phase_seconds": "_total",
            "payload_bytes": "_total",
            "message_bytes": "_total",
        }
        return {
            name: self.query(f"last_over_time(fedstrata_{name}{end}[10m])")
            for name, end in names.items()
        }

    def answers(self) -> bool:
        """Return whether it is ready."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10):
                return True
        except OSError:
            return False


def until(what: Callable[[], Any], *others: subprocess.Popen[bytes]) -> Any:
    """Return the first true value of what is asked again and again; the other processes go on
    meanwhile.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := what()):
        assert time.monotonic() < deadline, what
        ended = [process for process in others if process.poll() is not None]
        assert not ended, [process.communicate()[1].decode() for process in ended]
        time.sleep(0.1)
    return value


def configure(
    folder: Path, *, cloud: int, alertmanager: int | None = None, tls: Path | None = None
) -> Path:
    """Write what is shipped, for a cloud and an Alertmanager at other ports and with shorter
    intervals.

    With a folder of certificates, what is shipped for TLS.
    """
    for file in ("rules.yml", "alerts.yml"):
        shutil.copy(SHIPPED / file, folder / file)
    config = folder / "prometheus.yml"
    text = (SHIPPED / ("prometheus-tls.yml" if tls else "prometheus.yml")).read_text()
    text = text.replace(TLS, str(tls))
    text = text.replace("127.0.0.1:9464", f"127.0.0.1:{cloud}").replace(": 5s", f": {INTERVAL_S}s")
    config.write_text(
        text.replace("127.0.0.1:9093", f"127.0.0.1:{alertmanager}" if alertmanager else "")
    )
    return config


def start(
    stack: ExitStack, *words: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def start_prometheus(stack: ExitStack, folder: Path, *, port: int, **shipped: Any) -> int:
    """Start Prometheus at a port, and return that; `shipped`: as of `configure`."""
    start(
        stack,
        "prometheus",
        f"--config.file={configure(folder, **shipped)}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )
    return port


def expressions() -> dict[str, str]:
    """Return every expression that is shipped, with the variables filled in, by where it stands.

    Conditions of alerts and marks tell their truth in place of being empty while all is well.
    """
    found = {}
    for file in ("rules.yml", "alerts.yml"):
        for group in yaml.safe_load((SHIPPED / file).read_text())["groups"]:
            for rule in group["rules"]:
                name = rule.get("record") or rule["alert"]
                found[f"{file}: {name}"] = truth(rule["expr"]) if "alert" in rule else rule["expr"]
    for name in DASHBOARDS:
        made = json.loads(dashboard(name))
        targets = [(panel, target) for panel in made["panels"] for target in panel["targets"]]
        found |= {
            f"{name}: {panel['id']} {panel['title']} {each['refId']}": each["expr"]
            for panel, each in targets
        }
        found |= {
            f"{name}: {mark['name']}": truth(mark["expr"]) for mark in made["annotations"]["list"]
        }
        for variable in made["templating"]["list"]:
            if variable["type"] == "textbox":
                continue
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match is not None, variable
            found[f"{name}: ${variable['name']}"] = f"count by ({match[2]}) ({match[1]})"
    return found


def truth(condition: str) -> str:
    return re.sub(r" (==|<|>) ", r" \1 bool ", condition)


def replaced(
    expr: str, *, run: str, tier: str, parent: str, node: str, interval_s: int = INTERVAL_S
) -> str:
    """Return an expression with the variables of dashboards replaced, as Grafana does it."""
    values = {
        "run": run,
        "run_a": run,
        "run_b": run,
        "__rate_interval": f"{4 * interval_s}s",
        "__range": "1m",
    }
    values |= {"tier": tier, "parent": parent, "node": node}
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expr)
