"""`make bench NAME=gpu`: what a GPU gives, in parts that go on where they were ended, and a table
of all.

    python tests/bench/gpu.py [--part NAME]... [--results FILE] [--again] [--table]

Each part is a process of its own and ends within --limit-s, by default eight minutes. Each row is
written into the file of results as soon as it is measured. Repeated, the command skips what is
there, goes on with parts that were ended, and tries rows again that failed. A row that fails, or
ends its process, is recorded with the reason, and the part goes on.

Without a GPU each part runs on the CPU in small form. That shows that it works; its figures are not
a GPU's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from tests.bench.running import run

PARTS: Final = MappingProxyType(
    {
        "tests": "the tests marked gpu, by file",
        "models": (
            "a step of SGD of each model in fp32, tf32 and bf16, batches of 10: "
            "milliseconds, samples per second"
        ),
        "vmapped": "1, 10, 40 and 200 devices with an MLP, LeNet-5 and ResNet-20, 600 samples "
        "each, one after another"
        " and vmapped: samples per second, factor, busy share of the GPU, memory",
        "graphs": (
            "a vmapped step of 1, 10, 40 and 200 devices, as it is and from a CUDA graph: "
            "milliseconds"
        ),
        "evaluation": "10,000 images on the CPU (all cores) and on the GPU: seconds",
        "lab": "`fedstrata run` with 40 devices, vmapped and not: seconds of a global round",
    }
)
RESULTS: Final = Path("runs") / "bench-gpu" / "results.json"
MEASURES: Final = "tests.bench.gpu_parts"
LIMIT_S: Final = 480.0  # of a part
ENOUGH_S: Final = 0.75  # share of the limit after which a part begins no further row
UNFINISHED: Final = 3  # exit code of a part that has rows left
OTHER_MACHINE: Final = 4
NO_GPU: Final = (
    "No GPU: small forms on the CPU, which show that each part works. These are no "
    "figures of a GPU."
)
CELL_MOST: Final = 100  # characters

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Results:
    """The file of results: the machine, and of each part its rows, the row that is being measured,
    and whether all are.

    One process writes at a time: a part's, or, while none runs, the one that started it.
    """

    path: Path

    def read(self) -> Tree:
        """Return the content; an empty one before the first part."""
        if not self.path.exists():
            return {"machine": None, "parts": {}}
        tree: Tree = json.loads(self.path.read_text(encoding="utf-8"))
        return tree

    def part(self, name: str) -> Tree:
        """Return a part's content."""
        part: Tree = self.read()["parts"].get(
            name, {"rows": {}, "now": None, "complete": False, "seconds": 0.0}
        )
        return part

    def write(self, tree: Tree) -> None:
        """Replace the content, whenever the process ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def update(self, name: str, **facts: object) -> None:
        """Change some facts of a part."""
        tree = self.read()
        tree["parts"][name] = self.part(name) | facts
        self.write(tree)

    def add(self, name: str, row: str, facts: Mapping[str, object]) -> None:
        """Add a row to a part."""
        self.update(name, rows=self.part(name)["rows"] | {row: facts}, now=None)


def measure(
    results: Results, name: str, *, measures: str, accelerator: str | None, until: float
) -> int:
    """Measure a part's missing rows in this process until a time of `time.time()`; return the exit
    code.

    `measures`: the module that has the parts' measurements.
    """
    parts = import_module(measures)  # imports torch
    parent = os.getppid()
    setting = parts.setting_of(accelerator)
    here = dict(parts.machine(setting))
    tree = results.read()
    if tree["machine"] not in (None, here):
        print(
            f"{results.path} is of another machine, {tree['machine']}. Name another file by "
            "--results."
        )
        return OTHER_MACHINE
    results.write(tree | {"machine": here})
    for row, work in parts.PARTS[name](setting):
        if row in results.part(name)["rows"]:
            continue
        # who started this process may have been killed
        if time.time() > until or os.getppid() != parent:
            return UNFINISHED
        results.update(name, now=row)
        try:
            facts = dict(work())
        except Exception as error:  # noqa: BLE001 - whatever fails belongs into the table
            facts = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        results.add(name, row, facts)
        print(f"  {row}:", ", ".join(f"{key} {_cell(value)}" for key, value in facts.items()))
        sys.stdout.flush()
    results.update(name, complete=True)
    return 0


def run_part(results: Results, name: str, *, options: Sequence[str], limit_s: float) -> bool:
    """Run a part in processes of its own until it is complete, or for `limit_s`; return whether to
    go on with others.

    If a process ends in the middle of a row, the row gets the reason, and another process goes on.
    """
    began = time.monotonic()
    spent_s = results.part(name)["seconds"]
    left_s = limit_s
    while left_s > 0:
        until = time.time() + left_s - (1 - ENOUGH_S) * limit_s
        words = [sys.executable, __file__, "--measure", name, "--until", str(until), *options]
        process = subprocess.Popen(words, start_new_session=True)
        try:
            code = process.wait(left_s)
            reason = f"exit code {code}"
            if code < 0:
                reason = f"the process was killed by {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            reason = f"longer than the part's {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what a row started
            process.wait()
        left_s = limit_s - (time.monotonic() - began)
        results.update(name, seconds=round(spent_s + limit_s - left_s, 1))
        if code == OTHER_MACHINE:
            return False
        now = results.part(name)["now"]
        if now is None:
            break  # complete, out of time, or it cannot begin: its message is above
        results.add(name, now, {"error": reason})
    return True


def forget_failures(results: Results, name: str, *, again: bool) -> None:
    """Remove a part's rows that failed, so that they are measured again, or all of them."""
    rows = results.part(name)["rows"]
    kept = {row: facts for row, facts in rows.items() if not again and "error" not in facts}
    if kept != rows:
        results.update(name, rows=kept, complete=False)


