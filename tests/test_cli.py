"""The command line: what it prints, and with which code it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import ExitStack, suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path

import psutil
import pytest
import typer
from paho.mqtt import client as mqtt
from paho.mqtt import subscribe

from fedstrata.common.errors import WireError
from fedstrata.common.experiment.reading import load, parse
from fedstrata.common.protocol import serialization
from fedstrata.common.protocol.messages import NodeState, Presence
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.console import logs, shipped
from fedstrata.deploy.console.options import run_connected
from fedstrata.deploy.console.reporting import reporting
from tests.helpers.commands import DEMO, EXPERIMENTS, command, invoke

MEGABYTE = 1_000_000
LEARNING = (
    "pip install 'fedstrata[learning]', without an NVIDIA GPU after "
    "`pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu`"
)


def test_version_and_help() -> None:
    assert invoke("--version").stdout.strip() == version("fedstrata")
    text = invoke("--help").stdout
    for name in (
        "run",
        "cloud",
        "institution",
        "device",
        "broker",
        "watch",
        "data",
        "report",
        "compare",
        "runs",
    ):
        assert re.search(rf"^\s+{name}\s", text, re.MULTILINE), name
    assert re.findall(r"^([A-Z][a-z ]+):\n  (\w+)", text, re.MULTILINE) == [
        ("Run", "run"), ("Look", "watch"), ("Lab", "cloud"), ("Own code", "new"),
    ]  # fmt: skip


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda file: file.stem)
def test_dry_run_prints_the_effective_experiment(file: Path) -> None:
    for read, output in ((tomllib.loads, "table"), (json.loads, "json")):
        done = invoke("run", file, "--dry-run", "--set", "seed=7", "--format", output)
        assert done.exit_code == 0, done.stderr
        assert parse(read(done.stdout)) == load(file, ["seed=7"])


def test_an_experiment_of_fedstratas_own_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {*shipped.shipped().values(), *(sweeps := shipped.shipped_sweeps()).values()}
    assert files == {*EXPERIMENTS.glob("*.toml"), *EXPERIMENTS.glob("*/*.toml")}
    # all would take seconds
    few = {name: sweeps[name] for name in ("papers/fedcross-table3", "study/two")}
    monkeypatch.setattr(shipped, "shipped_sweeps", lambda: few)
    listed = [
        json.loads(line) for line in invoke("experiments", "--format", "json").stdout.splitlines()
    ]
    assert {Path(row["file"]) for row in listed} == {*EXPERIMENTS.glob("*.toml"), *few.values()}
    table3 = next(row for row in listed if row["name"] == "papers/fedcross-table3")
    assert (table3["cells"], table3["runs"]) == (18, 54)
    demo = next(row for row in listed if row["name"] == "demo")
    assert (demo["aggregation"], demo["nodes"]) == ("fedavg + fedavg", "3 institutions, 12 devices")
    assert re.search(r"^demo  (.|\n)*^study/two  ", invoke("experiments").stdout, re.MULTILINE)
    by_name = invoke("run", "demo", "--dry-run")
    assert by_name.exit_code == 0 and by_name.stdout == invoke("run", DEMO, "--dry-run").stdout
    (tmp_path / "demo").write_text("rounds = 3")
    assert "rounds = 3" in invoke("run", "demo", "--dry-run").stdout, (
        "a file that is there comes first"
    )


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from fedstrata.deploy.cli.main import app
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
        [sys.executable, "-c", WITHOUT_TORCH],
        input="\n".join(lines),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=env,
    )
    line = f"fedstrata: package = 'torch': not installed here. {LEARNING}.\n"
    assert [json.loads(found) for found in done.stdout.splitlines()] == [
        [each, 4, "", line] for each in lines
    ]
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--log-level debug --log-format json run demo --dry-run",
        "run demo --dry-run --log-level debug --log-format=json",
        "--log-level info run --log-format json demo --log-level=debug --dry-run",
    ],
)
def test_options_of_all_commands_are_before_or_behind_the_command(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, bool]] = []
    monkeypatch.setattr(logs, "begin", lambda level, json_lines: begun.append((level, json_lines)))
    assert invoke(*line.split()).exit_code == 0
    assert begun == [("debug", True)]


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="Linux alone has a device that is always full"
)
@pytest.mark.parametrize("words", [["--version"], ["run", "demo", "--dry-run"]], ids=" ".join)
def test_standard_output_on_a_full_disk_ends_with_6_and_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(*words), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 6
    assert (
        done.stderr
        == "fedstrata: file = 'standard output': No space left on device. Make room on that disk.\n"
    )


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="Linux alone has a device that is always full"
)
def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        logs.write_line("nobody reads it")
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_interrupts_a_command(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
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


def first_presence(port: int, node: str, *states: NodeState) -> Presence:
    """Wait until a node is in one of these states, and return its presence."""
    found: list[Presence] = []

    def take(client: mqtt.Client, _: object, message: mqtt.MQTTMessage) -> None:
        with suppress(WireError):
            received = serialization.decode(message.payload)[1]
            if isinstance(received, Presence) and received.state in states:
                found.append(received)
                client.disconnect()

    subscribe.callback(take, f"fs1/lab/+/{node}/state", hostname="127.0.0.1", port=port)  # type: ignore[no-untyped-call]
    return found[0]


# The project's own dependencies, which all roles import.
LIBRARIES = (
    "aiomqtt",
    "msgpack",
    "numpy",
    "paho.mqtt.client",
    "prometheus_client",
    "pydantic",
    "rich",
    "safetensors",
    "typer",
    "xxhash",
    "zstandard",
)
BARE = f"import sys, {', '.join(LIBRARIES)}; print('imported', flush=True); sys.stdin.read()"


def private_bytes(process: subprocess.Popen[bytes]) -> int:
    """Return the memory that a process would give back at its end; what it maps with others is no
    part of it.
    """
    return int(psutil.Process(process.pid).memory_full_info().uss)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    spent = psutil.Process(process.pid).cpu_times()
    return float(spent.user + spent.system)


def test_the_libraries_of_a_bare_interpreter_are_the_projects_dependencies() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needed = {re.split("[><=]", line)[0] for line in project["dependencies"]}
    needed -= {"cryptography"}  # of certificates and secure sums, imported for them alone
    distributions = packages_distributions()
    imported = {distributions[name.partition(".")[0]][0].replace("_", "-") for name in LIBRARIES}
    assert imported == needed


def test_roles_without_training_are_small_quick_and_free_of_torch(tmp_path: Path) -> None:
    """Beside a bare interpreter with the same libraries: how much these map and take to import, the
    machine decides.
    """
    with ExitStack() as stack:
        bare = subprocess.Popen(
            [sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.enter_context(bare)
        assert bare.stdout is not None and bare.stdout.readline() == b"imported\n"
        libraries_bytes, libraries_s = private_bytes(bare), cpu_seconds(bare)
        served = stack.enter_context(broker.start(directory=tmp_path))
        address = f"{served.host}:{served.port}"

        def started(*words: str | Path) -> tuple[subprocess.Popen[bytes], Presence]:
            """Start a role, and return its process and its first presence."""
            node = {"cloud": "cloud"}.get(str(words[0]), "institution-0")
            process = subprocess.Popen(
                command(*words, "--broker", address), stderr=subprocess.DEVNULL
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process, first_presence(served.port, node, NodeState.INIT, NodeState.READY)

        cloud, _ = started("cloud", DEMO, "--runs", tmp_path)
        first_presence(served.port, "cloud", NodeState.READY)
        role, presence = started("institution", "--name", "institution-0")
        for process in (cloud, role):
            maps = Path(f"/proc/{process.pid}/maps")
            assert not maps.exists() or "/torch/" not in maps.read_text()
            # 22 and 19 MB; each of pandas, scipy and matplotlib adds more than 30, torch 270 MB and
            # 2.4 CPU seconds.
            assert private_bytes(process) - libraries_bytes < 36 * MEGABYTE
            assert cpu_seconds(process) < 8 * libraries_s
        with urllib.request.urlopen(f"http://{presence.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    labels = 'node="institution-0",parent="cloud",role="institution"'
    assert f'fedstrata_nodes{{{labels},state="absent",tier="lan"}} 4.0' in text
    for name in ("payload_bytes", "message_bytes", "wire_bytes", "retransmitted_bytes",
    "phase_seconds",
                 "ignored_messages", "refused_models"):  # fmt: skip
        assert f"# TYPE fedstrata_{name}_total counter" in text, name
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def test_large_libraries_are_not_imported() -> None:
    modules = {
        "fedstrata.cloud.cloud_agent",
        "fedstrata.institution.institution_agent",
        "fedstrata.deploy.cli.main",
        "fedstrata.deploy.local.process_lab",
        "fedstrata.deploy.results.page",
        "fedstrata.deploy.watching.screens",
    }
    code = f"import sys, json, {', '.join(sorted(modules))}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert modules <= loaded
    assert not loaded & {"torch", "torchvision", "matplotlib"}


def test_packages_of_the_users_own_may_have_any_name(tmp_path: Path) -> None:
    for name in ("common", "cloud", "institution", "device", "deploy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('mine')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "fedstrata", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
