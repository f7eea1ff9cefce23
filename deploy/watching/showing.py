"""Progress of a run in the process that starts it: a live view on a terminal, else log lines; a
table at the end.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.live import Live

from fedstrata.common.errors import FedstrataError
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.messages import Status
from fedstrata.common.protocol.round_state import HEARTBEAT_S
from fedstrata.common.protocol.serialization import from_facts
from fedstrata.common.protocol.status import RunProgress
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.text import counted, json_text
from fedstrata.deploy.console.logs import as_json, shows_activity, write_line
from fedstrata.deploy.console.tabular import size
from fedstrata.deploy.watching.follower import DRAW_S, Follower
from fedstrata.deploy.watching.lab_state import WatchedLab
from fedstrata.deploy.watching.screens import Terminal

if TYPE_CHECKING:
    from fedstrata.common.runtime.round import Observe

CONNECT_S: Final = 5 * HEARTBEAT_S
EPSILON: Final = "epsilon_"  # of facts about privacy, before the name of a tier
STATUS: Final = "status"  # the event that has a record of all below, not a change


@contextmanager
def show(
    experiment: Experiment,
    *,
    json_lines: bool,
    broker: str = "",
    lab: str = DEFAULT_LAB,
    follow: BrokerAddress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Observe]:
    """Yield a callback for the cloud's events. It shows them on standard error, or prints them as
    JSON lines.

    `broker`: its address, to be shown. `follow`: the broker of a lab on this machine, where the
    live view gets the status of the other parents, and so shows each device. `clock`: of a run in
    virtual time, in seconds.
    """
    if json_lines:
        with EventLines().writing() as lines:
            yield lines.write
        return
    errors = Console(stderr=True)
    log = CloudLog(experiment, broker)
    if not errors.is_terminal or errors.is_dumb_terminal or as_json():

        def write(event: str, facts: dict[str, object]) -> None:
            log.take(event, facts)
            if shows_activity() and (line := log.line(event, facts)) is not None:
                write_line(line)

        yield write
    else:
        with LiveView(errors, log, lab=lab, follow=follow, clock=clock).shown() as view:
            yield view.observe
    if (finished := log.last.get("finished")) is not None:
        run = log.last["run"]
        print(summary({**run, **finished}, label=experiment.score_label), flush=True)
        if shows_activity():
            write_line(f"report it with: fedstrata report {_name(Path(str(run['folder'])))}")


class EventLines:
    """Events as lines of JSON on standard output, written by a thread: a reader that stops does not
    stop the run.

    A status record is left out while other lines wait for the reader: the next one follows soon.
    """

    def __init__(self) -> None:
        # while own code runs in this process, the present one is standard error
        self._out = sys.stdout
        self._waiting = queue.SimpleQueue[str | None]()  # None: the end
        self._error: Exception | None = None

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        """Let an event be written. Raises what an earlier one has met: nobody reads any more, or
        the disk is full.
        """
        self._check()
        if event != STATUS or self._waiting.empty():
            self._waiting.put(json_text({"event": event, **facts}))

    @contextmanager
    def writing(self) -> Iterator[EventLines]:
        """Write inside the `with` block; at its end wait until the reader has all."""
        writer = threading.Thread(target=self._write, name="events", daemon=True)
        writer.start()
        try:
            yield self
        finally:
            self._waiting.put(None)
            writer.join()
        self._check()

    def _write(self) -> None:
        try:
            while (line := self._waiting.get()) is not None:
                print(line, file=self._out, flush=True)
        except (FedstrataError, OSError) as error:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class CloudLog:
    """Log lines of a cloud's events. `last`: the facts of the last event of each name."""

    def __init__(self, experiment: Experiment, broker: str = "") -> None:
        self.experiment = experiment
        self.broker = broker
        self.last: dict[str, Mapping[str, Any]] = {}

    def take(self, event: str, facts: Mapping[str, Any]) -> None:
        """Take an event."""
        self.last[event] = facts

    def line(self, event: str, facts: Mapping[str, Any]) -> str | None:
        """Return the log line for an event, or None if the event is not logged."""
        match event:
            case "run":
                lab = ", ".join(counted(count, kind) for kind, count in facts["nodes"].items())
                model = f"{facts['model']} ({size(facts['model_bytes'])})"
                where = f"in {facts['folder']}" + (f", broker {self.broker}" if self.broker else "")
                return f"run {facts['run']}: {facts['experiment']}, {lab}, {model}, {where}"
            case "evaluated":
                run = self.last.get("run", {})
                row = self.last.get("global_round", {})
                seconds = "simulated s" if run.get("simulated") else "s"
                traffic = []
                for tier in tiers_in(row):
                    total = row[f"{tier}_up_bytes"] + row[f"{tier}_down_bytes"]
                    traffic.append(f"{tier} {size(total)}")
                done = f"{facts['global_round']}/{run.get('global_rounds', '?')}"
                score = f"{self.experiment.score_label} {number(facts['score']):.4f}"
                loss = f"loss {number(facts['loss']):.4f}"
                elapsed = f"{row.get('elapsed_s', 0):.1f} {seconds}"
                return "  ".join((f"global round {done}", score, loss, elapsed, ", ".join(traffic)))
            case "refused":
                return f"refused {facts['node']}'s model: {facts['reason']}"
            case "warning":
                return f"warning: {facts['reason']}"
            case "child" if facts["state"] in ("ready", "lost", "failed", "disconnected", "moved"):
                reason = f" ({facts['reason']})" if facts.get("reason") else ""
                return f"{facts['node']}: {facts['state']}{reason}"
        return None


