"""What a role's /metrics reports, and who may wait for it."""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from fedstrata.common import metrics_server
from fedstrata.common.host import machine
from fedstrata.common.host.nvidia import Gpu, Gpus
from fedstrata.common.metrics import FAMILIES, Metrics, NodeLabels
from fedstrata.common.metrics_server import (
    BEAT_S,
    CONNECTIONS_MOST,
    HANGS_S,
    HEAD_MOST,
    INTERVALS,
    SCRAPE_MOST_S,
    SERVER_NAME,
    Heartbeat,
    Scrapes,
)
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.tls import Tls
from fedstrata.deploy.cli.serving import serve_metrics
from fedstrata.deploy.console.login import Login
from fedstrata.deploy.kits.authority import Authority
from fedstrata.deploy.simulation.virtual_loop import VirtualLoop
from tests.helpers.sites import PATIENCE_S, in_real_time

NODE = NodeLabels("institution", "institution-0", parent="region-0")
LABELS = 'node="institution-0",parent="region-0",role="institution"'


def get(metrics: Metrics, path: str, **headers: str) -> tuple[int, str]:
    """Return status and text of a reply."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{metrics.serve('127.0.0.1', 0)}{path}", headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(metrics: Metrics) -> list[str]:
    return [line for line in get(metrics, "/metrics")[1].splitlines() if not line.startswith("#")]


def test_an_institution_has_one_total_of_its_two_connections() -> None:
    metrics = Metrics()
    metrics.watch("reconnects", NODE, lambda: [((), 2)])
    metrics.watch("ignored_messages", NODE, lambda: [(("malformed",), 1)])
    metrics.watch("reconnects", NODE, lambda: [((), 3)])
    lines = scrape(metrics)
    assert f"fedstrata_reconnects_total{{{LABELS}}} 5.0" in lines
    assert any(
        line.startswith("fedstrata_ignored_messages_total") and line.endswith(" 1.0")
        for line in lines
    )
    # else Prometheus refuses them
    assert max(Counter(line.rpartition(" ")[0] for line in lines).values()) == 1


def test_what_counts_begins_at_zero_and_what_is_not_known_is_absent() -> None:
    metrics = Metrics()
    metrics.introduce(NODE, {"run": "r1"}, phases=("train", "wait"))
    metrics.watch("rtt_seconds", NODE, list)
    phases = (LABELS.replace(",role", f',phase="{phase}",role') for phase in ("train", "wait"))
    assert set(scrape(metrics)) == {
        f'fedstrata_run_info{{{LABELS},run="r1"}} 1.0',
        f"fedstrata_round{{{LABELS}}} 0.0",
        f"fedstrata_sgd_steps_total{{{LABELS}}} 0.0",
        *(f"fedstrata_phase_seconds_total{{{labels}}} 0.0" for labels in phases),
    }


class Counts:
    """What an endpoint of a run counts."""

    def __init__(self, reconnects: int) -> None:
        self.reconnects = reconnects

    def read(self) -> list[tuple[tuple[str, ...], int]]:
        return [((), self.reconnects)]


def test_a_run_that_is_over_leaves_its_counts_and_nothing_else() -> None:
    metrics, other = Metrics(), NodeLabels("device", "device-1", parent="institution-0")
    over = []
    for run, reconnects in (("r-1", 2), ("r-2", 3)):
        with metrics.run_of(NODE):
            counts = Counts(reconnects)
            over.append(weakref.ref(counts))
            metrics.introduce(NODE, {"run": run}, phases=())
            metrics.introduce(other, {"run": run}, phases=())
            metrics.closed(NODE)
            metrics.watch("reconnects", NODE, counts.read)
            metrics.watch("rtt_seconds", (*NODE, "lan"), lambda: [(("cloud",), 0.5)])
            del counts
    assert [count() for count in over] == [None, None], "a finished run is held in memory"
    lines = scrape(metrics)
    assert f"fedstrata_reconnects_total{{{LABELS}}} 5.0" in lines
    assert [line for line in lines if LABELS in line and "_total" not in line] == []
    assert any('fedstrata_run_info{node="device-1"' in line for line in lines), (
        "the others' runs go on"
    )
    metrics.watch("reconnects", NODE, Counts(4).read)
    assert f"fedstrata_reconnects_total{{{LABELS}}} 9.0" in scrape(metrics)


def test_an_unknown_loss_has_no_series() -> None:
    metrics = Metrics()
    with metrics.run_of(NODE):
        metrics.trained(NODE, None)
        assert not any("train_loss{" in line for line in scrape(metrics))
        metrics.trained(NODE, 0.5)
        assert f"fedstrata_train_loss{{{LABELS}}} 0.5" in scrape(metrics)
        metrics.trained(NODE, None)
        assert not any("train_loss{" in line for line in scrape(metrics))


def test_every_metric_has_a_text_a_unit_or_none_and_labels_without_bound_are_none_of_them() -> None:
    for name, family in FAMILIES.items():
        assert family.text[0].isupper(), name
        assert not name.startswith("fedstrata_") and not name.endswith("_total"), name
        assert not {"round", "global_round", "message", "run"} & {*family.labels, *family.of}, name
        assert not {"ms", "mb", "kb", "mbit", "percent"} & {*name.split("_")}, name


def test_the_last_look_is_waited_for_only_where_somebody_looks() -> None:
    looks = Scrapes()
    assert looks.patience_s() == 0
    asyncio.run(looks.wait_for_next())  # nobody ever came


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@in_real_time
async def test_a_process_is_healthy_while_its_loop_runs() -> None:
    clock = Hand()
    metrics = Metrics()
    metrics.heartbeat = Heartbeat(clock)
    assert get(metrics, "/healthz") == (503, "the event loop has not begun\n")
    metrics.heartbeat.beat()
    clock.now += HANGS_S
    assert get(metrics, "/healthz") == (200, "ok\n")
    clock.now += 1.25
    assert get(metrics, "/healthz") == (
        503,
        f"the event loop last ran {HANGS_S + 1.25:.1f} s ago\n",
    )


def test_a_loop_beats_as_long_as_it_runs() -> None:
    loop = VirtualLoop()
    heartbeat = Heartbeat(loop.time)

    async def live() -> list[str]:
        heartbeat.beat()
        found = []
        for _ in range(3):
            await asyncio.sleep(HANGS_S + BEAT_S)
            found.append(heartbeat.failure())
        return found

    assert loop.run_until_complete(live()) == ["", "", ""]
    loop.close()


def test_a_role_serves_its_health() -> None:
    async def ask() -> tuple[int, str]:
        metrics, _ = serve_metrics(
            "127.0.0.1:0", broker=BrokerAddress("127.0.0.1"), login=Login(), insecure=False
        )
        return await asyncio.to_thread(get, metrics, "/healthz")

    assert asyncio.run(ask()) == (200, "ok\n")


# Strangers

ALERT: Final = b"\x15"  # of TLS: what came was no handshake
ROLE: Final = """
import resource, sys
from fedstrata.common.metrics import Metrics
from fedstrata.common.net.tls import OPTIONAL, RenewedContext, Tls
from fedstrata.common.metrics_server import MetricsGuard
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
files = sys.argv[1:]
guard = MetricsGuard(RenewedContext(Tls(*files), clients=OPTIONAL), "me:secret") if files else None
print(Metrics().serve("127.0.0.1", 0, guard), flush=True)
for line in sys.stdin:
    opened = [open("/dev/null") for _ in range(40)]
    print(len(opened), flush=True)
