"""Trainers and Flower's clients as they are in the wild: the same model in each mode, or one line
that names them.

Each is a client of an app or an own trainer, changed by one line. It runs in this process, by
worker processes, and in virtual time; a few in labs of processes. The clients are of Flower's
classes where `flwr` is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedstrata.common.errors import FedstrataError
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.surroundings import OwnSurroundings
from fedstrata.common.training.array_trainer import (
    Array,
    Arrays,
    ArrayTrainer,
    LocalTask,
    Trained,
    TrainingSite,
)
from fedstrata.device.jobs import HostedDevice, LocalResult, Order
from fedstrata.device.pool.pool import Pool
from fedstrata.device.training import arrays
from fedstrata.device.training.arrays import ArrayTrainers
from tests.helpers.commands import fedstrata, folder_in, table, tensors
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow
from tests.refused import KEPT
from tests.test_damage import trained

pytestmark = pytest.mark.usefixtures("warm")

# A client of a Flower app, with a place for each oddity: `HOW` of the environment, in Python.
APP: Final = """
import numpy as np

import how


class FlowerClient(NumPyClient):
    def __init__(self, place, state):
        self.place, self.state = place, state
        how.made(self)
    def fit(self, parameters, config):
        rounds = config["server_round"]
        made = [np.float32(0.5) * each + np.float32(self.place + rounds) for each in parameters[:1]]
        made.append(parameters[1] + 1)
        return how.fit(self, parameters, config, (made, 10 + self.place, {"train_loss": 0.5 + self.place}))
    def evaluate(self, parameters, config):
        return how.evaluate(self, (float(np.abs(parameters[0]).mean()), 4, {"accuracy": 0.25}))


def client(context):
    return FlowerClient(context.node_config["partition-id"], context.state).to_client()


def client_fn(context):
    return how.client_fn(context, client)


def initial():
    return how.initial([np.zeros((3, 4), np.float32), np.array(0)])


def evaluate_fn(server_round, parameters, config):
    return how.evaluate_fn(server_round, (1.0 / (1 + server_round), {"accuracy": 0.5}))


app = ClientApp(client_fn=client_fn)
"""
# Its classes, and what stands for them where flwr is not installed.
CLASSES: Final = "from flwr.client import ClientApp, NumPyClient\n"
STAND_IN: Final = """
class NumPyClient:
    def to_client(self):
        return self


class ClientApp:
    def __init__(self, client_fn):
        self.client_fn = client_fn

    def __call__(self, message, context):
        return None
"""
# What the app does in each place, when nothing is odd.
HOW: Final = """
import asyncio, os, random, shutil, signal, socket, sys, threading, time, warnings
import numpy as np

{head}

def made(client):
    {made}

def fit(client, parameters, config, found):
    arrays, samples, metrics = found
    {fit}
    return {returns}

def evaluate(client, found):
    loss, samples, metrics = found
    return {evaluate}

def client_fn(context, client):
    return {client_fn}

def initial(arrays):
    return {initial}

def evaluate_fn(server_round, found):
    return {evaluate_fn}
