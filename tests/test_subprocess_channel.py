"""The channel between an agent and its process: records, shared memory, and every way in which
either end ends.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from fedstrata.common.errors import (
    AcceleratorLost,
    FedstrataError,
    InvalidExperiment,
    LeftOut,
    NoProgress,
    RunFailed,
    StorageFailed,
)
from fedstrata.common.net.plain_client import ConnectRefused
from fedstrata.common.processes import subprocess_channel
from fedstrata.common.processes.subprocess_channel import (
    Garbled,
    ProcessEnded,
    Record,
    ReplaceableProcess,
    SubprocessChannel,
    error_in,
    error_record,
)
from fedstrata.common.protocol.messages import Announcement
from fedstrata.common.runtime.discovery import Found, Moved
from fedstrata.common.runtime.lifecycle import Away, MovesAway
from fedstrata.common.settings.devices import Move
from fedstrata.deploy.links.kernel import CommandRefused
from fedstrata.deploy.sweeps.execution import CellFailed

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0

# A process that does what the records ask for.
PEER = """
import os, pathlib, signal, socket, subprocess, sys, threading, time
from fedstrata.common.errors import AcceleratorLost, InvalidExperiment, RunFailed
from fedstrata.common.processes.subprocess_channel import AgentChannel, error_record

cancelled = threading.Event()

def at_once(record):
    if "close" in record:
        socket.socket(fileno=os.dup(int(sys.argv[1]))).shutdown(socket.SHUT_WR)
        threading.Event().wait()
    if "cancel" in record:
        cancelled.set()
    return "cancel" in record

channel = AgentChannel(at_once)
while True:
    request = channel.receive()
    match request.pop("do"):
        case "echo":
            channel.send(**request)
        case "double":
            rows = channel.memory.rows(request["count"], request["row_bytes"])
            rows *= 2
            channel.send(done=True)
        case "exit":
            sys.exit(request["code"])
        case "raise":
            raise KeyError("a bug")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "flood":
            for _ in range(1000):
                print("library" * 100, flush=True)  # whole lines, however this process buffers them
                os.write(1, b'{"not": "a record"}\\n')
            subprocess.run([sys.executable, "-c", "print('program')"], check=True)
            channel.send(read=sys.stdin.read())
        case "half":
            os.write(int(sys.argv[1]), b'{"half": ')
            os._exit(request["code"])
        case "invalid":
            channel.send(**error_record(InvalidExperiment("key", {1, 2}, "a problem", "A remedy.", ["a frame"])))
        case "failed":
            channel.send(**error_record(RunFailed("a reason")))
        case "compute":
            channel.send(computing=True)
            while not cancelled.is_set():
                pass
            channel.send(cancelled=True)
        case "progress":
            for _ in range(request["times"]):
                channel.send(moves=True)
            channel.send(done=True)
        case "once":
            path = pathlib.Path(request["path"])
            left = int(path.read_text())
            path.write_text(str(left - 1))
            if left > 0:
                match request["how"]:
                    case "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "lose":
                        channel.send(**error_record(AcceleratorLost("CUDA error: unspecified launch failure")))
                        continue
                    case "exit":
                        os._exit(3)
            channel.send(pid=os.getpid())
        case "busy":
            with channel.busy():
                begun = time.process_time()
                while time.process_time() < begun + request["cpu_s"]:
                    pass
            with channel.busy():
                pass
            channel.send(done=True)
        case "unexpected":
            channel.send(**error_record(KeyError("a bug")))
        case "start":
            program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
            channel.send(pid=program.pid)
"""


@pytest.fixture(autouse=True)
def _peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))


def holdings() -> Counter[str]:
    """Return the open files and the child processes of this process."""
    me = psutil.Process()
    found = Counter(f"process {child.pid}" for child in me.children())
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found[os.readlink(file)] += 1
    return found


def with_peer(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test with a channel, its first parameter, and check that its end leaves nothing behind."""

    async def play(**fixtures: Any) -> None:
        gc.collect()  # what earlier tests left open, some of which ends in its own time
        before = holdings()
        async with asyncio.timeout(PATIENCE_S):
            channel = await SubprocessChannel.start("peer", "the peer")
            try:
                await test(channel, **fixtures)
            finally:
                channel.close()
        await asyncio.sleep(0)  # the loop closes the socket after this call
        gc.collect()
        assert not holdings() - before

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(play(**fixtures))
        assert "fedstrata rows" not in Path("/proc/self/maps").read_text()

    parameters = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@with_peer
