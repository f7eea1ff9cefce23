"""Tables that fit: on a terminal, in a column of LaTeX, in Markdown; nothing is lost and no number
is broken.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.deploy.console.table_layout import Width, joined, wrapped
from fedstrata.deploy.console.tabular import COLUMN_PT, LATEX, Cell, Column, Spread, Table, show
from tests.helpers.commands import command, invoke

MakeRun = Callable[..., Path]
CROSS = {"cloud": {"aggregation": {"name": "fedcross"}}}
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}
NUMBERS = st.one_of(
    st.none(),
    st.integers(-(10**7), 10**7),
    st.builds(Spread, st.floats(-1e5, 1e5), st.floats(0, 1e4) | st.none()),
)


@st.composite
def drawn(draw: st.DrawFn) -> Table:
    """Draw a table with keys, numbers and texts."""
    count, keys = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    columns = [Column(f"key {i}", text=True) for i in range(keys)]
    cells: list[list[Cell]] = [[f"row {row}" for row in range(count)] for _ in range(keys)]
    for i in range(draw(st.integers(1, 12))):
        words = draw(
            st.lists(
                st.sampled_from(["time", "global", "rounds", "difference,", "paired"]), max_size=4
            )
        )
        text = draw(st.booleans())
        columns.append(Column(" ".join([f"head-{i}", *words]), text=text))
        sentences = st.lists(
            st.sampled_from(["one", "another", "word"]), min_size=1, max_size=12
        ).map(" ".join)
        kind = sentences if text else NUMBERS
        alike = draw(st.booleans())
        cells.append([draw(kind)] * count if alike else [draw(kind) for _ in range(count)])
    return Table("t", "T", columns, [list(row) for row in zip(*cells, strict=True)], keys=keys)


@given(table=drawn(), most=st.integers(60, 140))
def test_lines_are_no_wider_and_nothing_is_lost(table: Table, most: int) -> None:
    text = table.aligned(most)
    assert max(map(len, text.splitlines())) <= most
    layout = table.layout(Width(most))
    shown = {place for section in layout.sections for place in section.places}
    for place, column in enumerate(table.columns):
        cells = [show(row[place], column.digits) for row in table.rows]
        if place not in shown:
            assert f"{column.head}: {cells[0]}" in layout.above and len(set(cells)) == 1
            continue
        for section in layout.sections:
            if place in section.places:
                at = section.places.index(place)
                assert [" ".join(row[at]) for row in section.rows] == cells
                assert column.text or all(len(row[at]) == 1 for row in section.rows), (
                    "no number is broken"
                )
    assert all(
        list(section.places[: table.keys]) == list(range(table.keys)) for section in layout.sections
    )
    places = [
        place for section in layout.sections for place in section.places if place >= table.keys
    ]
    assert places == sorted(set(places)), "each column once, in order"


def test_a_table_that_fits_stays_as_it_is() -> None:
    table = Table(
        "t",
        "T",
        [Column("a", text=True), Column("b"), Column("c")],
        [["x", 1, None], ["y", 1, None]],
    )
    assert table.aligned(80) == table.aligned() == "a  b  c\nx  1  -\ny  1  -\n"
    assert table.aligned(6) == "b: 1\nc: -\n\na\nx\ny\n"
    one = Table("t", "T", [Column("a", text=True), Column("bb"), Column("cc")], [["x", 1, 2]])
    assert one.aligned(6) == "a  bb\nx   1\n\na  cc\nx   2\n", "nothing is constant in one row"


def test_words_are_never_broken() -> None:
    assert wrapped("a bcd efghij k", 5) == ["a bcd", "efghij", "k"] and wrapped("", 5) == [""]
    assert joined(["3 ± 1", "4 ± 2"], "; ", 8) == ["3 ± 1", "4 ± 2"]


def in_terminal(columns: int, words: list[str]) -> str:
    """Return what a command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    done = subprocess.Popen(
        words, stdout=theirs, stderr=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        text += more
    os.close(ours)
    assert done.wait(60) == 0
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    "words", [["compare"], ["compare", "--target", "0.9"], ["runs", "list", "--runs"]]
)
def test_a_terminal_of_80_columns_breaks_no_line(
    tmp_path: Path, make_run: MakeRun, words: list[str]
) -> None:
    for tree in ({}, CROSS, TEMPO):
        for seed in (1, 2, 3):
            make_run(tmp_path, {"seed": seed, "name": "a-name-of-some-length", **tree})
    text = in_terminal(
        80,
        command(*words[:1], *words[1:], tmp_path)
        if words[-1] == "--runs"
        else command(words[0], tmp_path, *words[1:]),
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "" in lines, text
    piped = subprocess.run(
        command(*words, tmp_path)
        if words[-1] == "--runs"
        else command(words[0], tmp_path, *words[1:]),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert max(map(len, piped.splitlines())) > 80 and "" not in piped.splitlines(), (
        "a pipe has one line for a row"
    )


def latex_of(tmp_path: Path, make_run: MakeRun) -> str:
    for place, tree in enumerate(({}, CROSS, TEMPO)):
        for seed in (1, 2, 3):
            make_run(tmp_path, {"seed": seed, **tree}, accuracies=[0.1] * (seed * place) + [0.9])
    return invoke("compare", tmp_path, "--target", "0.9", "--format", "latex").stdout


def test_latex_fits_a_column(tmp_path: Path, make_run: MakeRun) -> None:
    """Compare the estimate with the advance widths of Computer Modern, whose 10 pt matplotlib has."""
    fonts = pytest.importorskip("matplotlib.ft2font")
    path = Path(pytest.importorskip("matplotlib").get_data_path()) / "fonts" / "ttf" / "cmr10.ttf"
    font = fonts.FT2Font(str(path))
    font.set_size(8.5, 72)  # cmr8 is wider than cmr10 at 8 pt
    for text in (
        "FedCross, DA 25",
        "WAN down, MB",
        "57.682",
        "critical path",
        "within the task",
        "MNIST, IID",
    ):
        font.set_text(text)
        assert (
            font.get_width_height()[0] / 64
            <= LATEX.measure(text)
            <= 1.35 * font.get_width_height()[0] / 64 + 4
        )
    latex = latex_of(tmp_path, make_run)
    assert latex.count(r"\begin{tabular}{@{}") > 2, "several below one another"
    for tabular in latex.split(r"\midrule")[1:]:
        for row in tabular.partition(r"\bottomrule")[0].strip().splitlines():
            cells = [
                re.sub(r"[$\\{}]|pm", "", cell) for cell in row.removesuffix(r" \\").split(" & ")
            ]
            assert sum(map(LATEX.measure, cells)) + LATEX.gap * (len(cells) - 1) <= COLUMN_PT


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_has_no_overfull_boxes(tmp_path: Path, make_run: MakeRun) -> None:
    body = latex_of(tmp_path, make_run)
    page = rf"\documentclass[twocolumn]{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "page.tex").write_text(page)
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout
