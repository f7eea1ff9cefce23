"""A fork in place of a new interpreter is the process that its command describes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import command, fedstrata
from tests.helpers.warm import WarmProcess

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(sys.platform != "linux", reason="adopting processes is for Linux"),
]


def is_fork(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has the libraries of the server."""
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def waiting(**options: object) -> subprocess.Popen[str]:
    """Start a device that finds no broker, in a lab that computes nothing."""
    line = command("device", "--name", "device-0", "--parent", "cloud", null=True)
    given = ["--broker", "127.0.0.1:1", "--connect-timeout", "60"]
    return subprocess.Popen([*line, *given], stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_it_is_a_child_with_its_command_line_folder_and_session(tmp_path: Path) -> None:
    with waiting(cwd=tmp_path, start_new_session=True) as process:
        found = psutil.Process(process.pid)
        assert is_fork(process) and found.parent() == psutil.Process()
        assert [word for word in found.cmdline() if word] == process.args
        assert found.cwd() == str(tmp_path) and os.getsid(process.pid) == process.pid
        assert process.stderr is not None and "refused" in process.stderr.readline()
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_its_output_and_exit_code_are_those_of_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("raise OSError('of this file')")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    )
    calls = (["--version"], ["check", "own:Rule"], ["run", "nothing.toml"])
    forks = [fedstrata(*words) for words in calls]
    monkeypatch.setattr(subprocess, "Popen", WarmProcess.__base__)
    for words, fork in zip(calls, forks, strict=True):
        new = fedstrata(*words)
        assert (fork.returncode, fork.stdout) == (new.returncode, new.stdout)
        assert fork.stderr == new.stderr


def test_it_ends_with_the_process_that_started_it_and_so_does_its_server() -> None:
    program = (
        "import subprocess\n"
        "from tests.test_warm import WarmProcess, waiting\n"
        "subprocess.Popen = WarmProcess\n"
        "print(waiting().pid, flush=True)\n"
        "input()"
    )
    words = [sys.executable, "-c", program]
    with WarmProcess.__base__(words, stdin=-1, stdout=-1, text=True) as starting:
        found = psutil.Process(int(starting.stdout.readline()))
        below = found.children()
        assert len(below) == 1  # its server
        starting.kill()
    gone, _ = psutil.wait_procs([found, *below], timeout=30)
    assert len(gone) == 2