async def test_records_of_any_length_pass_in_their_order(channel: SubprocessChannel) -> None:
    long = "é\n" * (1 << 19)
    channel.send(do="echo", text=long)
    channel.send(do="echo", path=Path("a"), loss=float("inf"))
    assert await channel.receive() == {"text": long}
    assert await channel.receive() == {"path": "a", "loss": float("inf")}


@with_peer
async def test_both_ends_have_the_same_rows_which_grow(channel: SubprocessChannel) -> None:
    for count, row_bytes in ((1, 10), (4, 10_001), (2, 300_000), (1, 1)):
        rows = channel.memory.rows(count, row_bytes)
        assert rows.shape == (count, row_bytes) and all(row.ctypes.data % 4096 == 0 for row in rows)
        rows[:] = np.arange(count, dtype=np.uint8)[:, None] + 1
        await channel.request(do="double", count=count, row_bytes=row_bytes)
        assert (rows == 2 * (np.arange(count)[:, None] + 1)).all()


@pytest.mark.parametrize(
    ("request_", "killed", "how"),
    [
        (
            {"do": "exit", "code": 0},
            False,
            "ended with code 0; the output of its node may have the reason",
        ),
        ({"do": "raise"}, False, "ended with code 1; the output of its node may have the reason"),
        ({"do": "kill"}, True, "was killed by SIGKILL"),
        (
            {"do": "half", "code": 7},
            False,
            "ended with code 7; the output of its node may have the reason",
        ),
    ],
)
@with_peer
async def test_the_end_of_the_process_is_reported_with_its_code(
    channel: SubprocessChannel,
    request_: dict[str, object],
    killed: bool,
    how: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):  # and again when the process is gone
        with pytest.raises(ProcessEnded) as caught:
            await channel.request(**request_)
        assert (str(caught.value), caught.value.how, caught.value.killed) == (
            f"the peer {how}",
            how,
            killed,
        )
        assert caught.value.exit_code == 1
    assert ("a bug" in capfd.readouterr().err) == (request_["do"] == "raise")


@with_peer
async def test_a_request_that_cannot_be_read_ends_the_process_with_a_traceback(
    channel: SubprocessChannel, capfd: pytest.CaptureFixture[str]
) -> None:
    channel.writer.write(b"{\n")
    with pytest.raises(ProcessEnded, match="ended with code 1"):
        await channel.receive()
    assert "JSONDecodeError: " in capfd.readouterr().err


@with_peer
async def test_a_process_that_closes_its_end_and_does_not_end_is_killed(
    channel: SubprocessChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_channel, "LAST_BREATH_S", 0.01)
    with pytest.raises(ProcessEnded, match="the peer was killed by SIGKILL"):
        await channel.request(close=True)


