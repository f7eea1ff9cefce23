"""`make bench NAME=soak`: ten minutes of random kills of all roles and the broker: same model,
memory, files?

A device, its institution, the cloud, its evaluator and the broker are killed, ended or stopped at
random moments, and started again at once, the cloud with `--resume`. The other institution and its
devices live through all of it. Each run must leave the model of an undisturbed one, bit for bit;
printed are the runs, the signals, and the memory and open files of those that lived, over time.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import psutil

from fedstrata.common.experiment.reading import parse, to_toml
from tests.bench.matrix import (
    BROKER,
    CLOUD,
    DEVICE,
    EXPERIMENT,
    INSTITUTION,
    PATIENCE_S,
    VICTIMS,
    Lab,
)
from tests.bench.running import MB, Clock, Table, costs, folder, run

EVALUATOR: Final = "evaluator"
WITNESSES: Final = ("institution-1", "others")
ROUNDS: Final = 10
PAUSE_S: Final = (0.2, 4.0)  # between two signals
STOPPED_S: Final = 3.0
SIGNALS: Final = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


class StayingLab(Lab):
    """A lab whose institutions and devices wait for the next run."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        super().__init__(home, stack)
        self.file.write_text(to_toml(parse({**EXPERIMENT, "rounds": ROUNDS})))
        self.done = 0

    def words(self, name: str, *, again: bool) -> list[str]:
        return [word for word in super().words(name, again=again) if word != "--once"]

    @property
    def folder(self) -> Path:
        return sorted(self.runs.iterdir())[self.done]

    def run(self, draw: random.Random, signals: Counter[str], *, disturbed: bool) -> bytes:
        """Run the experiment, with random signals meanwhile; return its model."""
        self.start(CLOUD)
        while disturbed:
            try:
                self.processes[CLOUD].wait(draw.uniform(*PAUSE_S))
                break
            except subprocess.TimeoutExpired:
                victim, number = draw.choice((*VICTIMS, EVALUATOR)), draw.choice(SIGNALS)
                if victim in (CLOUD, EVALUATOR) and not self.begun():
                    continue
                signals[f"{number.name} {victim}"] += 1
                self.signal(victim, number)
        code = self.processes[CLOUD].wait(10 * PATIENCE_S)
        said = (self.home / f"{CLOUD}.log").read_text().splitlines()[-3:]
        assert code == 0, f"the cloud ended with {code}: {said}"
        model = self.model()
        self.done += 1
        return model

    def begun(self) -> bool:
        """Return whether the run has ended a global round, so that it can be resumed."""
        started = self.runs.exists() and len(list(self.runs.iterdir())) > self.done
        return started and (self.folder / "events.jsonl").exists() and bool(self.rounds())

    def signal(self, victim: str, number: signal.Signals) -> None:
        process: psutil.Process | subprocess.Popen[bytes] | None = self.processes.get(victim)
        if victim == EVALUATOR:
            process = self.evaluator()
        if process is None:
            return  # between two evaluators
        if number is signal.SIGSTOP:
            process.send_signal(number)
            time.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
        elif victim == EVALUATOR:
            process.send_signal(number)
        else:
            super().signal(victim, number)

    def evaluator(self) -> psutil.Process | None:
        """Return the cloud's evaluator, None between two."""
        for each in psutil.Process(self.processes[CLOUD].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a zombie is none, too
                if "fedstrata.cloud.evaluator_process" in each.cmdline():
                    return each
        return None

    def costs(self, name: str) -> str:
        """Return the memory of a process and its workers, MB, and its open files, for the table."""
        found = costs(psutil.Process(self.processes[name].pid))
        return f"{found.memory / MB:.0f}, {found.files}"


def main(*, minutes: float = 10.0, seed: int = 1) -> bool:
    """Disturb runs until the time is over; return whether a model differs."""
    draw = random.Random(seed)
    signals: Counter[str] = Counter()
    witnesses = [f"{name}, MB, files" for name in WITNESSES]
    table = Table("minute", "run", "signals", "same model", *witnesses)
    same = []
    with folder(prefix="soak-") as root, ExitStack() as stack:
        lab = StayingLab(root, stack)
        for name in (BROKER, INSTITUTION, "institution-1", DEVICE, "others"):
            lab.start(name)
        expected = lab.run(draw, signals, disturbed=False)
        clock = Clock()
        while (now := clock.now_s / 60) < minutes:
            same.append(lab.run(draw, signals, disturbed=True) == expected)
            cells = map(lab.costs, WITNESSES)
            table.add(f"{now:.1f}", lab.done, signals.total(), same[-1], *cells)
    print(", ".join(f"{count} {what}" for what, count in sorted(signals.items())))
    print(f"{sum(same)} of {len(same)} runs with the model of the undisturbed one, bit for bit")
    return not all(same)


if __name__ == "__main__":
    run(main)
