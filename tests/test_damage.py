"""What a run, its nodes and their trainers leave: cut, or with a flipped bit, it is found out
before it is used.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from fedstrata.cloud.evaluator import Beginning, EvaluationResult
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import FedstrataError, InvalidExperiment, StateLost
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import remove_folder
from fedstrata.common.model.layout import Row
from fedstrata.common.protocol.messages import Key, Manifest, Task
from fedstrata.common.storage.spool import Spool
from fedstrata.common.storage.states import TaskStates, read_state, write_state
from fedstrata.common.training.array_trainer import TrainerTester
from fedstrata.deploy.local.direct import AtOnce
from fedstrata.deploy.planning.simulated_run import machine_speeds, simulated_run
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.simulation import simulated_computing
from fedstrata.device.jobs import Order
from fedstrata.device.pool.executors import Thread
from fedstrata.device.pool.pool import Pool
from fedstrata.device.training.tasks import LocalWork
from tests.helpers.commands import invoke, tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import PROFILE
from tests.simulation.trainer import settings

pytestmark = pytest.mark.usefixtures("short_calibration", "warm")

FEEDBACK: Final = {"name": "topk", "share": 0.25, "feedback": True}
LAB: Final[dict[str, Any]] = {
    "rounds": 5,
    "topology": {"institutions": 2, "devices": 4},
    "cloud": {"aggregation": "fedavgm", "checkpoint_every": 1},
    "institution": {
        "rounds": 2,
        "aggregation": "fedavgm",
        "participation": 0.5,
        "selection": "round_robin",
    },
    "transfer": {"wan": {"up": FEEDBACK}, "lan": {"up": FEEDBACK}},
    "stop": {"best": True, "patience": 100},
    "training": {"trainer": settings(40, silent=False)},
    "hardware": {"default": {"step_s": 0.01}},
}
KILLED: Final = 4  # the global round in which the run was killed
FILES: Final = {  # all that it left, and whether its damage may end the run
    "experiment.toml": True,
    "manifest.json": True,
    "ledger.json": True,
    "rounds.csv": True,
    "devices.csv": True,
    "links.csv": False,
    "events.jsonl": False,
    "checkpoints/round-*": False,
    "checkpoints/best-*": False,
    "spool/institution-*/states/*": True,
    "spool/device-*/states/*": True,
}
SIMULATED: Final = {**FILES, "spool/*/samples": False, "spool/*/uploads": False}
PLACES: Final = {"quick": ([6], 1), "more": ([0, 3, 9], 3), "thorough": (range(10), 12)}
LEFT: Final = {"direct": FILES, "simulated": SIMULATED}
CASES: Final = [  # form, kind of file, whether it is damaged in two ways alone
    *(("direct", pattern, True) for pattern in FILES),
    *(
        pytest.param(form, pattern, False, marks=pytest.mark.slow)
        for form, files in LEFT.items()
        for pattern in files
    ),
]


class InPlace(Thread):
    """The executor of a pool, in the thread of the pool's event loop: own code draws from one
    generator a process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = AtOnce()


