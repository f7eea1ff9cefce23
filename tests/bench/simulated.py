"""`make bench NAME=simulated`: runs in virtual time beside labs of processes: seconds, CPU seconds,
models.

The labs have three layers and 12 devices that emulate slower machines, and a WAN of 20 Mbit/s; one
has a quorum and a straggler, one a trace of the WAN with an outage. Usage: simulated.py [LAB...]
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedstrata.deploy.results.run import Run
from tests.bench.running import MB, Clock, Table, folder, output, run
from tests.helpers.commands import sets
from tests.simulation.outcome import model_digest

LAB: Final = """\
name = "beside"
rounds = 5
topology = { institutions = 3, devices = 12 }
data = { partition = "dirichlet", concentration = 0.5 }
model = { name = "cnn_digits" }
training = { epochs = 2, batch_size = 10, learning_rate = 0.01, momentum = 0.9 }
institution = { rounds = 2 }
links = { wan = { up_mbit = 20, down_mbit = 20, delay_ms = 10 }, check = "off" }
hardware = { default = { step_s = 0.1 } }
"""
LABS: Final = {  # what each changes
    "plain": (),
    "quorum": (
        'institution.closing={ rule = "quorum", quorum = 3, deadline_s = 4.0 }',
        "hardware.of={ device-0 = { step_s = 1.0 } }",
    ),
    "trace": (
        "links.wan={ trace = { seconds = [0, 8, 13], up_mbit = [20, 0, 5], down_mbit = [20, 0, 5], "
        "delay_ms = [10, 10, 40] } }",
    ),
}
KINDS: Final = {
    "lab": [],
    "simulated": ["--simulate"],
    "simulated, 1 worker": ["--simulate", "--workers", "1"],
    "direct": ["--direct"],
}


def measure(table: Table, name: str, kind: str, home: Path) -> None:
    """Run a lab in one of the ways and print its figures."""
    file = home / f"{name}.toml"
    runs = home / name / kind
    file.write_text(LAB)
    with Clock() as clock:
        output("run", file, "--runs", runs, *sets(*LABS[name]), *KINDS[kind])
    run = Run(next(runs.iterdir()))
    seconds = (run.seconds, clock.s, clock.cpu_s)
    sent = sum(run.totals.values()) / MB
    table.add(name, kind, *(f"{each:.2f}" for each in seconds), f"{sent:.3f}", model_digest(runs))


def main(*labs: str) -> None:
    """Run the labs that are named, or all."""
    table = Table("lab", "", "s of global rounds", "s wall", "CPU s", "MB", "model")
    with folder() as home:
        for name in labs or LABS:
            for kind in KINDS:
                measure(table, name, kind, home)


if __name__ == "__main__":
    run(main)
