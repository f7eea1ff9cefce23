"""What people are sent: a real Prometheus and Alertmanager beside labs that end well, badly, or
interrupted.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import IO, Any, Final

import pytest
import yaml

from fedstrata.common.host.processes import free_port
from fedstrata.deploy.brokers import broker
from tests.helpers.commands import PATIENCE_S, command, table
from tests.helpers.monitoring import (
    SHIPPED,
    Prometheus,
    needs_prometheus,
    start,
    start_prometheus,
    until,
)

ALERTMANAGER: Final = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
HOME: Final = "institution-0"
LAB: Final = """
rounds = 3
topology = { institutions = 1, devices = 2 }
links = { check = "off" }
"""

pytestmark = [pytest.mark.timeout(300), needs_prometheus]
needs_alertmanager = pytest.mark.skipif(
    ALERTMANAGER is None, reason="alertmanager is not installed"
)

Sent = tuple[str, str, str]  # receiver, status, name of the alert


class Mailbox(ThreadingHTTPServer):
    """What Alertmanager sends to the receivers, as /RECEIVER of a webhook."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        super().__init__(("127.0.0.1", 0), _Delivery)
        Thread(target=self.serve_forever, daemon=True).start()


class _Delivery(BaseHTTPRequestHandler):
    server: Mailbox

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sent = [
            (self.path.strip("/"), each["status"], each["labels"]["alertname"])
            for each in body["alerts"]
        ]
        self.server.sent += sent
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Site:
    """A broker, Prometheus, Alertmanager and a mailbox, for one lab after another."""

    def __init__(self, stack: ExitStack, home: Path) -> None:
        self._stack, self._home = stack, home
        self._broker = stack.enter_context(broker.start(directory=home))
        self._cloud, prometheus, self._manager = free_port(), free_port(), free_port()
        self.mailbox = stack.enter_context(Mailbox())
        stack.callback(self.mailbox.shutdown)
        start(
            stack,
            str(ALERTMANAGER),
            f"--config.file={self._routes()}",
            f"--storage.path={home / 'alerts'}",
            f"--web.listen-address=127.0.0.1:{self._manager}",
            "--cluster.listen-address=",
            "--log.level=error",
        )
        start_prometheus(
            stack, home, port=prometheus, cloud=self._cloud, alertmanager=self._manager
        )
        rules = home / "alerts.yml"
        rules.write_text(rules.read_text().replace("for: 30s", "for: 3s"))
        self.prometheus = Prometheus(prometheus)
        until(self.prometheus.answers)

    def _routes(self) -> Path:
        """Write the routes that ship, to the mailbox and without the waits."""
        text = re.sub(
            r"(group_wait|group_interval): \w+",
            r"\1: 1s",
            (SHIPPED / "alertmanager.yml").read_text(),
        )
        routes = yaml.safe_load(text)
        for receiver in routes["receivers"]:
            url = f"http://127.0.0.1:{self.mailbox.server_port}/{receiver['name']}"
            receiver["webhook_configs"] = [{"url": url}]
        path = self._home / "alertmanager.yml"
        path.write_text(yaml.safe_dump(routes))
        return path

    def lab(
        self, name: str, held: IO[str], *, idle_s: int = 120
    ) -> tuple[list[subprocess.Popen[bytes]], Path]:
        """Start a lab whose devices train only once `held` is unlocked; return its processes,
        device-1's last.
        """
        env = {**os.environ, "NULL_LAB_HOLD": f"2:{held.name}"}
        where = f"{self._broker.host}:{self._broker.port}"
        (experiment := self._home / f"{name}.toml").write_text(
            f'name = "{name}"\n{LAB}transfer.idle_s = {idle_s}\n'
        )
        lab = [
            start(
                self._stack,
                *command(*words, "--broker", where, "--spool", "none", null=True),
                env=env,
            )
            for words in (
                (
                    "cloud",
                    experiment,
                    "--runs",
                    self._home / name,
                    "--metrics",
                    f"127.0.0.1:{self._cloud}",
                ),
                ("institution", "--name", HOME),
                ("device", "--parent", HOME, "--name", "device-0"),
                ("device", "--parent", HOME, "--name", "device-1"),
            )
        ]
        until(lambda: len(self.prometheus.healthy()) == 4, *lab)
        (folder,) = (self._home / name).iterdir()
        return lab, folder

    def active(self) -> set[str]:
        """Return the alerts that Alertmanager shows, those that another one inhibits included."""
        url = f"http://127.0.0.1:{self._manager}/api/v2/alerts"
        with urllib.request.urlopen(url, timeout=10) as answer:
            shown: list[Any] = json.load(answer)
        return {each["labels"]["alertname"] for each in shown}

    def no_target(self) -> bool:
        """Return whether Prometheus has nothing to scrape any more."""
        return not self.prometheus.get("/api/v1/targets", state="active")["activeTargets"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, tmp_path)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "held").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def ends(lab: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes."""
    for process in lab:
        process.communicate(timeout=PATIENCE_S)
    return [process.returncode for process in lab]


@needs_alertmanager
@pytest.mark.slow
def test_a_role_that_hangs_is_reported_and_a_good_end_is_a_note(site: Site, held: IO[str]) -> None:
    lab, folder = site.lab("good", held)
    lab[-1].send_signal(signal.SIGSTOP)
    until(lambda: ("lab", "firing", "RoleDown") in site.mailbox.sent)
    lab[-1].send_signal(signal.SIGCONT)
    until(lambda: ("lab", "resolved", "RoleDown") in site.mailbox.sent)
    site.mailbox.sent.clear()
    held.close()
    assert ends(lab) == [0, 0, 0, 0] and len(table(folder / "rounds.csv")) == 3
    until(site.no_target)
    until(lambda: ("notes", "firing", "RunFinished") in site.mailbox.sent)
    assert site.active() == {"RunFinished"}
    assert site.mailbox.sent == [("notes", "firing", "RunFinished")]


@needs_alertmanager
@pytest.mark.slow
def test_a_run_that_fails_is_urgent_and_leaves_no_other_alert(site: Site, held: IO[str]) -> None:
    lab, folder = site.lab("bad", held, idle_s=25)
    lab.pop().kill()
    until(lambda: ("lab", "firing", "ChildLost") in site.mailbox.sent)
    held.close()
    assert 0 not in ends(lab)
    until(site.no_target)
    until(lambda: ("urgent", "firing", "RunFailed") in site.mailbox.sent)
    until(lambda: site.active() == {"RunFailed"})
    assert not {"RoleDown", "RunFinished"} & {name for _, _, name in site.mailbox.sent}
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "failed"


@pytest.mark.slow
@needs_alertmanager
def test_an_interrupted_run_leaves_no_alert(site: Site, held: IO[str]) -> None:
    lab, _ = site.lab("interrupted", held)
    lab[0].send_signal(signal.SIGINT)
    assert ends(lab[:1]) != [0]
    until(site.no_target)
    assert site.prometheus.firing() == site.active() == set()
    seen = site.prometheus.query("last_over_time(fedstrata_run_state[5m]) == 1")
    assert [labels["state"] for labels, _ in seen] == ["interrupted"]


def test_the_routes_of_alertmanager_are_valid() -> None:
    if shutil.which("amtool") is None:
        pytest.skip("amtool is not installed")
    words = ["amtool", "check-config", str(SHIPPED / "alertmanager.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_route_and_each_inhibited_one_exists() -> None:
    (group,) = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"]
    rules = group["rules"]
    routes = yaml.safe_load((SHIPPED / "alertmanager.yml").read_text())
    routed = {matcher for route in routes["route"]["routes"] for matcher in route["matchers"]}
    assert routed == {
        f"severity = {each}"
        for each in {rule["labels"]["severity"] for rule in rules} - {"warning"}
    }
    asked = re.findall(
        r"[A-Z]\w+",
        " ".join(m for rule in routes["inhibit_rules"] for ms in rule.values() for m in ms),
    )
    assert set(asked) <= {rule["alert"] for rule in rules} and asked
    assert all({"summary", "description"} <= {*rule["annotations"]} for rule in rules)