"""
PLAIN: Final = {
    "head": "",
    "made": "pass",
    "fit": "pass",
    "returns": "arrays, samples, metrics",
    "evaluate": "loss, samples, metrics",
    "client_fn": "client(context)",
    "initial": "arrays",
    "evaluate_fn": "found",
}
LAB: Final[dict[str, Any]] = {
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "training": {"epochs": 2},
    "evaluation": {"at": "both"},
}
TRAINER: Final = {
    "name": "flower",
    "client_fn": "app:client_fn",
    "initial": "app:initial",
    "evaluate_fn": "app:evaluate_fn",
}
CLIENT: Final = "training.trainer.client_fn = 'app:client_fn': "

ODD: Final = tomllib.loads((KEPT / "clients.toml").read_text(encoding="utf-8"))


def kinds(outcome: str, text: str) -> dict[str, tuple[dict[str, str], str]]:
    """Return what is odd, and what comes of it, "" for nothing."""
    found = {}
    for kind, places in ODD[outcome].items():
        what = places.pop(text, "").replace("CLIENT", CLIENT)
        found[kind] = (places, what)
    return found


SAME: Final = kinds("same", "warning")
ENDS: Final = kinds("ends", "problem")


def write_app(home: Path) -> None:
    """Write the app, with Flower's classes where there are some."""
    (home / "app.py").write_text((CLASSES if find_spec("flwr") else STAND_IN) + APP)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an app, as the current one."""
    write_app(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])),
    )
    return tmp_path


def written(home: Path, odd: Mapping[str, str], *, name: str = "lab", **tables: Any) -> Path:
    """Write an app that is odd, and its experiment."""
    apps = {key: "app:app" for key in ("client_fn", "evaluate_fn") if odd.get(key) == "app"}
    text = {**PLAIN, **{key: value for key, value in odd.items() if value != "app"}}
    (home / "how.py").write_text(HOW.format(**text))
    tree = {**LAB, **tables, "training": {**LAB["training"], "trainer": {**TRAINER, **apps}}}
    path = home / f"{name}.toml"
    path.write_text(to_toml(parse(tree)))
    return path


MODES: Final[dict[str, list[str]]] = {
    "direct": ["--direct"],
    "workers": ["--simulate", "--workers", "2"],
    "thread": ["--simulate", "--workers", "1"],
    "lab": [],
}


def run(home: Path, path: Path, mode: str) -> tuple[int, str, Path | None]:
    """Run a lab by its command; return the exit code, the errors and warnings, and the run's
    folder.
    """
    done = fedstrata("run", path, "--runs", home / f"runs-{mode}", "--format", "json", *MODES[mode])
    folder = folder_in(done.stdout) if '"event": "run"' in done.stdout else None
    return done.returncode, done.stderr, folder


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the plain app."""
    home = tmp_path_factory.mktemp("plain")
    write_app(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        code, errors, folder = run(home, written(home, {}), "direct")
    assert code == 0 and folder is not None, errors
    return tensors(folder)


QUICK: Final = [
    "a log of anything",
    "asyncio.run in fit",
    "a folder that is gone",
    "a fork",
    "asyncio.run in client_fn",
]
# What concerns all clients, and so has a run of its own.
OF_ALL: Final = [kind for kind, (odd, _) in SAME.items() if odd.keys() & {"initial", "evaluate_fn"}]
# The places of an app whose clients are odd each in its own way.
EACH_ITS_OWN: Final = """
import importlib

PARTS = [importlib.import_module(f"how_{{place}}") for place in range({count})]

def made(client):
    PARTS[client.place].made(client)

def fit(client, parameters, config, found):
    return PARTS[client.place].fit(client, parameters, config, found)

def evaluate(client, found):
    return PARTS[client.place].evaluate(client, found)

def client_fn(context, client):
    return PARTS[context.node_config["partition-id"]].client_fn(context, client)

def initial(arrays):
    return arrays

def evaluate_fn(server_round, found):
    return found
"""


def warnings_of(folder: Path) -> list[str]:
    """Return the reasons of the warnings of a run."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["reason"] for event in events if event["event"] == "warning"]


def check_same(kind: str, mode: str, home: Path, wanted: bytes) -> None:
    odd, warning = SAME[kind]
    if "on some devices" in kind:
        warning = "no device has a score of the model"  # each device is of the kind here
    code, errors, folder = run(home, written(home, odd), mode)
    assert code == 0 and folder is not None, errors
    assert tensors(folder) == wanted
    assert "Traceback" not in errors
    reasons = warnings_of(folder)
    assert sum(warning in reason for reason in reasons) == 1 if warning else not reasons, reasons


@pytest.mark.parametrize("kind", OF_ALL)
def test_an_odd_app_gives_the_same_model(kind: str, home: Path, wanted: bytes) -> None:
    check_same(kind, "direct", home, wanted)


@pytest.mark.parametrize("mode", slow(MODES, but=["direct"]))
def test_odd_clients_give_the_same_model(mode: str, home: Path) -> None:
    """Each client of a lab is odd in its own way; what it makes, and the model, are the plain app's."""
    kinds = [kind for kind in SAME if kind not in OF_ALL]
    if mode not in ("direct", "workers"):
        kinds = QUICK
    topology = {"institutions": 2, "devices": len(kinds)}
    code, errors, plain = run(home, written(home, {}, topology=topology), "direct")
    assert code == 0 and plain is not None, errors
    path = written(home, {}, topology=topology)
    for place, kind in enumerate(kinds):
        (home / f"how_{place}.py").write_text(HOW.format(**{**PLAIN, **SAME[kind][0]}))
    (home / "how.py").write_text(EACH_ITS_OWN.format(count=len(kinds)))
    code, errors, folder = run(home, path, mode)
    assert code == 0 and folder is not None, errors
    assert "Traceback" not in errors
    samples: dict[str, list[str]] = {kind: [] for kind in kinds}
    for row in table(folder / "devices.csv"):
        if row["local_rounds"] != "0":
            samples[kinds[int(row["node"].rpartition("-")[2])]].append(row["samples"])
    assert samples == {kind: [str(10 + place)] * 3 for place, kind in enumerate(kinds)}
    assert tensors(folder) == tensors(plain)
    warned: dict[str, list[str]] = {kind: [] for kind in kinds}
    for reason in warnings_of(folder):
        node = re.match(r"device-(\d+): ", reason)
        assert node is not None, reason
        warned[kinds[int(node[1])]].append(reason)
    for kind, reasons in warned.items():
        text = SAME[kind][1]
        assert sum(text in each for each in reasons) == 1 if text else not reasons, (kind, reasons)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("kind", ENDS)
def test_a_client_that_cannot_be_used_is_one_line(kind: str, home: Path) -> None:
    odd, problem = ENDS[kind]
    with pytest.raises(FedstrataError, match=f"^{problem}") as caught:
        run_direct(home / "runs", load(written(home, odd)))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, (odd, problem) in ENDS.items()
        if problem.startswith(CLIENT) and "evaluate" not in odd
    ],
)
def test_a_client_that_a_worker_cannot_use_is_one_line(kind: str, home: Path) -> None:
    odd, problem = ENDS[kind]
    with pytest.raises(FedstrataError, match=f"^{problem}"):
        asyncio.run(by_worker(load(written(home, odd))))


