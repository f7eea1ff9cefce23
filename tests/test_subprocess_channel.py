"""The channel between an agent and its process: records, shared memory, and every way in which either end ends."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.errors import FedstrataError, InvalidExperiment, RunFailed
from common.host import subprocess_channel
from common.host.subprocess_channel import ProcessEnded, Record, SubprocessChannel, error_in, error_record

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0

# A process that does what the records ask for.
PEER = """
import os, signal, socket, subprocess, sys, threading
from common.errors import InvalidExperiment, RunFailed
from common.host.subprocess_channel import AgentChannel, error_record

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
                print("library" * 100)
                os.write(1, b'{"not": "a record"}\\n')
            subprocess.run([sys.executable, "-c", "print('program')"], check=True)
            channel.send(read=sys.stdin.read())
        case "half":
            os.write(int(sys.argv[1]), b'{"half": ')
            os._exit(request["code"])
        case "invalid":
            channel.send(**error_record(InvalidExperiment("key", {1, 2}, "a problem", "A remedy.")))
        case "failed":
            channel.send(**error_record(RunFailed("a reason")))
        case "compute":
            channel.send(computing=True)
            while not cancelled.is_set():
                pass
            channel.send(cancelled=True)
        case "start":
            program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
            channel.send(pid=program.pid)