def test_a_module_that_does_not_exist_is_an_end_with_code_1(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def play() -> None:
        channel = await SubprocessChannel.start("no_such_module", "the peer")
        try:
            with pytest.raises(ProcessEnded, match="ended with code 1"):
                await channel.receive()
        finally:
            channel.close()

    asyncio.run(play())
    assert "no_such_module" in capfd.readouterr().err


@with_peer
async def test_the_output_of_libraries_and_programs_never_enters_the_channel(
    channel: SubprocessChannel, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await channel.request(do="flood") == {"read": ""}
    assert await channel.request(do="echo", x=1) == {"x": 1}
    out, err = capfd.readouterr()
    assert (
        out == ""
        and err.count("library" * 100) == err.count("not") == 1000
        and err.endswith("program\n")
    )


@with_peer
async def test_errors_pass_with_their_parts_and_an_unexpected_one_leaves_its_traceback(
    channel: SubprocessChannel, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidExperiment, match=r"key = .*: a problem\. A remedy\.") as invalid:
        await channel.request(do="invalid")
    assert (
        invalid.value.parts == ("key", "{1, 2}", "a problem", "A remedy.")
        and invalid.value.exit_code == 4
    )
    assert invalid.value.frames == ("a frame",)
    with pytest.raises(RunFailed, match=r"^a reason$"):
        await channel.request(do="failed")
    with pytest.raises(RunFailed, match=r"^unexpected KeyError: 'a bug'$"):
        await channel.request(do="unexpected")
    assert await channel.request(do="echo", x=1) == {"x": 1}
    assert "the process ended by an unexpected error" in capfd.readouterr().err
    assert error_in({"x": 1}) is None
    errors: list[FedstrataError] = [InvalidExperiment("a", 1, "b", "c"), RunFailed("d")]
    errors.append(AcceleratorLost("CUDA error: misaligned address"))
    found = [error_in(error_record(error)) for error in errors]
    assert [(type(error), str(error)) for error in found] == [
        (type(error), str(error)) for error in errors
    ]


@with_peer
async def test_progress_is_counted_and_no_reply(channel: SubprocessChannel) -> None:
    moves: list[int] = []
    object.__setattr__(channel, "progressed", lambda: moves.append(1))
    assert await channel.request(do="progress", times=3) == {"done": True} and len(moves) == 3
    assert await channel.request(do="busy", cpu_s=0.7) == {"done": True} and len(moves) > 3


async def soon_idle(channel: SubprocessChannel) -> None:
    """Wait less for records once the process has started, which takes long on a busy machine."""
    await channel.request(do="echo", x=1)
    object.__setattr__(channel, "idle_s", 3.0)


def replaceable(do: Callable[[ReplaceableProcess], Awaitable[None]], **settings: Any) -> None:
    """Do something with a replaceable peer, of which nothing is left."""

    async def play() -> None:
        before = {child.pid for child in psutil.Process().children()}
        peers = ReplaceableProcess("peer", "the peer", advice="Do less.", **settings)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await do(peers)
        finally:
            peers.close()
        await asyncio.sleep(0)
        assert {child.pid for child in psutil.Process().children()} == before

    asyncio.run(play())


def once(left: Path, how: str) -> Callable[[SubprocessChannel], Awaitable[Record]]:
    """Return a request that fails as many times as the number in a file."""
    return lambda channel: channel.request(do="once", path=str(left), how=how)


HOWS: Final = {
    "kill": ("was killed by SIGKILL", "was"),
    "stop": ("made no progress for 60 s", "did"),
    "lose": ("lost its accelerator (CUDA error: unspecified launch failure)", "did"),
}


@pytest.mark.parametrize(("how", "times"), [("kill", 2), ("stop", 1), ("lose", 1)])
def test_a_process_that_fails_is_replaced_and_its_request_done_again(
    how: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "left").write_text(str(times))
    begun: list[int] = []

    async def begin(channel: SubprocessChannel) -> None:
        await soon_idle(channel)
        begun.append(channel.process.pid)

    async def do(peers: ReplaceableProcess) -> None:
        work = once(tmp_path / "left", how)
        found = [(await peers.do(work))["pid"] for _ in range(2)]
        assert found == [begun[-1]] * 2 and len(set(begun)) == times + 1

    replaceable(do, replacements=2, idle_s=60.0, begin=begin)
    assert caplog.messages == [f"the peer {HOWS[how][0]}: it is started again"] * times


@pytest.mark.parametrize(("how", "replacements"), [("kill", 1), ("stop", 1), ("lose", 2)])
def test_a_request_that_fails_in_each_process_is_an_error_and_the_next_one_has_a_new_one(
    how: str, replacements: int, tmp_path: Path
) -> None:
    (tmp_path / "left").write_text(str(replacements + 1))
    too, verb = HOWS[how]
    others = (
        f"and so {verb} its replacement" if replacements == 1 else "and 2 replacements failed, too"
    )

    async def do(peers: ReplaceableProcess) -> None:
        work = once(tmp_path / "left", how)
        with pytest.raises(NoProgress if how == "stop" else RunFailed) as caught:
            await peers.do(work, name="the work")
        assert str(caught.value) == f"the work {too}, {others}. Do less."
        assert (await peers.do(work))["pid"] > 0

    replaceable(do, replacements=replacements, idle_s=60.0, begin=soon_idle)


def test_a_process_that_ends_by_itself_is_no_reason_to_do_a_request_again(tmp_path: Path) -> None:
    (tmp_path / "left").write_text("1")

    async def do(peers: ReplaceableProcess) -> None:
        work = once(tmp_path / "left", "exit")
        with pytest.raises(
            RunFailed, match=r"^the peer ended with code 3; the output of its node "
        ):
            await peers.do(work)
        assert (await peers.do(work))["pid"] > 0

    replaceable(do, replacements=2)


def test_a_cancelled_request_ends_its_process() -> None:
    async def do(peers: ReplaceableProcess) -> None:
        computing = asyncio.Event()

        async def work(channel: SubprocessChannel) -> None:
            await channel.request(do="compute")
            computing.set()
            await channel.receive()

        task = asyncio.create_task(peers.do(work))
        await computing.wait()
        assert peers.channel is not None
        process = psutil.Process(peers.channel.process.pid)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert peers.channel is None and not process.is_running()

    replaceable(do, replacements=2)


@with_peer
async def test_a_record_has_an_effect_while_the_process_computes(
    channel: SubprocessChannel,
) -> None:
    assert await channel.request(do="compute") == {"computing": True}
    assert await channel.request(cancel=True) == {"cancelled": True}


@with_peer
async def test_closing_kills_a_process_that_computes_and_ends_who_waits(
    channel: SubprocessChannel,
) -> None:
    waiting: list[asyncio.Task[Record]] = []
    await channel.request(do="compute")
    channel.send(do="echo", text="x" * (1 << 20))
    waiting.append(asyncio.create_task(channel.receive()))
    await asyncio.sleep(0)
    channel.close()
    with pytest.raises(ProcessEnded, match="the peer was killed by SIGKILL"):
        await waiting[0]


@with_peer
async def test_a_program_of_the_process_does_not_keep_the_channel_open(
    channel: SubprocessChannel,
) -> None:
    program = psutil.Process((await channel.request(do="start"))["pid"])
    try:
        channel.process.kill()
        with pytest.raises(ProcessEnded):
            await channel.receive()
        assert program.is_running()
    finally:
        program.kill()


AGENT = """
import asyncio, sys
from fedstrata.common.processes.subprocess_channel import SubprocessChannel

async def main():
    channel = await SubprocessChannel.start("peer", "the peer")
    await channel.request(do="compute")
    print(channel.process.pid, *(name for name in ("torch", "cloud", "device") if name in sys.modules), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("end", [psutil.Process.kill, psutil.Process.terminate])
def test_the_process_ends_with_its_agent_as_it_computes(
    end: Callable[[psutil.Process], None],
) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent:
        (pid,) = agent.stdout.readline().split()
        process = psutil.Process(int(pid))
        assert os.getsid(process.pid) == process.pid != os.getsid(agent.pid)
        end(psutil.Process(agent.pid))
    _, alive = psutil.wait_procs([process], timeout=PATIENCE_S)
    assert alive == []


# Every error of the product crosses a process boundary, and keeps what it knows


ROOT: Final = Path(__file__).parents[1]
CLASS: Final = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
BUILT_IN: Final = {"BaseException", "Exception", "RuntimeError", "ValueError", "OSError"}
INVALID: Final = ("key", {"a": [1, 2]}, "a problem", "A remedy.", ("mine.py:3, in f: 1 / 0",))
# One of each that takes another argument than a text.
MADE: Final[Mapping[str, Callable[[], BaseException]]] = {
    "InvalidExperiment": lambda: InvalidExperiment(*INVALID),
    "LeftOut": lambda: LeftOut(*INVALID),
    "StorageFailed": lambda: StorageFailed("file", "/x", "a problem", "A remedy."),
    "ProcessEnded": lambda: ProcessEnded("the peer", -9),
    "Garbled": lambda: Garbled("the peer"),
    "ConnectRefused": lambda: ConnectRefused("a reason", 5),
    "CellFailed": lambda: CellFailed("a reason", 4, ["a frame"]),
    "CommandRefused": lambda: CommandRefused("a problem", "A remedy."),
    "Away": lambda: Away(1.5, for_s=2.0),
    "MovesAway": lambda: MovesAway(Move(at_s=1.0, parent="institution-0")),
    "Moved": lambda: Moved(Found("run", "session", Announcement("{}", "[]"))),
}


def _errors() -> list[type[BaseException]]:
    """Return all exceptions that the product defines, by its source: importing all of it would have
    effects.
    """
    found: list[tuple[str, str, set[str]]] = []
    for package in ("cloud", "institution", "device", "common", "deploy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(("fedstrata", *path.relative_to(ROOT).with_suffix("").parts))
            for name, bases in CLASS.findall(path.read_text(encoding="utf-8")):
                found.append((module, name, {base.strip() for base in bases.split(",")}))
    known = set(BUILT_IN)
    while more := {name for _, name, bases in found if bases & known and name not in known}:
        known |= more
    return [getattr(import_module(module), name) for module, name, bases in found if bases & known]


def test_every_error_pickles_and_copies_with_all_that_it_knows() -> None:
    kinds = _errors()
    for kind in kinds:
        error = MADE.get(kind.__name__, partial(kind, "a reason"))()
        error.add_note("a note")
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(other) is kind and str(other) == str(error) != ""
            assert (other.args, vars(other)) == (error.args, vars(error)), kind
            assert getattr(other, "exit_code", None) == getattr(error, "exit_code", None), kind
    names = {kind.__name__ for kind in kinds}
    assert {
        "InvalidExperiment",
        "ProcessEnded",
        "Moved",
        "CellFailed",
        "Cancelled",
        "NotMqtt",
    } <= names
    assert MADE.keys() <= names and issubclass(InvalidExperiment, FedstrataError)
