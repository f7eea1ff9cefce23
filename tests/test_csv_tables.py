"""Tables that users write: separators, encodings and lines, and the same reader for traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.errors import InvalidExperiment
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


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            b"a,b\n1,2\n3,\xe4\n",
            r"no CSV file in UTF-8 \(byte 0xe4 in line 3\)\. Save it as UTF-8\.",
        ),
        (b"\xff\xfea\0,\0b", r"no CSV file in UTF-8 \(byte 0x62\)\."),
        ('a,b\n1,"2\n', "no CSV file: unexpected end of data, in line 2"),
        ('a,b\n1,"2"x\n', "no CSV file: .*, in line 2"),
        ('a, "b,c" \n', "no CSV file: .*in line 1"),
        (
            "a,b\n\n1,2\n1,2,5\n",
            r"has 3 cells in line 4, and 2 columns\. Correct that line; decimals have a point\.",
        ),
        ("a;b\n1\n", r"has 1 cell in line 2, and 2 columns\. Correct that line\.$"),
        (",a\n0,1\n", "has a column without a name, number 1"),
        ("a,b,a\n0,1,2\n", "has columns with the same name, 'a'"),
        ("1;2\n3;4\n", "has no header"),
    ],
)
def test_a_damaged_table_is_refused_by_its_line(
    tmp_path: Path, raw: bytes | str, problem: str
) -> None:
    with pytest.raises(InvalidExperiment, match=problem) as refused:
        read(tmp_path / "t.csv", raw)
    assert str(refused.value).startswith(f"a.key = '{tmp_path}/t.csv': ") and "\n" not in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("1,5", r"column 'b': '1,5'\. Write decimals with a point, and no other commas\."),
        ("1_0", r"column 'b': '1_0'\. Correct it\."),
        ("x" * 99, rf"column 'b': '{'x' * 40}'\."),
        ("", r"column 'b': ''\."),
        ("nan", r"column 'b': 'nan'\."),
        ("-inf", r"column 'b': '-inf' is not finite in float32\."),
        ("3.5e38", r"column 'b': '3\.5e38' is not finite in float32\."),
    ],
)
def test_a_cell_that_is_no_number_is_named(tmp_path: Path, cell: str, problem: str) -> None:
    (tmp_path / "t.csv").write_text(f"a;b\n1; 2.5 \n3;{cell}\n")
    with CsvTable.open("a.key", tmp_path / "t.csv") as table:
        rows = iter(table)
        assert table.number(next(rows), 1) == 2.5
        with pytest.raises(InvalidExperiment, match=r"has no number in line 3, " + problem):
            table.number(next(rows), 1)


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


@pytest.mark.parametrize(
    ("link", "away", "problem"),
    [
        (
            LINK.replace("9,4,4,50", "9,4,5,4,50"),
            AWAY,
            "lte.csv': has 5 cells in line 3, and 4 columns",
        ),
        (
            "seconds,up_mbit,down_mbit\n0,8,5,16\n",
            AWAY,
            "lte.csv': has 4 cells in line 2, and 3 columns",
        ),
        (
            LINK.replace(",", ";").replace("4;50", "4,5;50"),
            AWAY,
            "line 3, column 'down_mbit': '4,5'. Write decimals",
        ),
        (LINK.replace("9,4", "9,"), AWAY, "has no number in line 3, column 'up_mbit': ''"),
        (
            LINK.replace("delay_ms", "delay"),
            AWAY,
            "has an unknown column 'delay'. Did you mean 'delay_ms'",
        ),
        (
            LINK.replace("9,4", "0,4"),
            AWAY,
            "links.wan.trace.seconds = 0.0: row 2 does not grow, after 0. Sort the",
        ),
        (
            LINK,
            AWAY.replace("90,", "90,x"),
            "away.csv': has no number in line 3, column 'end_s': 'x'",
        ),
        (LINK, AWAY.replace("end_s", "end_s,why"), "has an unknown column 'why'"),
        (LINK, AWAY.replace("90,", "90"), "has 2 cells in line 3, and 3 columns"),
        (
            LINK,
            AWAY.replace("0,40", "50,40"),
            "in line 2, device-0's interval from 50 s ends at 40 s",
        ),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(
    tmp_path: Path, link: str, away: str, problem: str
) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        loaded(tmp_path, link.encode(), away.encode())
    assert problem in str(refused.value)
