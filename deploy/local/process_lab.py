"""A whole lab on this machine: a broker and all roles as processes, with the output of one run."""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from fedstrata.common.errors import UNEXPECTED, InvalidExperiment, ParentGaveUp, RunFailed
from fedstrata.common.experiment.reading import to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import failure
from fedstrata.common.host.processes import interruptible, python, spawn, stop_all
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.runtime.round import Observe
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import escaped
from fedstrata.deploy.console.logs import last_error, notes_in, options, write_line
from fedstrata.deploy.local.lab_network import LabNetwork, one_host, shares
from fedstrata.deploy.results.run import may_resume
from fedstrata.deploy.watching.showing import show
from fedstrata.device.pool.pool import cores

ROLE: Final = tuple(python("fedstrata"))  # the command of a role's process
FAREWELL_S: Final = 20.0
# time in which the cloud may end too; its error is reported first, as it names the cause
REASON_S: Final = 5.0
# and where a role ended because another one did: that one may be slow to end, on a busy machine
OTHERS_REASON_S: Final = 30.0
POLL_S: Final = 0.2
STOP_S: Final = 5.0
# of each role; one that is killed again and again, say for lack of memory, stays away
RESTARTS_MOST: Final = 3
SPOOL: Final = ".spool"  # beside the runs' folders: files that institutions need to resume a run