class HereTester:
    """The evaluator of a cloud, in the same thread: a process of its own takes seconds to start."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment

    async def start(self) -> Beginning:
        self._tester = TrainerTester(self._experiment)
        return Beginning(
            self._tester.layout, self._tester.first.copy(), "", evaluates=self._tester.evaluates
        )

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        found = self._tester.evaluate(row, global_round)
        assert found is not None
        return EvaluationResult(global_round, found.score, found.loss)

    def close(self) -> None:
        pass


def simulated(folder: RunFolder, facts: Mapping[str, Any], *, until: int = 0) -> Path:
    """Run a lab in virtual time to its end, or to the end of global round `until`, as if it was
    killed there.
    """

    def look(event: str, facts: Mapping[str, object]) -> None:
        if event == "global_round" and facts["global_round"] == until:
            raise KeyboardInterrupt

    with (
        patch.object(simulated_computing, "Evaluator", HereTester),
        patch.object(simulated_computing, "Pool", partial(Pool, thread=InPlace)),
        pytest.raises(KeyboardInterrupt) if until else nullcontext(),
    ):
        try:
            simulated_run(folder, facts, workers=1).run(look)
        finally:
            folder.release()
    return folder.path


def run_simulated(root: Path, tree: Mapping[str, Any], *, until: int = 0) -> Path:
    experiment = parse(tree)
    facts = machine_speeds(experiment, of=None)
    return simulated(RunFolder.create(root, experiment, simulated=facts), facts, until=until)


def resumed_simulated_run(path: Path) -> Path:
    folder = RunFolder.reopen(path, simulated=True)
    return simulated(folder, Run(path).manifest["simulated"])


RUN: Final[Mapping[str, Callable[..., Path]]] = {"direct": run_direct, "simulated": run_simulated}
RESUMED: Final[Mapping[str, Callable[[Path], Path]]] = {
    "direct": resumed_run,
    "simulated": resumed_simulated_run,
}


@pytest.fixture(scope="module", params=RUN)
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """A form of run, a run, and the folder of the same one that was killed."""
    form, home = request.param, tmp_path_factory.mktemp("runs")
    return form, RUN[form](home / "whole", LAB), RUN[form](home / "killed", LAB, until=KILLED)


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def damages(content: bytes, *, few: bool) -> Mapping[str, bytes]:
    """Return the content cut at some tenths, and with one flipped bit at several places."""
    size = len(content)
    tenths, bits = PLACES["quick" if few else PROFILE]
    found = {f"cut at {tenth} tenths": content[: size * tenth // 10] for tenth in tenths}
    for number, place in enumerate(np.random.default_rng(size).integers(0, 8 * max(size, 1), bits)):
        changed = bytearray(content)
        if size:
            changed[place // 8] ^= 1 << int(place % 8)
        found[f"bit {number}"] = bytes(changed)
    return found


def damaged_together(names: list[str], *, each: bool) -> list[list[str]]:
    """Return groups of files: `each` alone, else the last one of each kind, and with a state those
    before it.

    A resumed run may go back to any of them.
    """
    if each:
        return [[name] for name in names]
    groups = []
    for last in {Path(name).name: name for name in names}.values():
        node, states, _ = last.partition("/states/")
        before = [
            name
            for name in names
            if states and name.startswith(node) and Path(name).name == Path(last).name
        ]
        groups.append(before or [last])
    return groups


def resumed(run: Path, form: str) -> bytes | str:
    """Resume a run and return its model and its best one, or the one line with which it ends."""
    try:
        RESUMED[form](run)
    except FedstrataError as error:
        return str(error)
    best = run / "best.safetensors"
    return tensors(run) + (best.read_bytes()[-80:] if best.exists() else b"")


def test_each_file_of_a_run_is_damaged_below(killed: tuple[str, Path, Path]) -> None:
    form, _, left = killed
    for name in files_of(left):
        assert any(fnmatchcase(name, pattern) for pattern in LEFT[form]), name
    for pattern in LEFT[form]:
        assert any(fnmatchcase(name, pattern) for name in files_of(left)), pattern


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("killed", "pattern", "few"), CASES, indirect=["killed"])
def test_a_damaged_file_gives_the_same_model_or_one_line(
    pattern: str, few: bool, killed: tuple[str, Path, Path], tmp_path: Path
) -> None:
    form, whole, left = killed
    best = (whole / "best.safetensors").read_bytes()[-80:]
    named = [name for name in files_of(left) if fnmatchcase(name, pattern)]
    ends = 0
    each = PROFILE == "thorough" and not few and form == "direct"
    for group in damaged_together(named, each=each):
        contents = {name: damages((left / name).read_bytes(), few=few) for name in group}
        name = group[-1]
        for damage in contents[name]:
            run = tmp_path / "run"
            remove_folder(run)
            shutil.copytree(left, run)
            for file, content in contents.items():
                (run / file).write_bytes(content[damage])
            found = resumed(run, form)
            if isinstance(found, str):
                ends += 1
                assert "\n" not in found and Path(name).name in found, (name, damage, found)
                assert "unexpected" not in found and "Traceback" not in found, (name, damage, found)
            else:
                assert found in (tensors(whole), tensors(whole) + best), (name, damage)
    assert few or (ends > 0) is LEFT[form][pattern], ends


@pytest.mark.parametrize("killed", ["direct"], indirect=True)
@pytest.mark.parametrize(
    ("text", "other"), [("rounds = 5", "roundz = 5"), ("patience = 100", "patience = 101")]
)
def test_a_command_names_the_damaged_experiment(
    text: str, other: str, killed: tuple[str, Path, Path], tmp_path: Path
) -> None:
    *_, left = killed
    shutil.copytree(left, tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    content = file.read_text()
    assert content.count(text) == 1
    file.write_text(content.replace(text, other))
    done = invoke("run", "--direct", "--resume", file.parent)
    assert done.exit_code == 4 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"fedstrata: --resume = '{file}': "), done.stderr


# States


def made(folder: Path) -> TaskStates:
    """Return states after two tasks, each with a file and a folder of files."""
    states = TaskStates(folder, rounds_back=5, what="what it kept", who="nodes")

    def save(path: Path) -> dict[str, object]:
        (path / "own").mkdir()
        (path / "own" / "velocity").write_bytes(bytes(1000))
        (path / "vectors").write_bytes(bytes(1000))
        return {"queue": {"1": [1, 0.1, None]}, "unknown": float("nan")}

    for task in (1, 2):
        states.write(task, save, follows=task - 1, global_round=task - 1)
    return states


@pytest.mark.parametrize("name", ["vectors", "own/velocity", "facts.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "added"])
def test_a_damaged_state_is_lost_by_name_and_those_before_it_are_not(
    name: str, how: str, tmp_path: Path
) -> None:
    states, found = made(tmp_path), list[Mapping[str, Any]]()
    file = tmp_path / "after-000000000002" / name
    content = file.read_bytes()
    if how == "flipped":
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif how == "cut":
        file.write_bytes(content[:-7])
    elif how == "removed":
        file.unlink()
    else:
        file = file.with_name("more")
        file.touch()
    with pytest.raises(
        StateLost, match=rf"^what it kept after its task 2 is lost: .*{file.name}"
    ) as caught:
        states.read(2, lambda folder, facts: found.append(facts))
    assert "start a new run" in str(caught.value) and not found
    states.read(1, lambda folder, facts: found.append(facts))
    assert found[0]["queue"] == {"1": [1, 0.1, None]}
    states.write(3, lambda folder: {}, follows=1, global_round=2)  # looks at the facts of all


def test_files_that_states_share_are_checked_each_time(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(bytes(1000))

    def save(folder: Path) -> dict[str, object]:
        os.link(kept, folder / "upload")
        return {}

    for name in ("one", "two"):
        write_state(tmp_path, name, save)
    stat = kept.stat()
    kept.write_bytes(bytes(999) + b"1")
    os.utime(kept, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match="two/upload is damaged"):
        read_state(tmp_path / "two", lambda folder, facts: None)


def test_a_secret_that_is_damaged_is_drawn_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Spool(tmp_path).secret(os.urandom)
    assert Spool(tmp_path).secret(os.urandom) == first and not caplog.messages
    file = tmp_path / "secret"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert Spool(tmp_path).secret(os.urandom) != first
    assert caplog.messages == [f"{file} is damaged: noise comes from another secret"]


# A training that is killed

DYING: Final = '''
import os
import shutil
import signal
import socket
from pathlib import Path

import numpy as np

from fedstrata.common.training.array_trainer import ArrayTrainer, Trained


def bind(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)


class Dying(ArrayTrainer):
    """Changes its state, and is killed once in the midst of it, in the tasks of `dies`."""
    def __init__(self, *, dies, how="None"):
        self.dies, self.how = dies, how
    def initial(self, seed):
        return {"w": np.zeros(3, np.float32)}
    def prepare(self, site):
        return 10
    def train(self, arrays, task):
        state, dead = task.state, Path(f"dead-{task.local_round}")
        file = state / "sum"
        total = (float(file.read_text()) if file.exists() else 0.0) + task.local_round
        file.write_text(str(total))
        (state / f"of-{task.local_round}").touch()
        if task.local_round in self.dies and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        count = len(list(state.iterdir()))
        eval(self.how)
        return Trained({"w": arrays["w"] + np.float32(total + count)}, 0.5, 1)
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trainer, as the current one."""
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


async def trained(experiment: Experiment, folder: Path, *, tasks: int) -> tuple[bytes, list[str]]:
    """Return the model of a device after some tasks, trained by a worker process, and the files
    that it keeps.
    """
    async with Pool(accelerator="cpu", slots=2, devices=2) as pool:
        member = pool.member("device-0")
        prepared = await member.prepare(experiment)
        work = LocalWork(experiment, "device-0", prepared, states=Spool(folder))
        row = np.zeros(prepared.layout.row_bytes, np.uint8)
        for number in range(1, tasks + 1):
            manifest = Manifest("0123456789abcdef", 1024, 1024, b"d" * 8, "fp32", "layout")
            task = Task(Key(1, number - 1, 0), 1, manifest, None, number - 1)
            order = work.order(task, row, lambda done, of: None)
            assert isinstance(order, Order)
            await member.train(order)
            row = order.out.copy()
            work.keep(task)
    return row.tobytes(), sorted(path.name for path in (folder / "states").glob("*/own/*"))


def test_a_training_whose_worker_is_killed_is_repeated_on_what_the_last_task_left(
    home: Path,
) -> None:
    tree = {"topology": {"institutions": 0, "devices": 1}, "rounds": 4}
    found = []
    for dies in ([], [1, 3]):
        lab = parse({**tree, "training": {"trainer": {"name": "dying:Dying", "dies": dies}}})
        found.append(asyncio.run(trained(lab, home / f"dies-{len(dies)}", tasks=4)))
    assert (home / "dead-1").exists() and (home / "dead-3").exists()
    assert found[0] == found[1]