def check_refused(kind: str, mode: str, home: Path) -> None:
    odd, problem = ENDS[kind]
    code, errors, _ = run(home, written(home, odd), mode)
    last = errors.strip().splitlines()[-1]
    assert code == 4 and re.search(problem, last), errors
    assert "Traceback" not in errors and "unexpected" not in errors, errors


@pytest.mark.parametrize(
    ("kind", "mode"),
    slow(
        [(kind, mode) for mode in MODES for kind in ("another shape", "an exit at once")],
        but=[("an exit at once", "direct")],
    ),
)
def test_a_command_ends_with_the_line_of_a_client(kind: str, mode: str, home: Path) -> None:
    check_refused(kind, mode, home)


# With flwr itself: what a client is and returns, not what it does meanwhile


def of_client(kinds: Mapping[str, tuple[dict[str, str], str]]) -> list[str]:
    """Return the kinds that Flower's classes could treat in another way than their stand-ins."""
    return [kind for kind, (odd, _) in kinds.items() if odd.keys() - {"head", "fit"}]


@pytest.mark.flower
@pytest.mark.parametrize("kind", of_client(SAME))
def test_an_odd_client_of_flwr_gives_the_same_model(kind: str, home: Path, wanted: bytes) -> None:
    check_same(kind, "direct", home, wanted)


@pytest.mark.flower
@pytest.mark.parametrize("kind", of_client(ENDS))
def test_a_client_of_flwr_that_cannot_be_used_is_one_line(kind: str, home: Path) -> None:
    check_refused(kind, "direct", home)


@pytest.mark.flower
@pytest.mark.parametrize("mode", ["direct", "workers", "lab"])
def test_the_client_is_of_flwrs_class_and_has_its_state(
    mode: str, home: Path, wanted: bytes
) -> None:
    odd = {
        "head": "import flwr.client, flwr.common",
        "made": (
            "assert isinstance(client, flwr.client.NumPyClient) and type(client.state) is "
            "flwr.common.RecordDict"
        ),
        "client_fn": "wrapped(client(context))",
    }
    odd["head"] += (
        "\ndef wrapped(found):\n    assert isinstance(found, flwr.client.Client), found\n    "
        "return found"
    )
    code, errors, folder = run(home, written(home, odd), mode)
    assert code == 0 and folder is not None, errors
    assert tensors(folder) == wanted


# Processes

KILLED: Final = r"the process that trained device-\d by app:client_fn "
PROCESS: Final[dict[str, tuple[str, str]]] = {  # what `fit` does to its process, and the one line
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by SIGKILL, and so was its replacement",
    ),
    "aborted": ("os.abort()", "was killed by SIGABRT, and so was its replacement"),
    "an alarm": (
        "signal.raise_signal(signal.SIGALRM)",
        "was killed by SIGALRM, and so was its replacement",
    ),
    "no descriptors": ("os.closerange(3, 256); time.sleep(1)", "ended with code 0"),
    "an exit of a thread": (
        "t = threading.Thread(target=os._exit, args=(3,)); t.start(); t.join(); time.sleep(1)",
        "ended with code 3; the output of its node may have the reason",
    ),
    "noise on its descriptors": (
        "[os.write(n, b'noise' * 9 + bytes([10])) for n in range(3, 40) if sock(n)]",
        "sent what is no record: own code in it has written to its descriptors",
    ),
}
SOCKET: Final = """
def sock(number):
    import stat
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
"""


