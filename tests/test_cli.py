"""The command line: what it prints, and with which code it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import typer
from paho.mqtt import client as mqtt

from common.errors import WireError
from common.experiment.reading import load, parse
from common.protocol import serialization
from common.protocol.messages import NodeState, Presence
from deploy.brokers import broker
from deploy.console import logs, shipped
from deploy.console.options import run_connected
from deploy.console.reporting import reporting
from tests.helpers.commands import DEMO, EXPERIMENTS, command, fedstrata, invoke

MEGABYTE = 1_000_000


def test_version_and_help() -> None:
    assert fedstrata("--version").stdout.strip() == version("fedstrata")
    text = fedstrata("--help").stdout
    for name in ("run", "cloud", "institution", "device", "broker", "watch", "data", "report", "compare", "runs"):
        assert re.search(rf"^\s+{name}\s", text, re.MULTILINE), name


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda file: file.stem)
def test_dry_run_prints_the_effective_experiment(file: Path, tmp_path: Path) -> None:
    done = invoke("run", file, "--dry-run", "--set", "seed=7")
    assert done.exit_code == 0, done.stderr
    effective = tmp_path / "effective.toml"
    effective.write_text(done.stdout)
    assert load(effective) == load(file, ["seed=7"])


def test_dry_run_prints_json_too() -> None:
    done = invoke("run", DEMO, "--dry-run", "--format", "json")
    assert parse(done.stdout) == load(DEMO)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["training.epoch=2"], ["training.epoch", "2", "'epochs'"]),
        (['training.epochs="two"'], ["training.epochs", "two"]),
        (["institution.participation=0.0"], ["institution.participation", "0.0", "above 0"]),
        (["topology.devices=2"], ["topology.devices", "2", "institution-0 would have no device"]),
        (
            ['cloud.closing={rule="quorum", quorum=4, deadline_s=9.0}'],
            ["cloud.closing.quorum", "4", "(3)", "at most 3"],
        ),
        (["seed"], ["--set", "seed", "key=value"]),
    ],
)
def test_an_invalid_experiment_ends_with_4_and_one_line(pairs: list[str], words: list[str]) -> None:
    done = invoke("run", DEMO, *(word for pair in pairs for word in ("--set", pair)))
    assert done.exit_code == 4
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["device"],
        ["run", DEMO, "--resume", "x"],
        ["--log-level", "loud", "run", DEMO],
        ["fly"],
        ["device", "--name", "a b"],
        ["device", "--name", "cloud"],
        ["institution", "--name", "a/b"],
        ["broker", "--port", "99999"],
        ["compare", "x", "--target", "high"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str | Path]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_an_experiment_of_fedstratas_own_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = [json.loads(line) for line in invoke("experiments", "--format", "json").stdout.splitlines()]
    assert {Path(row["file"]) for row in listed} == {*EXPERIMENTS.glob("*.toml"), *EXPERIMENTS.glob("*/*.toml")}
    table3 = next(row for row in listed if row["name"] == "papers/fedcross-table3")
    assert (table3["cells"], table3["runs"]) == (18, 54)
    demo = next(row for row in listed if row["name"] == "demo")
    assert (demo["aggregation"], demo["nodes"]) == ("fedavg + fedavg", "3 institutions, 12 devices")
    with monkeypatch.context() as patch:
        patch.setattr(shipped, "shipped_sweeps", lambda: {"study/two": EXPERIMENTS / "study" / "two.toml"})
        assert re.search(r"^demo  (.|\n)*^study/two  ", invoke("experiments").stdout, re.MULTILINE)
    by_name = invoke("run", "demo", "--dry-run")
    assert by_name.exit_code == 0 and by_name.stdout == invoke("run", DEMO, "--dry-run").stdout
    (tmp_path / "demo").write_text("rounds = 3")
    assert "rounds = 3" in invoke("run", "demo", "--dry-run").stdout, "a file that is there comes first"
    refused = invoke("run", "dem", "--dry-run")
    assert refused.exit_code == 2 and "Did you mean 'demo'?" in refused.output


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from deploy.cli.main import app
for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, line.split())
    print(json.dumps([line, done.exit_code, done.stdout, done.stderr]))
"""


def test_without_pytorch_what_needs_it_ends_with_one_line(tmp_path: Path) -> None:
    lines = [
        "run demo --runs never",
        "run demo --direct --runs never",
        "cloud demo --broker localhost:1 --runs never",
        "plan demo",
        "data check mnist",
        "data partition demo",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(lines), cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=True, env=env,
    )  # fmt: skip
    line = "fedstrata: package = 'torch': not installed here. pip install 'fedstrata[learning]'.\n"
    assert [json.loads(found) for found in done.stdout.splitlines()] == [[each, 4, "", line] for each in lines]
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", "9464", "127.0.0.1:port"])
def test_an_impossible_address_of_metrics_ends_with_4(address: str) -> None:
    done = invoke("institution", "--name", "i", "--broker", "localhost:1", "--metrics", address)
    assert done.exit_code == 4 and f"--metrics = '{address}': not host:port. Use a free host:port" in done.stderr