def page(tree: Tree) -> str:
    """Return the tables as a page of Markdown."""
    machine = tree["machine"] or {}
    lines = ["# bench-gpu", "", ", ".join(f"{key} {value}" for key, value in machine.items()) + "."]
    where = ""
    if machine.get("accelerator") == "cpu":
        where = "on a GPU this would be "
        lines += ["", NO_GPU]
    for name in filter(tree["parts"].get, PARTS):
        part = tree["parts"][name]
        rows: Mapping[str, Mapping[str, object]] = part["rows"]
        keys = list(dict.fromkeys(key for facts in rows.values() for key in facts))
        failed = sum("error" in facts for facts in rows.values())
        state = f"{part['seconds']:.0f} s"
        state += "" if part["complete"] else ", unfinished: repeat the command"
        state += f", {failed} failed" if failed else ""
        lines += ["", f"## {name}", "", f"{where}{PARTS[name]} ({state}).", ""]
        lines += [_line(name, *keys), "|---" * (len(keys) + 1) + "|"]
        lines += [_line(row, *map(facts.get, keys)) for row, facts in rows.items()]
    return "\n".join([*lines, ""])


def _line(*values: object) -> str:
    return "| " + " | ".join(_cell(value).replace("|", "/") for value in values) + " |"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    return "" if value is None else str(value)[:CELL_MOST]


def main(
    *,
    part: Annotated[Sequence[str], tuple(PARTS), "only this part; may be repeated"] = tuple(PARTS),
    results: Annotated[Path, f"default: {RESULTS}"] = RESULTS,
    accelerator: Annotated[str | None, "cuda:N or cpu; default: cuda:0 if there is a GPU"] = None,
    limit_s: Annotated[float, "seconds of a part"] = LIMIT_S,
    again: Annotated[bool, "measure all rows again"] = False,
    table: Annotated[bool, "measure nothing"] = False,
    measure_: Annotated[str, tuple(PARTS), SUPPRESS] = "",
    until: Annotated[float, SUPPRESS] = 0.0,
    measures: Annotated[str, SUPPRESS] = MEASURES,
) -> int:
    """Measure what is missing and print the tables; the exit code is 1 if a row failed or is
    missing.
    """
    found = Results(results)
    if measure_:
        how = {"measures": measures, "accelerator": accelerator, "until": until}
        return measure(found, measure_, **how)  # type: ignore[arg-type]
    # ends the part's process, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = ["--results", str(results), "--measures", measures]
    if accelerator:
        options += ["--accelerator", accelerator]
    for name in () if table else part:
        forget_failures(found, name, again=again)
        if found.part(name)["complete"]:
            print(f"{name}: finished before")
            continue
        print(f"{name}: {PARTS[name]}", flush=True)
        if not run_part(found, name, options=options, limit_s=limit_s):
            return 1
    text = page(found.read())
    written = results.with_suffix(".md")
    written.write_text(text, encoding="utf-8")
    print(f"\n{text}\n{results}, {written}")
    parts = list(map(found.part, part))
    failed = any("error" in row for each in parts for row in each["rows"].values())
    return int(failed or not all(each["complete"] for each in parts))


if __name__ == "__main__":
    run(main)