async def by_worker(experiment: Experiment, *, tasks: int = 1) -> tuple[bytes, LocalResult]:
    """Train a device by a worker process, and return its model."""
    async with Pool(accelerator="cpu", slots=2, devices=2) as pool:
        member = pool.member("device-0")
        prepared = await member.prepare(experiment)
        row, out = np.zeros(prepared.layout.row_bytes, np.uint8), prepared.layout.empty()
        for number in range(tasks):
            result = await member.train(Order(row, out, 1, number))
            row = out.copy()
        return row.tobytes(), result


@pytest.mark.parametrize("kind", PROCESS)
def test_what_a_client_does_to_its_process_is_one_line_with_its_name(kind: str, home: Path) -> None:
    does, problem = PROCESS[kind]
    path = written(home, {"head": SOCKET, "fit": does})
    with pytest.raises(FedstrataError, match=f"^{KILLED}{problem}") as caught:
        asyncio.run(by_worker(load(path)))
    assert "\n" not in str(caught.value)


def test_a_client_that_kills_its_process_once_gives_the_same_model(home: Path) -> None:
    plain = asyncio.run(by_worker(load(written(home, {})), tasks=2))[0]
    once = (
        "os.path.exists('dead') or (open('dead', 'w').close(), os.kill(os.getpid(), "
        "signal.SIGKILL))"
    )
    assert asyncio.run(by_worker(load(written(home, {"fit": once})), tasks=2))[0] == plain
    assert (home / "dead").exists()


# Trainings that wait


class Waiting(ArrayTrainer):
    """A trainer that waits `seconds`, as for a queue."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    def initial(self, seed: int) -> Arrays:
        """Return one array."""
        return {"w": np.zeros(2, np.float32)}

    def prepare(self, site: TrainingSite) -> int:
        """Return a number of samples."""
        return 10

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Wait."""
        time.sleep(self._seconds)
        return Trained(arrays, 0.5, 1)


def waiting(
    seconds: float, *, idle_s: float, expired: Callable[[FedstrataError], None]
) -> list[int]:
    """Train once by a trainer that waits; return what it reported."""
    trainer = {"name": f"{__name__}:Waiting", "seconds": seconds}
    tree = {
        "topology": {"devices": 1},
        "transfer": {"idle_s": idle_s},
        "training": {"trainer": trainer},
    }
    experiment, trainers, reported = parse(tree), ArrayTrainers(), list[int]()
    device = HostedDevice(experiment, experiment.digest, "device-0")
    rows = np.zeros((2, trainers.prepare(device, "cpu").layout.row_bytes), np.uint8)
    order = Order(*rows, 1, 0, lambda done, of: reported.append(done), expired=expired)
    trainers.train([(device, order)], "cpu", lambda number, how: None)
    return reported


def test_a_training_that_waits_is_reported_as_training_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrays, "LOOK_S", 0.02)
    ended: list[FedstrataError] = []
    assert len(waiting(0.6, idle_s=0.2, expired=ended.append)) > 5 and not ended
    monkeypatch.setattr(arrays, "WAITS_S", 0.0)
    reported = waiting(0.6, idle_s=0.2, expired=ended.append)
    assert 2 < len(reported) < 20
    (error,) = ended
    assert str(error) == (
        f"training.trainer.name = '{__name__}:Waiting': it waits for 0.2 s on device-0 without "
        "using a core or "
        "reporting a step. Report task.progress while it waits, or raise transfer.idle_s."
    )
    assert caplog.messages == [str(error)]


@pytest.mark.usefixtures("cold")
def test_a_training_that_waits_too_long_ends_its_worker_with_one_line(home: Path) -> None:
    (home / "sitecustomize.py").write_text(
        "import fedstrata.device.training.arrays as arrays\narrays.WAITS_S = 0.0\n"
    )
    path = written(home, {"fit": "time.sleep(9)"}, transfer={"idle_s": 1.5})
    with pytest.raises(
        FedstrataError,
        match=r"client_fn = 'app:client_fn': it waits for 1.5 s on device-0 .*transfer.idle_s",
    ):
        asyncio.run(by_worker(load(path)))


