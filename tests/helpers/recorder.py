"""The plugin of pytest that notes what each test executes and reads, for `tests/helpers/executed.py`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import coverage
import pytest

FOLDER: Final = f"{Path(__file__).parents[2]}/"
NOW: Final = "TESTS_MAP_NOW"  # the test that runs, for the processes that it starts
RAW: Final = "TESTS_MAP_RAW"  # the folder for what a process of pytest has noted


class Recorder:
    """Notes which test runs, for coverage; the files that it reads; its seconds.

    What a fixture of several tests executes has a name of its own, as it runs for the first alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now = ""
        self._read: set[tuple[str, str]] = set()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._fixtures: dict[str, list[str]] = {}
        self._collected: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._now:
            return
        if event == "open":
            self._reads(arguments[0])
        elif event == "subprocess.Popen":
            for each in (arguments[0], *arguments[1]):
                self._reads(each)

    def _reads(self, path: object) -> None:
        if isinstance(path, str | Path):
            name = os.path.abspath(path)
            if name.startswith(FOLDER) and not name.endswith((".py", ".pyc")):
                self._read.add((self._now, name.removeprefix(FOLDER)))

    def _switch(self, name: str) -> None:
        self._now = os.environ[NOW] = name
        if measuring := coverage.Coverage.current():
            measuring.switch_context(name)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests there are: after an interruption some did not run."""
        self._collected = [item.nodeid for item in session.items]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, bool, bool]:
        """Let what follows count for a test."""
        self._fixtures[item.nodeid] = [
            shared(each[-1])
            for each in item._fixtureinfo.name2fixturedefs.values()
            if each[-1].scope != "function"
        ]
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Let what follows count for all tests of a fixture."""
        before = self._now
        if fixturedef.scope != "function":
            self._switch(shared(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the seconds of a test's phase."""
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed:
            self._failed.add(test)

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        found = {
            "read": sorted(self._read),
            "seconds": self._seconds,
            "failed": sorted(self._failed),
            "fixtures": self._fixtures,
            "collected": self._collected,
        }
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(found))
        if measuring := coverage.Coverage.current():
            measuring.stop()
            measuring.save()


def shared(fixture: pytest.FixtureDef[Any]) -> str:
    """Return the name of a fixture of several tests, unlike those of tests."""
    return f"{fixture.baseid}@{fixture.argname}"


def pytest_configure(config: pytest.Config) -> None:
    """Record if this process belongs to `record`."""
    if folder := os.environ.get(RAW):
        config.pluginmanager.register(Recorder(Path(folder)))
