"""Tables that users write: separators, encodings and lines, and the same reader for traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.experiment.reading import load
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.csv_table import CsvTable


def read(path: Path, raw: bytes | str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    with CsvTable.open("a.key", path) as table:
        return table.header, [(table.line, row) for row in table]


@pytest.mark.parametrize(
    ("raw", "header", "rows"),
    [
        ("a,b\n1,2\n", ["a", "b"], [(2, ["1", "2"])]),
        ("a;b\n1,5;2\n", ["a", "b"], [(2, ["1,5", "2"])]),
        ("a\tb\n1\t2\n", ["a", "b"], [(2, ["1", "2"])]),
        ('"a,b,c";y;z\n1;2;3\n', ["a,b,c", "y", "z"], [(2, ["1", "2", "3"])]),
        ('"a;b\n;c",y\n1,2\n', ["a;b\n;c", "y"], [(3, ["1", "2"])]),
        ('"say ""a;b;c""",y\n1,2\n', ['say "a;b;c"', "y"], [(2, ["1", "2"])]),
        ("a, b c;d\n1,2\n", ["a", "b c;d"], [(2, ["1", "2"])]),  # as many commas: the comma
        ('a, "b,c"\n 1,  2\n', ["a", "b,c"], [(2, ["1", "2"])]),
        ("\ufeffa,b\r\n1,2\r\n", ["a", "b"], [(2, ["1", "2"])]),
        ("a;b\n1;\u00e4\n".encode("utf-16"), ["a", "b"], [(2, ["1", "\u00e4"])]),
        ("\ufeffa\tb\n1\t2\n".encode("utf-16-be"), ["a", "b"], [(2, ["1", "2"])]),
        ('\n\na,b\n\n"1\n1",2\n   \n3,4\n\n', ["a", "b"], [(5, ["1\n1", "2"]), (8, ["3", "4"])]),
    ],
)
def test_what_spreadsheets_and_people_write_is_read(
    tmp_path: Path, raw: Any, header: Any, rows: Any
) -> None:
    assert read(tmp_path / "t.csv", raw) == (header, rows)


LINK = "seconds,up_mbit,down_mbit,delay_ms\n0,8,16,10\n9,4,4,50\n"
AWAY = "device,begin_s,end_s\ndevice-0,0,40\ndevice-0,90,\n"


CHANGES: dict[str, Callable[[str], bytes]] = {  # the same table as other programs write it
    "bom": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: text.encode("utf-16"),
    "spaces": lambda text: text.replace(",", " , ").encode(),
    "semicolons": lambda text: text.replace(",", ";").encode(),
    "tabs": lambda text: text.replace(",", "\t").encode(),
    "quoted": lambda text: re.sub(r"[^,\n]+", r'"\g<0>"', text).encode(),
    "blank lines": lambda text: text.replace("\n", "\r\n\r\n  \r\n").encode(),
}


def loaded(folder: Path, link: bytes, away: bytes) -> Experiment:
    (folder / "lab.toml").write_text(
        'links.wan.trace = "lte.csv"\navailability.trace = "away.csv"\n'
    )
    (folder / "lte.csv").write_bytes(link)
    (folder / "away.csv").write_bytes(away)
    return load(folder / "lab.toml")


@pytest.mark.parametrize("how", CHANGES)
def test_traces_are_read_as_tables_are(tmp_path: Path, how: str) -> None:
    found = loaded(tmp_path, CHANGES[how](LINK), CHANGES[how](AWAY))
    trace = found.tiers[0].link.trace
    assert trace is not None and (trace.seconds, trace.up_mbit, trace.down_mbit) == (
        [0, 9],
        [8, 4],
        [16, 4],
    )
    assert trace.delay_ms == [10, 50] and found.availability.trace is not None
    assert found.availability.trace.changes == {"device-0": [0, 40, 90]}
