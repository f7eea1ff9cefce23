"""`make bench NAME=flower`: one Flower app by Flower and by fedstrata: seconds, bytes, CPU, memory
of a round.

Deployed: the servers are in one network namespace, the clients in another, and a link without
limits joins them, whose bytes the kernel counts. Flower's are a SuperLink and a SuperNode for each
client, fedstrata's a cloud with its broker and a process for each device. On one machine: Flower's
simulation as it is without settings, `fedstrata run`, and `fedstrata run --direct`. CPU and memory
are those of a cgroup that holds all processes of a run, those that have ended included; memory is
that of processes and shared memory, every 0.05 s. The app adds noise to a model of 1 MB, so the
runtime alone is measured. Run as root.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from tests.bench import running
from tests.bench.running import MB, Table, folder
from tests.helpers.cgroups import ControlGroup
from tests.helpers.namespaces import Namespace, VethPair, joined

PROJECT: Final = """\
[project]
name = "ship"
version = "1.0.0"

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "ship:server"
clientapp = "ship:client"

[tool.flwr.app.config]
num-server-rounds = {rounds}
clients = {clients}
"""
APP: Final = """\
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


class Marking(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        print("MARK", flush=True)
        return super().configure_train(server_round, arrays, config, grid)


@server.main()
def main(grid, context):
    config = context.run_config
    least = {f"min_{kind}_nodes": config["clients"] for kind in ("train", "available")}
    first = ArrayRecord([np.zeros(250_000, np.float32)])
    Marking(fraction_evaluate=0.0, **least).start(
        grid=grid, initial_arrays=first, num_rounds=config["num-server-rounds"]
    )
    print("MARK", flush=True)


@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    w = w + np.random.default_rng().normal(size=w.shape).astype(np.float32)
    content = RecordDict({"arrays": ArrayRecord([w]), "metrics": MetricRecord({"num-examples": 100})})
    return Message(content, reply_to=message)
"""
LAB: Final = """\
name = "ship"
topology = {{ institutions = 0, devices = {clients} }}
training = {{ trainer = {{ name = "flower", app = "." }} }}
"""
CONFIG: Final = '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
BIN: Final = Path(sys.executable).parent
LINK: Final = VethPair(1, child="clients", parent_host="servers", child_host="clients")
COUNTED: Final = re.compile(r"down1:\s*(\d+)(?:\s+\d+){7}\s+(\d+)")
LOOK_S: Final = 0.05
START_S: Final = 900.0
PORT: Final = 8000


class Measured:
    """One run of the app: its processes, and what they have taken at each look and each mark of a
    round.
    """

    def __init__(
        self, home: Path, group: ControlGroup, servers: Namespace, clients: Namespace
    ) -> None:
        self.home = home
        self.servers = servers
        self.clients = clients
        self.looks: list[tuple[float, float, float, float, float]] = []
        self.marks: list[float] = []
        self._group = group
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def start(
        self, *words: str | Path, space: Namespace, output: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Start a command, whose first word is that of a file beside this Python."""
        env = {**os.environ, "FLWR_HOME": str(self.home / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
        env |= {
            "PATH": f"{BIN}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        line = self._group.entering([BIN / words[0], *words[1:]])
        with space.entered(), (self.home / "errors.log").open("a") as errors:
            return subprocess.Popen(
                line, env=env, cwd=self.home, stdout=output, stderr=errors, text=True
            )

    def lines(self, *words: str | Path, space: Namespace) -> Iterator[str]:
        """Yield a command's lines of output, as they come. Raises RuntimeError if it fails."""
        process = self.start(*words, space=space, output=subprocess.PIPE)
        assert process.stdout is not None
        with (self.home / "output.log").open("a") as log:
            for line in process.stdout:
                log.write(line)
                yield line
        if process.wait():
            raise RuntimeError(self.ends())

    def ends(self) -> str:
        """Return the last lines that the commands wrote."""
        return "".join(
            (self.home / f"{name}.log").read_text()[-2000:] for name in ("output", "errors")
        )

    def mark(self, ago_s: float = 0.0) -> None:
        """Note that a round began, or the last one ended, `ago_s` seconds ago."""
        self.marks.append(time.monotonic() - ago_s)

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def between_marks(self) -> dict[str, float]:
        """Return the means of a round."""
        times, *columns = np.array(self.looks).T
        rounds = len(self.marks) - 1
        ends = (self.marks[0], self.marks[-1])
        seconds, cpu_s, _, down, up = (
            float(np.diff(np.interp(ends, times, column))[0]) / rounds
            for column in (times, *columns)
        )
        return {"s": seconds, "cpu_s": cpu_s, "down_mb": down / MB, "up_mb": up / MB}

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            with self.servers.entered():
                found = COUNTED.search(Path("/proc/thread-self/net/dev").read_text())
            assert found is not None
            up, down = int(found[1]), int(found[2])
            self.looks.append(
                (time.monotonic(), self._group.cpu_s(), self._group.memory_bytes(), down, up)
            )


def superlink(run: Measured, clients: int) -> None:
    """Run the app by a SuperLink and a SuperNode for each client."""
    address = f"{LINK.parent_address}:{PORT}"
    flower_run(run, f'address = "{address}"\ninsecure = true\n')
    where = ("--host", LINK.parent_address, "--port", str(PORT))
    run.start("flower-superlink", "--insecure", *where, space=run.servers)
    for place in range(clients):
        own = ("--node-config", f"partition-id={place} num-partitions={clients}")
        where = ("--superlink", address, "--port", str(9100 + place))
        run.start("flower-supernode", "--insecure", *where, *own, space=run.clients)
    flower_rounds(run)


def simulation(run: Measured, clients: int) -> None:
    """Run the app by Flower's simulation."""
    flower_run(run, f'address = ":local:"\noptions.num-supernodes = {clients}\n')
    flower_rounds(run)


def flower_run(run: Measured, superlink: str) -> None:
    """Write Flower's configuration."""
    (run.home / "flwr").mkdir()
    (run.home / "flwr" / "config.toml").write_text(CONFIG + superlink)


def flower_rounds(run: Measured) -> None:
    """Run the app and note its rounds, as soon as the SuperLink answers."""
    until = time.monotonic() + START_S
    while not run.marks:
        try:
            for line in run.lines("flwr", "run", ".", "here", "--stream", space=run.servers):
                if line.startswith("MARK"):
                    run.mark()
        except RuntimeError:
            if run.marks or time.monotonic() > until:
                raise


def deployed(run: Measured, clients: int) -> None:
    """Run the app by a cloud and its broker, and a process for each device."""
    broker = ["--broker", LINK.parent_address]
    run.start("fedstrata", "broker", "--host", LINK.parent_address, "--insecure", space=run.servers)
    for place in range(clients):
        own = ("--name", f"device-{place}", "--slots", "1", "--accelerator", "cpu")
        run.start("fedstrata", "device", *own, "--allow", "ship", *broker, space=run.clients)
    our_rounds(run, "cloud", "lab.toml", *broker)


def lab(run: Measured, clients: int) -> None:
    """Run the app by `fedstrata run`."""
    our_rounds(run, "run", "lab.toml")


def direct(run: Measured, clients: int) -> None:
    """Run the app by `fedstrata run --direct`."""
    our_rounds(run, "run", "lab.toml", "--direct")


def our_rounds(run: Measured, *words: str) -> None:
    """Run a command of fedstrata and note its rounds."""
    for line in run.lines("fedstrata", *words, "--format", "json", space=run.servers):
        event = json.loads(line)
        if event["event"] != "global_round":
            continue
        if not run.marks:
            run.mark(event["elapsed_s"])  # when the first round began
        run.mark()


RUNTIMES: Final = {
    "Flower: SuperLink, SuperNodes": (superlink, 3),
    "fedstrata: cloud, broker, devices": (deployed, 20),
    "Flower: simulation": (simulation, 20),
    "fedstrata: run": (lab, 20),
    "fedstrata: run --direct": (direct, 20),
}


def measure(name: str, clients: int, rounds: int) -> list[str]:
    """Return the cells of a row. Raises RuntimeError if the run does not finish."""
    runtime, most = RUNTIMES[name]
    rounds = rounds or most
    group = ControlGroup(f"flower-{os.getpid()}")
    with folder() as home, joined(["servers", "clients"], [LINK]) as spaces, group:
        (home / "pyproject.toml").write_text(PROJECT.format(rounds=rounds, clients=clients))
        (home / "ship.py").write_text(APP)
        (home / "lab.toml").write_text(LAB.format(clients=clients))
        began = time.monotonic()
        run = Measured(home, group, spaces["servers"], spaces["clients"])
        runtime(run, clients)
        run.stop()
        if len(run.marks) != rounds + 1:
            raise RuntimeError(run.ends())
    mean = run.between_marks()
    times, cpu_s, memory, *_ = zip(*run.looks, strict=True)
    between = ["", ""]
    if runtime in (superlink, deployed):
        between = [f"{mean['down_mb']:.2f}", f"{mean['up_mb']:.2f}"]
    return [
        f"{mean['cpu_s']:.2f}",
        *between,
        f"{max(memory) / MB:.0f}",
        f"{mean['s']:.2f}",
        f"{run.marks[0] - began:.0f}",
        f"{np.interp(run.marks[0], times, cpu_s):.0f}",
        f"{os.getloadavg()[0] / (os.cpu_count() or 1):.1f}",
    ]


def main(
    *,
    clients: Sequence[int] = (2, 10, 40),
    rounds: Annotated[int, "in place of each runtime's own number"] = 0,
    only: Annotated[Sequence[str], tuple(RUNTIMES)] = tuple(RUNTIMES),
) -> None:
    """Print a table: each runtime with each number of clients."""
    table = Table(
        "runtime",
        "clients",
        "CPU s",
        "MB down",
        "MB up",
        "MB of memory",
        "s",
        "s to start",
        "CPU s to start",
        "load a core",
    )
    for count in clients:
        for name in only:
            try:
                row = measure(name, count, rounds)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                row = ["did not finish"]
            table.add(name, count, *row)


if __name__ == "__main__":
    running.run(main)