class LiveView:
    """Live view of a run, from the events of its cloud, and the status of the other parents if it
    may ask for them.

    It is drawn in a thread of its own, in which everything is that it shows.
    """

    def __init__(
        self,
        console: Console,
        log: CloudLog,
        *,
        lab: str = DEFAULT_LAB,
        follow: BrokerAddress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._follow = follow
        self._now = clock
        self._progress = RunProgress()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._screen = Terminal(self._live)
        self._events = queue.SimpleQueue[tuple[str, Mapping[str, Any]]]()
        self._closed = threading.Event()
        self._following: asyncio.Task[None] | None = None
        brokers = [log.broker] * bool(log.broker)
        self.lab = WatchedLab("", log.experiment, brokers=brokers, now=self._now(), lab=lab)

    @contextmanager
    def shown(self) -> Iterator[LiveView]:
        """Show the view; it stays on the screen unless the run finishes."""
        thread = threading.Thread(
            target=lambda: asyncio.run(self._show()), name="live view", daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self._closed.set()
            thread.join()

    def observe(self, event: str, facts: Mapping[str, Any]) -> None:
        """Take an event of the cloud, in any thread."""
        self._events.put((event, facts))

    async def _show(self) -> None:
        with self._live:
            closed = False
            while not closed:
                await asyncio.sleep(DRAW_S)
                closed = self._closed.is_set()
                while not self._events.empty():
                    self._take(*self._events.get())
                self._screen.show(self.lab, self.lab.new_events(), self._now())
            self._live.transient = "finished" in self._log.last
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))

    def _take(self, event: str, facts: Mapping[str, Any]) -> None:
        lab = self.lab
        now = self._now()
        self._log.take(event, facts)
        self._progress.take(event, facts)
        lab.report(self._progress.status, now)
        if event == STATUS:
            lab.take(lab.cloud.name, from_facts(Status, facts), now)
        elif event == "warning":
            self._screen.notes.append(f"warning: {facts['reason']}")
        elif event == "run":
            lab.run = str(facts["run"])
            lab.folder = str(facts["folder"])
            if facts.get("simulated"):
                self._screen.notes.append("times and rates are simulated")
            if self._follow is not None and self._following is None:
                self._following = asyncio.create_task(
                    self._keep_following(self._follow), name="follow"
                )

    async def _keep_following(self, broker: BrokerAddress) -> None:
        follower = Follower(
            [broker], lab=self.lab.name, run=self.lab.run, connect_timeout_s=CONNECT_S
        )
        with suppress(FedstrataError):  # the view has the cloud's events still
            await follower.feed(self.lab)


def _name(folder: Path) -> str:
    """Return what names a run to other commands: the last part of its id, or its folder if it is
    not in `runs`.
    """
    usual = folder.parent == Path(os.environ.get("FEDSTRATA_RUNS") or "runs")
    if usual:
        return folder.name.rpartition("-")[2]
    return shlex.quote(str(folder))


def summary(facts: Mapping[str, Any], *, label: str) -> str:
    """Return the lines printed at the end of a run; `label`: of its score.

    `facts`: those of the event `finished`, and of `run` whether its time is simulated.
    Paths are never wrapped or cropped, so that they can be copied.
    """
    score = facts["score"]
    rows = {f"test {label}": "-" if score is None else f"{score:.4f}"}
    if score is not None and not math.isfinite(number(facts["loss"])):
        rows["test loss"] = "not a finite number: training has diverged"
    rows["global rounds"] = str(facts["global_round"])
    for name, value in facts.items():
        if name.startswith(EPSILON):
            epsilon = "infinite" if value is None else f"{value:.4g}"
            rows[f"{name.removeprefix(EPSILON).upper()} epsilon"] = epsilon
    if facts.get("stopped"):
        rows["ended by"] = str(facts["stopped"])
    time = "simulated time" if facts.get("simulated") else "training time"
    rows[time] = f"{facts['elapsed_s']:.1f} s"
    for tier in tiers_in(facts):
        up, down = (size(facts[f"{tier}_{way}_bytes"]) for way in ("up", "down"))
        rows[f"{tier.upper()} up / down"] = f"{up} / {down}"
    rows["model"] = str(facts["model"])
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def tiers_in(names: Iterable[str]) -> list[str]:
    """Return the tiers whose bytes have these columns or facts, from the cloud down."""
    return [name.removesuffix("_up_bytes") for name in names if name.endswith("_up_bytes")]


def number(fact: float | None) -> float:
    """Return a number of an event, NaN where it was not finite: JSON has no such numbers."""
    if fact is None:
        return math.nan
    return fact