@pytest.mark.slow
def test_a_client_that_waits_longer_than_idle_s_lives(home: Path, wanted: bytes) -> None:
    # 1: it counts its samples, too
    waits = "time.sleep(20 * (client.place == 0 and config['server_round'] == 2))"
    path = written(home, {"fit": waits}, transfer={"idle_s": 10.0})
    code, errors, folder = run(home, path, "lab")
    assert code == 0 and folder is not None, errors
    assert tensors(folder) == wanted


# Samples


@pytest.mark.parametrize("mode", slow(["direct", "workers", "lab"], but=["direct"]))
@pytest.mark.parametrize(
    ("factor", "counts"),
    [
        ("(client.place != 1 or config['server_round'] != 2)", {"1": "11", "3": "11"}),
        ("(client.place != 1)", {}),
        ("config['server_round']", {"1": "11", "2": "22", "3": "33"}),
    ],
    ids=["none in a round", "none at all", "more in each round"],
)
def test_results_have_the_samples_that_a_client_reports(
    factor: str, counts: dict[str, str], mode: str, home: Path
) -> None:
    path = written(home, {"returns": f"arrays, samples * {factor}, metrics"})
    if mode == "direct":
        folder: Path | None = run_direct(home / "runs", load(path))
    else:
        _, errors, folder = run(home, path, mode)
        assert folder is not None, errors
    assert folder is not None
    found: dict[str, dict[str, str]] = {f"device-{place}": {} for place in range(4)}
    for row in table(folder / "devices.csv"):
        if row["local_rounds"] != "0":
            found[row["node"].rpartition("/")[2]][row["global_round"]] = row["samples"]
    assert found["device-1"] == counts
    assert all(len(rounds) == LAB["rounds"] for node, rounds in found.items() if node != "device-1")
    assert len(table(folder / "rounds.csv")) == LAB["rounds"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    without = [
        (each["node"], each["global_round"], each["without"])
        for each in events
        if "without" in each
    ]
    refused = [("institution-0", 2, ["device-1"])] if "2" not in counts and counts else []
    assert without == refused


@pytest.mark.parametrize("mode", slow(["direct", "workers"], but=["direct"]))
@pytest.mark.parametrize(
    ("factor", "institutions", "problem"),
    [
        ("0", 0, "no child has samples to train on, of .*device-"),
        ("0", 2, "no child has samples to train on, of .*institution-"),
        ("(config['server_round'] != 2)", 2, "device-.*it reports no samples"),
    ],
)
def test_results_of_which_none_has_samples_end_the_run_by_name(
    factor: str, institutions: int, problem: str, mode: str, home: Path
) -> None:
    topology = {"institutions": institutions, "devices": 4}
    returns = {"returns": f"arrays, samples * {factor}, metrics"}
    path = written(home, returns, topology=topology)
    if mode == "direct":
        with pytest.raises(FedstrataError, match=problem) as caught:
            run_direct(home / "runs", load(path))
        assert caught.value.exit_code == 1
    else:
        code, errors, _ = run(home, path, mode)
        assert code == 1 and re.search(problem, errors.splitlines()[-1]), errors


def test_own_code_is_where_it_went_and_the_process_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    surroundings = OwnSurroundings()
    with surroundings.entered():
        os.chdir("own")
    assert Path.cwd() == tmp_path
    with surroundings.entered():
        assert Path.cwd() == tmp_path / "own"
    assert Path.cwd() == tmp_path


# Killed after Flower's state was written: half of what a task leaves.
DYING: Final = """from fedstrata.common.training import flower as module, flower_state
def dying(state, folder):
    flower_state.write_state(state, folder)
    if os.path.exists('armed'):
        os.unlink('armed')
        os.kill(os.getpid(), signal.SIGKILL)
module.write_state = dying
"""
COUNTING: Final = (
    "client.state['n'] = client.state.get('n', 0) + 1; arrays = [arrays[0] + "
    "client.state['n'], arrays[1]]"
)


def test_a_killed_flower_training_is_repeated_on_the_state_of_the_last_task(home: Path) -> None:
    lab, found = load(written(home, {"head": DYING, "fit": COUNTING})), []
    for dies in (False, True):
        if dies:
            (home / "armed").touch()
        found.append(asyncio.run(trained(lab, home / f"dies-{dies}", tasks=3)))
    assert not (home / "armed").exists() and found[0] == found[1]
