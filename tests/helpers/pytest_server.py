"""Runs pytest again and again in forks of a process that has imported what takes seconds: torch,
and no module of fedstrata or of its tests.

A line of standard input is a job: `{"folder", "tests", "limit_s"}`. A line of output is its result:
`{"code", "failed"}`, the code of pytest, None at the time limit, and the tests that failed. Run it
by `python -P`: the folder of this file has modules of any name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

# as tests/conftest.py has it, before torch is imported
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_WAIT_POLICY="passive")

import prometheus_client  # noqa: F401 # imported for the forks
import pydantic  # noqa: F401
import pytest
import rich  # noqa: F401
import scipy.optimize  # noqa: F401
import torch  # noqa: F401
import typer  # noqa: F401

RESULT_BYTES = 65536
OPTIONS = ("-q", "-x", "--no-header", "-p", "no:cacheprovider")


class Failures:
    """The plugin that collects what failed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test."""
        if report.failed:
            self.found.append(report.nodeid)


def run(job: dict[str, Any], output: int) -> None:
    """Run the pytest of a job in this process, which ends."""
    os.setsid()
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    os.environ["PYTHONPATH"] = job["folder"]
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    failures = Failures()
    code = pytest.main([*OPTIONS, *job["tests"]], plugins=[failures])
    os.write(output, json.dumps({"code": int(code), "failed": failures.found}).encode())
    os._exit(0)


def result_of(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fork; end it, with its processes, at the limit."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            run(job, writing)
        finally:
            os._exit(1)
    os.close(writing)
    end = time.monotonic() + job["limit_s"]
    ended = False
    try:
        while not ended and time.monotonic() < end:
            ended = os.waitpid(child, os.WNOHANG) != (0, 0)
            time.sleep(0.02)
    finally:
        if not ended:  # at the limit, or as this process is interrupted
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing was left behind
    os.set_blocking(reading, False)  # processes that are left may hold the other end
    try:
        text = os.read(reading, RESULT_BYTES)
    except BlockingIOError:
        text = b""
    os.close(reading)
    if not ended:
        return {"code": None, "failed": []}
    return json.loads(text) if text else {"code": -1, "failed": []}


def main() -> None:
    """Run jobs until the input ends."""
    for line in sys.stdin:
        print(json.dumps(result_of(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