def test_a_resume_of_nothing_ends_with_4(tmp_path: Path) -> None:
    done = invoke("run", "--resume", tmp_path)
    assert done.exit_code == 4
    assert str(tmp_path) in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "--log-level debug --log-format json run demo --dry-run",
        "run demo --dry-run --log-level debug --log-format=json",
        "--log-level info run --log-format json demo --log-level=debug --dry-run",
    ],
)
def test_options_of_all_commands_are_before_or_behind_the_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, bool]] = []
    monkeypatch.setattr(logs, "begin", lambda level, json_lines: begun.append((level, json_lines)))
    assert invoke(*line.split()).exit_code == 0
    assert begun == [("debug", True)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a device that is always full")
@pytest.mark.parametrize("words", [["--version"], ["run", "demo", "--dry-run"]], ids=" ".join)
def test_standard_output_on_a_full_disk_ends_with_6_and_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command(*words), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 6
    assert done.stderr == "fedstrata: file = 'standard output': No space left on device. Make room on that disk.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a device that is always full")
def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        logs.write_line("nobody reads it")
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_interrupts_a_command(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    async def wait() -> None:
        signal.raise_signal(number)
        await asyncio.sleep(60)

    with pytest.raises(typer.Exit) as ended, reporting():
        signal.raise_signal(number)
    assert ended.value.exit_code == 130
    with pytest.raises(typer.Exit) as ended:
        run_connected(wait)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == 2 * "fedstrata: interrupted\n"
    assert signal.getsignal(number) is not signal.SIG_IGN


def test_a_closed_terminal_ends_no_command_below_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with reporting():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Presences:
    """When each node first said each state; one that was not said yet is waited for."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, Presence]] = {}
        self._changed = threading.Condition()

    def take(self, message: mqtt.MQTTMessage) -> None:
        with suppress(WireError), self._changed:
            said = serialization.decode(message.payload)[1]
            if isinstance(said, Presence):
                self._seen.setdefault((message.topic.split("/")[3], said.state), (time.monotonic(), said))
            self._changed.notify_all()

    def __getitem__(self, key: tuple[str, str]) -> tuple[float, Presence]:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._seen, 30), f"never came: {key}"
            return self._seen[key]


@contextmanager
def presences(port: int) -> Iterator[Presences]:
    said = Presences()
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: said.take(message)
    client.connect("127.0.0.1", port)
    client.subscribe("fs1/lab/+/+/state", qos=1)
    client.loop_start()
    try:
        yield said
    finally:
        client.loop_stop()
        client.disconnect()


def test_roles_without_training_are_small_quick_and_free_of_torch(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path) as served, presences(served.port) as said:
        address = f"{served.host}:{served.port}"
        started = time.monotonic()
        cloud = subprocess.Popen(
            command("cloud", DEMO, "--broker", address, "--runs", tmp_path), stderr=subprocess.DEVNULL
        )
        role = None
        try:
            cloud_s = said["cloud", NodeState.INIT][0] - started
            assert said["cloud", NodeState.READY]
            started = time.monotonic()
            role = subprocess.Popen(command("institution", "--name", "institution-0", "--broker", address))
            at, presence = said["institution-0", NodeState.INIT]
            for process in (cloud, role):
                maps = Path(f"/proc/{process.pid}/maps")
                assert not maps.exists() or "/torch/" not in maps.read_text()
                assert psutil.Process(process.pid).memory_info().rss < 75 * MEGABYTE
            # Figures for the README come from a quiet machine; a test only reports that nothing heavy crept in.
            assert max(cloud_s, at - started) < 10
            with urllib.request.urlopen(f"http://{presence.metrics}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        finally:
            for process in (cloud, role):
                if process is not None:
                    process.kill()
                    process.wait()
    labels = 'node="institution-0",parent="cloud",role="institution"'
    assert f'fedstrata_nodes{{{labels},state="absent",tier="lan"}} 4.0' in text
    for name in ("payload_bytes", "message_bytes", "wire_bytes", "retransmitted_bytes", "phase_seconds",
                 "ignored_messages", "refused_models"):  # fmt: skip
        assert f"# TYPE fedstrata_{name}_total counter" in text, name
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def test_large_libraries_are_not_imported() -> None:
    modules = {
        "cloud.agent", "institution.agent", "deploy.cli.main", "deploy.local.lab", "deploy.results.page",
        "deploy.watching.screens",
    }  # fmt: skip
    code = f"import sys, json, {', '.join(sorted(modules))}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert modules <= loaded
    assert not loaded & {"torch", "torchvision", "matplotlib"}


def test_a_package_of_the_users_own_that_hides_one_of_ours_is_named(tmp_path: Path) -> None:
    own = tmp_path / "common" / "__init__.py"
    own.parent.mkdir()
    own.touch()
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.cli", "--version"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    remedy = f"fedstrata: common is {own}, not fedstrata's. Rename it, or take it off PYTHONPATH.\n"
    assert (done.returncode, done.stderr) == (4, remedy)