"""


@pytest.mark.parametrize("way", ["http", "tls without a handshake"])
def test_idle_connections_take_neither_the_descriptors_of_a_role_nor_a_scrapes_turn(
    way: str, tmp_path: Path
) -> None:
    files: list[str] = []
    if way != "http":
        authority = Authority.open(tmp_path, name="north")
        authority.of("metrics", hosts=[SERVER_NAME])
        files = [
            str(tmp_path / path) for path in ("ca.crt", "issued/metrics.crt", "issued/metrics.key")
        ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    role = subprocess.Popen(
        [sys.executable, "-c", ROLE, *files],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with role, ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        stack.callback(role.kill)
        assert role.stdout is not None and role.stdin is not None
        port = int(role.stdout.readline())

        def scraped() -> int:
            client = socket.create_connection(("127.0.0.1", port), timeout=10)
            if files:
                client = (
                    Tls(files[0]).client_context().wrap_socket(client, server_hostname=SERVER_NAME)
                )
            with client:
                client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                return int(client.recv(4096).split()[1])

        idle: list[socket.socket] = []
        for number in range(1200 if hard < 0 else min(1200, hard - 300)):
            idle.append(
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            )
            idle[-1].sendall(b"GET /metrics HTTP/1.0\r\nX: " if not files else b"\x16\x03\x01")
            if number % 100 == 0:
                assert scraped() == 503, "the role has no event loop, and replies"
        for client in idle:
            with suppress(OSError):
                client.sendall(b"y" * 1000)  # those that are left go on
        assert scraped() == 503
        print(file=role.stdin, flush=True)
        assert role.stdout.readline() == "40\n", "the role opens the files that it needs"
        for client in idle[: -2 * CONNECTIONS_MOST]:
            with suppress(ConnectionResetError):
                assert client.recv(1) in (b"", ALERT), "closed"
        for client in idle:
            client.close()
        assert scraped() == 503


@pytest.mark.parametrize("pace", ["drop by drop", "too much"])
def test_a_request_has_an_end(pace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 1.0 if pace == "drop by drop" else 1000.0)
    with socket.create_connection(
        ("127.0.0.1", Metrics().serve("127.0.0.1", 0)), timeout=30
    ) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        if pace == "drop by drop":
            sent = 0
            while not select.select([client], [], [], 0.01)[0]:  # until it ends
                client.sendall(b"y")
                sent += 1
            assert 1 < sent < HEAD_MOST
        else:
            with suppress(OSError):
                client.sendall(b"y" * (HEAD_MOST + 1))
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_host_with_many_connections_takes_no_other_hosts() -> None:
    port = Metrics().serve("127.0.0.1", 0)
    with ExitStack() as stack:
        scraper = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0))
        )
        scraper.sendall(b"GET /healthz HTTP/1.0\r\n")
        for _ in range(3 * CONNECTIONS_MOST):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        scraper.sendall(b"\r\n")
        assert scraper.recv(4096).split()[1] == b"503"


def test_patience_is_three_intervals_as_long_as_somebody_comes() -> None:
    clock = Hand()
    looks = Scrapes(clock)
    for _ in range(2):
        clock.now += 5
        assert b"".join(looks.serve(lambda: [b"text"])) == b"text"
    assert looks.patience_s() == 15
    clock.now += 15.1
    assert looks.patience_s() == 0
    for _ in range(2):
        clock.now += 3600
        list(looks.serve(list))
    assert looks.patience_s() == 60


@pytest.mark.parametrize(
    ("header", "patience_s"),
    [
        ("5", 15),
        ("0.5", 1.5),
        ("", 0),
        ("often", 0),
        ("-5", 0),
        ("nan", 0),
        ("inf", 0),
        ("1e9", SCRAPE_MOST_S),
    ],
)
def test_one_request_is_enough_if_it_states_its_interval(header: str, patience_s: float) -> None:
    looks = Scrapes(Hand())
    list(looks.serve(list, interval=header))
    assert looks.patience_s() == patience_s


@in_real_time
async def test_the_end_waits_until_the_empty_list_was_fetched_once() -> None:
    """One earlier request for the targets, by a Prometheus that asks every 20 s, is enough to be
    waited for.
    """
    metrics = Metrics()
    metrics.serve_targets(lambda asked: [{"targets": ["10.0.0.1:9464"], "labels": {}}])
    ask = partial(get, metrics, "/sd", **{"X-Prometheus-Refresh-Interval-Seconds": "20"})
    assert (await asyncio.to_thread(ask))[1] != "[]"
    ending = asyncio.create_task(metrics.last_discovery())
    await asyncio.sleep(0)
    assert not ending.done()
    found = await asyncio.to_thread(ask)
    async with asyncio.timeout(INTERVALS):
        await ending
    assert found == (200, "[]")


@in_real_time
async def test_a_look_that_began_before_the_end_is_not_the_last() -> None:
    clock = Hand()
    looks = Scrapes(clock)
    for _ in range(2):
        clock.now += 5
        list(looks.serve(list))
    early = looks.serve(lambda: [b"a", b"b"])
    next(early)
    clock.now += 1
    waiting = asyncio.create_task(looks.wait_for_next())
    await asyncio.sleep(0)
    list(early)
    await asyncio.sleep(0)
    assert not waiting.done()
    list(looks.serve(list))
    async with asyncio.timeout(PATIENCE_S):
        await waiting


def test_a_process_is_counted_with_those_it_started_and_never_goes_back(tmp_path: Path) -> None:
    def process(pid: str, ticks: int, *, children: str = "") -> None:
        task = tmp_path / pid / "task" / pid
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text(children)
        (tmp_path / pid / "stat").write_text(f"1 (a name) of) S {'0 ' * 10}{ticks} 0 0 0 20 0")
        (tmp_path / pid / "statm").write_text("100 7 0 0 0 0 0")

    process("self", 100, children="41 ")
    process("41", 50, children="42 43 ")
    process("42", 8)  # 43 has just ended
    (tmp_path / "stat").write_text("cpu  100 0 50 1000 5 0 1 0 0 0\ncpu0 1 2 3\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:        1000 kB\nMemFree:  1 kB\nMemAvailable:     400 kB\n"
    )
    zone = tmp_path / "class" / "thermal" / "thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu-thermal\n")
    (zone / "temp").write_text("48312\n")
    metrics = Metrics()
    machine.export_machine(metrics, proc=tmp_path, sys=tmp_path)
    tick = machine.os.sysconf("SC_CLK_TCK")
    lines = {line.partition("{")[0].partition(" ")[0]: line for line in scrape(metrics)}
    assert float(lines["fedstrata_process_cpu_seconds_total"].split()[1]) == 158 / tick
    assert float(
        lines["fedstrata_process_resident_bytes"].split()[1]
    ) == 3 * 7 * machine.os.sysconf("SC_PAGE_SIZE")
    assert lines["fedstrata_host_memory_available_bytes"].endswith(" 409600.0")
    assert 'sensor="cpu-thermal"' in lines["fedstrata_host_temperature_celsius"]
    assert lines["fedstrata_host_temperature_celsius"].endswith(" 48.312")
    process("42", 0)
    assert [
        line for line in scrape(metrics) if line.startswith("fedstrata_process_cpu_seconds_total")
    ] == [lines["fedstrata_process_cpu_seconds_total"]]


def filling(**values: int) -> Callable[..., int]:
    """Return a function of NVML that fills its last argument, which is by reference."""

    def call(*arguments: Any) -> int:
        for name, value in values.items():
            setattr(arguments[-1]._obj, name, value)
        return 0

    return call


class Driver:
    """NVML with one GPU that reports its memory and its use, and no temperature."""

    nvmlInit_v2 = filling()
    nvmlDeviceGetCount_v2 = filling(value=1)
    nvmlDeviceGetHandleByIndex_v2 = filling(value=7)
    nvmlDeviceGetMemoryInfo = filling(total=80 << 30, used=3 << 30)
    nvmlDeviceGetUtilizationRates = filling(gpu=25)
    nvmlDeviceGetTotalEnergyConsumption = filling(value=1_234_500)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int, celsius: object) -> int:
        return 3  # not supported


class EarlierDriver:
    """A driver without the function of the energy."""

    def __getattr__(self, name: str) -> object:
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            raise AttributeError(name)
        return getattr(Driver(), name)


def test_gpus_tell_what_they_know() -> None:
    assert Gpus(EarlierDriver()).states() == [Gpu(0, 80 << 30, 3 << 30, 0.25, None, None)]
    assert Gpus(Driver()).states() == [Gpu(0, 80 << 30, 3 << 30, 0.25, None, 1234.5)]
