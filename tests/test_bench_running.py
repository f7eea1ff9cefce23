"""The runner of benchmarks: the parameters of a `main` are its options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest

from tests.bench.running import Table, least_s, medians, run, turns


def main(
    file: Path = Path("demo"),
    *labs: str,
    bytes_: int = 4,
    part: Annotated[Sequence[str], ("one", "two"), "one of two"] = ("one", "two"),
    rates: Sequence[tuple[float, float]] = (),
    limit_s: float | None = None,
    full: bool = False,
) -> None:
    """Note what was given."""
    given.append((file, labs, bytes_, part, rates, limit_s, full))


given: list[Any] = []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", (Path("demo"), (), 4, ("one", "two"), (), None, False)),
        ("a b c", (Path("a"), ("b", "c"), 4, ("one", "two"), (), None, False)),
        ("--bytes 5 --full", (Path("demo"), (), 5, ("one", "two"), (), None, True)),
        ("--limit-s 2", (Path("demo"), (), 4, ("one", "two"), (), 2.0, False)),
        (
            "--part one --part two one",
            (Path("demo"), (), 4, ["one", "two", "one"], (), None, False),
        ),
        (
            "--rates 1 2 --rates 3 4",
            (Path("demo"), (), 4, ("one", "two"), [[1.0, 2.0], [3.0, 4.0]], None, False),
        ),
    ],
)
def test_parameters_are_options(
    line: str, found: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *line.split()])
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 0 and given.pop() == found


@pytest.mark.parametrize("line", ["--part three", "--bytes x", "--rates 1", "--nothing"])
def test_other_options_are_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *line.split()])
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("result", "code"), [(None, 0), (False, 0), ("", 0), (True, 1), ("slow", "slow")]
)
def test_what_a_benchmark_returns_is_its_exit_code(
    result: object, code: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as ended:
        run(lambda: result)
    assert ended.value.code == code


def test_ways_take_turns() -> None:
    calls: list[str] = []
    seconds = iter([9.0, 1.0, 3.0, 4.0, 2.0, 8.0])

    def way(name: str) -> float:
        calls.append(name)
        return next(seconds)

    ways = (lambda: way("a"), lambda: way("b"))
    assert turns(1, *ways) == [(9.0,), (1.0,)]
    assert medians(2, *ways) == [2.5, 6.0]
    assert "".join(calls) == "ababab"


def test_the_least_seconds_are_without_the_first_call() -> None:
    moments = iter([0.0, 0.5, 1.0, 4.0, 5.0, 7.0])
    assert least_s(2, lambda: None, clock=lambda: next(moments)) == [2.0]


def test_a_row_that_is_short_has_empty_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("way", "seconds", "MB")
    table.add("fast", 1)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "| way      |  seconds |       MB |",
        "| -------- | -------- | -------- |",
        "| fast     |        1 |          |",
    ]