"""


@pytest.fixture(autouse=True)
def _peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))


@asynccontextmanager
async def peer() -> AsyncIterator[SubprocessChannel]:
    channel = await SubprocessChannel.start("peer", "the peer")
    try:
        yield channel
    finally:
        channel.close()


def run(work: Callable[[SubprocessChannel], Awaitable[None]]) -> None:
    """Do the work with a channel, and check that its end leaves nothing behind."""

    async def play() -> None:
        me = psutil.Process()
        gc.collect()  # what earlier tests left open
        before = me.num_fds(), {child.pid for child in me.children()}
        async with asyncio.timeout(PATIENCE_S), peer() as channel:
            await work(channel)
        await asyncio.sleep(0)  # the loop closes the socket after this call
        gc.collect()
        assert (me.num_fds(), {child.pid for child in me.children()}) == before

    asyncio.run(play())
    assert "fedstrata rows" not in Path("/proc/self/maps").read_text()


def test_records_of_any_length_pass_in_their_order() -> None:
    async def work(channel: SubprocessChannel) -> None:
        long = "é\n" * (1 << 19)
        channel.send(do="echo", text=long)
        channel.send(do="echo", path=Path("a"), loss=float("inf"))
        assert await channel.receive() == {"text": long}
        assert await channel.receive() == {"path": "a", "loss": float("inf")}

    run(work)


def test_both_ends_have_the_same_rows_which_grow() -> None:
    async def work(channel: SubprocessChannel) -> None:
        for count, row_bytes in ((1, 10), (4, 10_001), (2, 300_000), (1, 1)):
            rows = channel.memory.rows(count, row_bytes)
            assert rows.shape == (count, row_bytes) and all(row.ctypes.data % 4096 == 0 for row in rows)
            rows[:] = np.arange(count, dtype=np.uint8)[:, None] + 1
            await channel.request(do="double", count=count, row_bytes=row_bytes)
            assert (rows == 2 * (np.arange(count)[:, None] + 1)).all()

    run(work)


@pytest.mark.parametrize(
    ("request_", "killed", "how"),
    [
        ({"do": "exit", "code": 0}, False, "ended with code 0; its message is above"),
        ({"do": "exit", "code": 3}, False, "ended with code 3; its message is above"),
        ({"do": "raise"}, False, "ended with code 1; its message is above"),
        ({"do": "kill"}, True, "was killed by SIGKILL"),
        ({"do": "half", "code": 7}, False, "ended with code 7; its message is above"),
    ],
)
def test_the_end_of_the_process_is_reported_with_its_code(
    request_: dict[str, object], killed: bool, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(channel: SubprocessChannel) -> None:
        for _ in range(2):  # and again when the process is gone
            with pytest.raises(ProcessEnded) as caught:
                await channel.request(**request_)
            assert (str(caught.value), caught.value.how, caught.value.killed) == (f"the peer {how}", how, killed)
            assert caught.value.exit_code == 1

    run(work)
    assert ("a bug" in capfd.readouterr().err) == (request_["do"] == "raise")


def test_a_process_that_closes_its_end_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_channel, "LAST_BREATH_S", 0.01)

    async def work(channel: SubprocessChannel) -> None:
        with pytest.raises(ProcessEnded, match="the peer was killed by SIGKILL"):
            await channel.request(close=True)

    run(work)


def test_a_module_that_does_not_exist_is_an_end_with_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    async def play() -> None:
        channel = await SubprocessChannel.start("no_such_module", "the peer")
        try:
            with pytest.raises(ProcessEnded, match="ended with code 1"):
                await channel.receive()
        finally:
            channel.close()

    asyncio.run(play())
    assert "no_such_module" in capfd.readouterr().err


def test_the_output_of_libraries_and_programs_never_enters_the_channel(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(channel: SubprocessChannel) -> None:
        assert await channel.request(do="flood") == {"read": ""}
        assert await channel.request(do="echo", x=1) == {"x": 1}

    run(work)
    out, err = capfd.readouterr()
    assert out == "" and err.count("library" * 100) == err.count("not") == 1000 and err.endswith("program\n")


def test_errors_pass_with_their_parts() -> None:
    async def work(channel: SubprocessChannel) -> None:
        with pytest.raises(InvalidExperiment, match=r"key = .*: a problem\. A remedy\.") as invalid:
            await channel.request(do="invalid")
        assert invalid.value.parts == ("key", "{1, 2}", "a problem", "A remedy.") and invalid.value.exit_code == 4
        with pytest.raises(RunFailed, match=r"^a reason$"):
            await channel.request(do="failed")
        assert await channel.request(do="echo", x=1) == {"x": 1}

    run(work)
    assert error_in({"x": 1}) is None
    errors: list[FedstrataError] = [InvalidExperiment("a", 1, "b", "c"), RunFailed("d")]
    assert [str(error_in(error_record(error))) for error in errors] == list(map(str, errors))


def test_a_record_has_an_effect_while_the_process_computes() -> None:
    async def work(channel: SubprocessChannel) -> None:
        assert await channel.request(do="compute") == {"computing": True}
        assert await channel.request(cancel=True) == {"cancelled": True}

    run(work)


def test_closing_kills_a_process_that_computes_and_ends_who_waits() -> None:
    waiting: list[asyncio.Task[Record]] = []

    async def work(channel: SubprocessChannel) -> None:
        await channel.request(do="compute")
        channel.send(do="echo", text="x" * (1 << 20))
        waiting.append(asyncio.create_task(channel.receive()))
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(ProcessEnded, match="the peer was killed by SIGKILL"):
            await waiting[0]

    run(work)


def test_a_program_of_the_process_does_not_keep_the_channel_open() -> None:
    async def work(channel: SubprocessChannel) -> None:
        program = psutil.Process((await channel.request(do="start"))["pid"])
        try:
            channel.process.kill()
            with pytest.raises(ProcessEnded):
                await channel.receive()
            assert program.is_running()
        finally:
            program.kill()

    run(work)


AGENT = """
import asyncio, sys
from common.host.subprocess_channel import SubprocessChannel

async def main():
    channel = await SubprocessChannel.start("peer", "the peer")
    await channel.request(do="compute")
    print(channel.process.pid, *(name for name in ("torch", "cloud", "device") if name in sys.modules), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("end", [psutil.Process.kill, psutil.Process.terminate])
def test_the_process_ends_with_its_agent_as_it_computes(end: Callable[[psutil.Process], None]) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent:
        (pid,) = agent.stdout.readline().split()
        process = psutil.Process(int(pid))
        assert os.getsid(process.pid) == process.pid != os.getsid(agent.pid)
        end(psutil.Process(agent.pid))
    _, alive = psutil.wait_procs([process], timeout=PATIENCE_S)
    assert alive == []