ODD: Final = {  # what a trainer does to its folder, and the error if there is one
    "shutil.rmtree(state)": "",
    "os.mkfifo(state / 'pipe')": "it leaves pipe in task.state, which is no file",
    "bind(os.path.relpath(state / 's'))": "it leaves s in task.state, which is no file",
    "os.symlink('/nowhere', state / f'link-{total}')": "",
    "os.symlink(state, state / f'loop-{total}')": "",
    "((state / 'a' / 'b').mkdir(parents=True, exist_ok=True), (state / 'a').chmod(0))": "",
    "((state / 'file').write_text('x'), (state / 'file').chmod(0))": "",
    "state.chmod(0)": "",
    "(shutil.rmtree(state), state.write_text('x'))": (
        "it leaves a file in place of the folder task.state"
    ),
    "(shutil.rmtree(state), state.symlink_to('/tmp'))": (
        "it leaves a file in place of the folder task.state"
    ),
    "(state / os.fsdecode(bytes([255]))).touch()": "",
    "os.chdir('/')": "",
}


@pytest.mark.parametrize("how", ODD)
def test_whatever_a_trainer_makes_of_its_folder(how: str, home: Path) -> None:
    how, problem = f"{how} if task.local_round % 2 else None", ODD[how]
    trainer = {"name": "dying:Dying", "dies": [], "how": how}
    tree = {"topology": {"devices": 1}, "rounds": 4, "training": {"trainer": trainer}}
    if problem:
        with pytest.raises(
            InvalidExperiment, match=f"^training.trainer.name = 'dying:Dying': {re.escape(problem)}"
        ):
            run_direct(home / "runs", tree)
        return
    run = run_direct(home / "runs", tree, until=2)
    assert tensors(resumed_run(run)) == tensors(run_direct(home / "whole", tree))


def test_damaged_numbers_of_samples_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"device-0": 83, "device-1": 49}
    Spool(tmp_path).keep_counts(kept)
    file = tmp_path / "samples"
    content = file.read_bytes()
    assert Spool(tmp_path).counts() == kept and not caplog.messages
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
        assert Spool(tmp_path).counts() == {}, bytes(changed)
    assert set(caplog.messages) == {f"{file} is damaged: numbers of samples are asked for again"}
