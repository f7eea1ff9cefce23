"""Rows of a run's tables: what is written is read again, and written again as it was."""

from __future__ import annotations

import csv
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.cloud.global_rounds import LINKS_S
from fedstrata.cloud.node_reports import NodeReports
from fedstrata.cloud.records import (
    DeviceRecord,
    GlobalRoundRecord,
    LinkRecord,
    Record,
    link_records,
    rows_of,
    to_csv,
)
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.common.training.scores import ScoredModels, ScoreSums, packed_sums
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.simulation.hardware import Durations
from tests.helpers.records import BYTES, a_global_round
from tests.simulation.lab import ScenarioLab
from tests.simulation.monitor import endpoints

NAMES: Final = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True)
COUNT: Final = st.integers(0, 10**15)
SECONDS: Final = st.floats(0, 1e9)
ROUNDED: Final = SECONDS.map(lambda seconds: round(seconds, 6))
NUMBER: Final = st.floats(-1e308, 1e308)  # the largest floats would be rounded up to infinity
MAYBE: Final = st.none() | NUMBER


def by_name(values: st.SearchStrategy[Any], names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(dict.fromkeys(names, values))


@st.composite
def global_rounds(draw: st.DrawFn) -> GlobalRoundRecord:
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    some = st.lists(st.sampled_from(names), unique=True).map(tuple) if names else st.just(())
    return draw(
        st.builds(
            GlobalRoundRecord,
            global_round=COUNT,
            elapsed_s=ROUNDED,
            accuracy=MAYBE,
            loss=MAYBE,
            mixed_accuracy=MAYBE,
            mixed_loss=MAYBE,
            train_loss=MAYBE,
            phases=by_name(ROUNDED, list(GLOBAL_PHASES)),
            sgd_steps=COUNT,
            path_steps=COUNT,
            bytes_=by_name(COUNT, list(BYTES)),
            missing=some,
            refused=some,
            epochs=by_name(st.none() | COUNT, names),
            omega=by_name(MAYBE, names),
            spread=by_name(MAYBE, ["cloud", *names]),
            other_scores=st.just({}) | by_name(MAYBE, ["score", "mixed_score"]),
        )
    )


def links() -> st.SearchStrategy[LinkRecord]:
    counts = (
        "payload_bytes",
        "message_bytes",
        "wire_bytes",
        "segments",
        "retransmitted_bytes",
        "retransmitted_segments",
        "probe_bytes",
    )
    numbers = ("overhead_percent", "rtt_ms", "rtt_min_ms", "measured_mbit")
    rest = dict.fromkeys(counts, st.none() | COUNT) | dict.fromkeys(numbers, MAYBE)
    return st.builds(LinkRecord, **dict.fromkeys(("tier", "from_", "to", "kind"), NAMES), **rest)


def devices() -> st.SearchStrategy[DeviceRecord]:
    return st.builds(
        DeviceRecord,
        global_round=COUNT,
        node=NAMES.map(lambda name: f"cloud/{name}"),
        samples=COUNT,
        local_rounds=COUNT,
        epochs=COUNT,
        sgd_steps=COUNT,
        loss=MAYBE,
        train_s=SECONDS,
        wait_s=SECONDS,
        pause_s=SECONDS,
        path=st.sampled_from(TrainingPath),
    )


def again(record: Record) -> Record:
    """Return a record as the text of its row is read."""
    (cells,) = rows_of(to_csv([record], header=True))
    return type(record).read(cells)


def alike(written: Any, read: Any) -> bool:
    """Return whether a value was read again, up to the four digits that the shortest format of a
    number has.
    """
    if isinstance(written, dict):
        return written.keys() == read.keys() and all(
            alike(written[key], read[key]) for key in written
        )
    if isinstance(written, float):
        return bool(read == pytest.approx(written, rel=1e-3, abs=0))
    return bool(written == read)


@given(global_rounds() | links() | devices())
def test_what_is_written_is_read_again(record: Record) -> None:
    found = again(record)
    assert all(alike(getattr(record, name), getattr(found, name)) for name in record.__slots__)
    assert to_csv([found], header=True) == to_csv([record], header=True)
    assert again(found) == found


@pytest.mark.parametrize("row", ["wan,cloud", "wan,cloud,a,b,c"])
def test_a_row_of_another_length_is_refused(row: str) -> None:
    with pytest.raises(csv.Error, match="as many cells"):
        list(rows_of(f"tier,from,to\n{row}\n"))


def test_a_row_is_completed_in_place(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    rows = [a_global_round(number, None, names=["institution-0"]) for number in (1, 2)]
    for row in rows:
        folder.add_round(row)
    complete = [rows[0], a_global_round(2, 0.123456789, names=["institution-0"])]
    folder.complete_round(complete[1])
    assert (folder.path / "rounds.csv").read_bytes().decode() == to_csv(complete, header=True)


def test_devices_that_score_and_nobody_has_trained_are_below_one_header(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({"evaluation": {"at": "devices"}}))
    sums = ScoreSums(10, 5.0, packed_sums([7.0]))
    report = ChildReport("device-0", work=Work(tests=ScoredModels(received=sums)))
    for global_round in (1, 2):
        folder.add_devices(global_round, [])
        folder.score_devices(global_round, [report])
    found = [*rows_of((folder.path / "devices.csv").read_text())]
    columns = ("global_round", "test_samples", "test_loss", "test_score")
    assert [[row[name] for name in columns] for row in found] == [
        ["1", "10", "0.5", "0.7"],
        ["2", "10", "0.5", "0.7"],
    ]


def test_models_that_have_collapsed_are_named(tmp_path: Path) -> None:
    warned = list[tuple[str, object]]()
    reports = NodeReports(
        RunFolder.create(tmp_path, parse({})),
        (),
        observe=lambda event, facts: warned.append((event, facts["reason"])),
    )
    plans = {"institution-0": [{"spread": 9.0}, {"spread": 0.37}], "cloud": [{"spread": 0.38}]}
    assert reports.add_plans(3, plans) == {"institution-0": 0.37, "cloud": 0.38}
    text = (
        "cloud's models differ by 0.38 of their size: if they stay beyond 0.37, they have collapsed"
    )
    assert warned == [("warning", text)]


def test_a_row_is_completed_without_a_look_at_all_rounds_before(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    row = a_global_round(1, None, names=["institution-0"])
    folder.add_round(row)
    path = folder.path / "rounds.csv"
    line = to_csv([row], header=False)
    with path.open("ab") as file:
        for _ in range(100):
            file.write(line.encode() * (200_000 // len(line)))
    folder.add_round(row)
    complete = a_global_round(1, 0.5, names=["institution-0"])
    size = path.stat().st_size
    tracemalloc.start()
    folder.complete_round(complete)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with path.open("rb") as file:
        file.seek(size - len(line.encode()))
        assert file.read().decode() == to_csv([complete], header=False)
    assert peak < 200_000 and size > 19_000_000


def test_links_are_written_every_few_seconds_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The byte ledger, which a resumed run continues, with each checkpoint."""
    written = Counter[str]()

    def counting(name: str) -> Callable[..., Any]:
        write = getattr(RunFolder, name)

        def count(self: RunFolder, ledger: Ledger) -> Any:
            written[name] += 1
            return write(self, ledger)

        return count

    def at_end(lab: ScenarioLab) -> None:
        (path,) = lab.agents.runs.iterdir()
        rows = [LinkRecord.read(row) for row in rows_of((path / "links.csv").read_text())]
        down = next(user.session for user in endpoints(lab, "cloud"))
        assert isinstance(down, ParentSession)
        reports, wire = down.ledger.reports(), down.ledger.broker()
        assert to_csv(rows, header=True) == to_csv(
            link_records(reports, wire, lab.agents.experiment), header=True
        )
        seen.append(path)

    for name in ("write_of_links", "write_of_ledger"):
        monkeypatch.setattr(RunFolder, name, counting(name))
    seen: list[Path] = []
    experiment = parse(
        {"rounds": 40, "topology": {"institutions": 2, "devices": 4}, "links": {"check": "off"}}
    )
    lab = ScenarioLab(experiment, durations=Durations(train_s=0.2), at_end=at_end)
    outcome = lab.run()
    assert outcome.ok and seen
    seconds = float(outcome.rounds[-1]["elapsed_s"])
    assert seconds / LINKS_S - 2 <= written["write_of_links"] <= seconds / LINKS_S + 3 < 15
    assert written["write_of_ledger"] == 41


@pytest.mark.parametrize("direct", [True, False])
def test_a_run_killed_before_its_first_round_is_of_its_kind(tmp_path: Path, direct: bool) -> None:
    folder = RunFolder.create(tmp_path, parse({}), direct=direct)
    assert Run(folder.path).direct is direct
    folder.release()
    assert RunFolder.check(folder.path, direct=direct) == (folder.run, folder.experiment)