class LocalLab:
    """One run of an experiment with every role on this machine.

    `metrics`: the cloud's address of /metrics, and options that go with it.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        runs: Path,
        resume: Path | None,
        json_lines: bool,
        lab: str = DEFAULT_LAB,
        metrics: Sequence[str],
    ) -> None:
        self._experiment = experiment
        self._lab = lab
        self._metrics = metrics
        self._runs = runs
        self._resume = resume
        self._json_lines = json_lines
        self._roles: dict[str, subprocess.Popen[bytes]] = {}
        self._again: dict[str, Callable[[], None]] = {}  # starts a role again
        self._killed: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._notes: set[str] = set()  # that were shown
        # bytes of the logs of processes that train, in which these were
        self._shown: dict[str, int] = {}
        self._events: queue.Queue[tuple[str, dict[str, object]] | None] = queue.Queue()
        self._folder: Path | None = None
        self._run = ""

    def run(self) -> int:
        """Run to the end; return the exit code of the cloud, or of a role that failed while the
        cloud went on.

        Raises FedstrataError, KeyboardInterrupt.
        """
        with tempfile.TemporaryDirectory(prefix="fedstrata-") as name, interruptible():
            home = Path(name)
            # mosquitto reads its configuration there, possibly as another user
            os.chmod(home, 0o755)
            try:
                with one_host(self._experiment, home) as network:
                    try:
                        return self._run_roles(home, network)
                    except BaseException as error:
                        self._print_resume_command(error)
                        raise
            finally:
                self._keep_logs(home)
                self._remove_states()

    def _run_roles(self, home: Path, network: LabNetwork) -> int:
        try:
            self._start(home, network)
            shown = show(
                self._experiment,
                json_lines=self._json_lines,
                broker=network.address,
                lab=self._lab,
                follow=network.broker,
            )
            with shown as observe:
                role = self._follow(observe, home, network)
            self._show_notes(home)
            self._show_unexpected(home)
            code = self._roles[role].wait()
            if code < 0:
                raise RunFailed(f"the cloud was killed by signal {-code}")
            if code:
                self._print_resume_command(failed=code == InvalidExperiment.exit_code)
                self._print_error(home, role)
            else:
                self._wait_for_roles()
            return code
        finally:
            stop_all(self._roles.values(), grace_s=STOP_S)

    def _print_resume_command(
        self, error: BaseException | None = None, *, failed: bool = False
    ) -> None:
        """Write how the run goes on; `failed`: by its experiment."""
        failed |= isinstance(error, InvalidExperiment)
        after_signal = "\n" if isinstance(error, KeyboardInterrupt) else ""  # the terminal shows ^C
        if self._folder is not None and not self._folder.is_dir():
            write_line(f"{after_signal}no global round had begun: {self._folder} is removed")
        elif self._folder is not None and may_resume(self._folder, by_experiment=failed):
            write_line(f"{after_signal}resume with: fedstrata run --resume {self._folder}")

    def _start(self, home: Path, network: LabNetwork) -> None:
        file = home / "experiment.toml"
        file.write_text(to_toml(self._experiment), encoding="utf-8")
        # the lab is killed as a whole, so no device has to announce a result again
        memory = ["--spool", "none"]
        runs = ["--broker", network.address, "--runs", str(self._runs), "--format", "json"]
        cloud = ["cloud", "--sole", *runs, *memory, "--metrics", *self._metrics]
        what = ["--resume", str(self._resume)] if self._resume else [str(file)]
        self._again[CLOUD] = lambda: self._spawn(
            home, network, CLOUD, [*cloud, "--resume", str(self._folder)]
        )
        self._spawn(home, network, CLOUD, [*cloud, *what])
        tree = self._experiment.tree
        keeps = any(self._experiment.remembers(name) for name in tree.aggregators)
        home_of_runs = self._resume.resolve().parent if self._resume else self._runs
        states = ["--spool", str(home_of_runs / SPOOL)] if keeps else memory
        # The user who starts the lab chose the data, and the code.
        data = [] if "FEDSTRATA_DATA" in os.environ else ["--data", self._experiment.data.root]
        for name in tree.aggregators:
            own = ["institution", "--once", *self._place(name, network)]
            self._spawn(home, network, name, [*own, *states, *data, *self._allowed(name)])
        self._shown = dict.fromkeys(network.groups, 0)
        slots = shares(cores(), len(network.groups))
        for (process, devices), count in zip(network.groups.items(), slots, strict=True):
            names = [word for device in devices for word in self._place(device, network)]
            # A single process detects its cores or GPUs itself; several processes share the cores.
            several = ["--slots", str(count)] if len(slots) > 1 else []
            allowed = self._allowed(devices[0])
            # the host's energy is the whole lab's
            alone = ["--energy", "none", "--once", "--together"]
            self._spawn(
                home, network, process, ["device", *names, *allowed, *data, *several, *alone]
            )

    def _place(self, node: str, network: LabNetwork) -> list[str]:
        """Return the options that name a node, its parent and its broker."""
        parent = self._experiment.tree.parent(node)
        return ["--name", node, "--parent", parent, "--broker", network.address]

    def _allowed(self, node: str) -> list[str]:
        names = self._experiment.code_at(node).values()
        return [word for name in names if is_own(name) for word in ("--allow", name)]

    def _spawn(self, home: Path, network: LabNetwork, process: str, arguments: list[str]) -> None:
        self._again.setdefault(process, partial(self._spawn, home, network, process, arguments))
        command = [*ROLE, *options(), *arguments, "--lab", self._lab]
        self._roles[process] = spawn(
            command,
            log=home / f"{process}.log",
            read_output=process == CLOUD,
            env=network.environment,
        )
        if process == CLOUD:
            threading.Thread(
                target=self._read_events, args=(self._roles[CLOUD].stdout,), daemon=True
            ).start()

    def _read_events(self, output: Iterable[bytes]) -> None:
        for line in output:
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:
                continue  # a truncated line: the cloud was killed
            self._events.put((str(event.pop("event")), event))
        self._events.put(None)

    def _follow(self, observe: Observe, home: Path, network: LabNetwork) -> str:
        """Show the cloud's events until the cloud ends or another role fails; return the role that
        ended.
        """
        while True:
            try:
                item = self._events.get(timeout=POLL_S)
            except queue.Empty:
                if (failed := self._failed_role(home)) is not None:
                    return failed
                continue
            if item is None:
                if self._folder is not None and self._starts_again(
                    CLOUD, self._roles[CLOUD].wait()
                ):
                    continue
                return CLOUD
            event, facts = item
            if event == "run":
                self._folder = Path(str(facts["folder"]))
                self._run = str(facts["run"])
            self._show_notes(home)
            observe(event, facts)

    def _failed_role(self, home: Path) -> str | None:
        """Return a role that failed while the cloud goes on, or None. A role that was killed is
        started again.
        """
        for role, process in self._roles.items():
            code = process.poll()
            if code is None or code == 0 or role == CLOUD or role in self._reported:
                continue
            if self._starts_again(role, code):
                continue
            self._reported.add(role)
            if code < 0:
                write_line(
                    f"{role} was killed by signal {-code}; the run continues without it",
                    level=logging.WARNING,
                )
                continue
            reason_s = OTHERS_REASON_S if code == ParentGaveUp.exit_code else REASON_S
            deadline = time.monotonic() + reason_s
            while self._roles[CLOUD].poll() is None:
                if time.monotonic() >= deadline:
                    return role
                time.sleep(POLL_S)
        return None

    def _starts_again(self, role: str, code: int) -> bool:
        """Start a role again that was killed, unless it was too often, and return whether it
        was.
        """
        if code >= 0 or self._killed[role] >= RESTARTS_MOST:
            return False
        self._killed[role] += 1
        write_line(
            f"{role} was killed by signal {-code}: it is started again", level=logging.WARNING
        )
        self._again[role]()
        return True

    def _print_error(self, home: Path, role: str) -> None:
        """Print the error of a role that ended, and the frames of own code that its log has, or
        another one's.
        """
        found = [last_error(home / f"{each}.log") for each in (role, *self._roles)]
        first = found[0] or [f"{role} ended without a word"]
        write_line(first[0], level=logging.ERROR)
        for frame in next((lines[1:] for lines in found if len(lines) > 1), []):
            write_line(frame)

    def _show_notes(self, home: Path) -> None:
        """Print the new warnings of processes that train, each once."""
        for role in self._shown:
            with (home / f"{role}.log").open("rb") as log:
                log.seek(self._shown[role])
                lines = log.read().rpartition(b"\n")[0]
                self._shown[role] += len(lines)
            for note in notes_in(lines.decode(errors="replace")):
                if note not in self._notes:
                    self._notes.add(note)
                    write_line(note, level=logging.WARNING)

    def _show_unexpected(self, home: Path) -> None:
        """Print the unexpected errors that roles logged, with their tracebacks."""
        for role in self._roles:
            lines = (
                (home / f"{role}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            )
            first = next(
                (place for place, line in enumerate(lines) if UNEXPECTED in line), len(lines)
            )
            for line in lines[first:]:
                print(escaped(line), file=sys.stderr)

    def _wait_for_roles(self) -> None:
        deadline = time.monotonic() + FAREWELL_S
        for process in self._roles.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # stopped by the caller

    def _remove_states(self) -> None:
        """Remove the institutions' states of a run that has no folder, as no global round had
        begun.
        """
        if self._folder is None or self._folder.is_dir():
            return
        states = self._folder.parent / SPOOL
        shutil.rmtree(states / self._run, ignore_errors=True)
        with suppress(OSError):  # other runs have some
            states.rmdir()
            self._folder.parent.rmdir()

    def _keep_logs(self, home: Path) -> None:
        if self._folder is not None and self._folder.is_dir():
            logs = self._folder / "logs"
            try:
                logs.mkdir(exist_ok=True)
                for log in home.glob("*.log"):
                    shutil.copy(log, logs / log.name)
            except OSError as error:  # the run's own error comes first
                write_line(str(failure(error, logs)), level=logging.WARNING)
