"""Thousands of devices: what a lab may open on this machine, and what a report shows of them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.local import beforehand
from fedstrata.deploy.local.beforehand import FILES_BESIDE, allow_connections
from fedstrata.deploy.results import run_tables
from fedstrata.deploy.results.maps import NODES_MOST, QUANTILES, partition, spaced
from fedstrata.deploy.results.run import Run


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Give this process other limits of open files; return those that are set."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(beforehand.resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(beforehand.resource, "setrlimit", lambda kind, both: raised.append(both))
    return raised


def test_a_lab_raises_the_limit_of_open_files_as_far_as_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised = limits(monkeypatch, 1024, 4096)
    allow_connections(500)
    assert not raised
    allow_connections(3011)
    assert raised == [(3011 + FILES_BESIDE, 4096)]


def test_a_lab_that_cannot_open_its_connections_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits(monkeypatch, 1024, 1024)
    with pytest.raises(
        InvalidExperiment,
        match=r"topology = '3011 nodes': .* needs 3111 open files.*ulimit -Hn 3111",
    ):
        allow_connections(3011)
    limits(monkeypatch, 1024, resource.RLIM_INFINITY)
    allow_connections(3011)


def test_a_report_of_many_devices_has_quantiles_and_no_row_for_each(tmp_path: Path) -> None:
    many = NODES_MOST + 1
    experiment = parse(
        {"topology": {"institutions": 2, "devices": many}, "links": {"check": "off"}}
    )
    folder = RunFolder.create(tmp_path, experiment)
    names = experiment.tree.devices
    folder.add_devices(
        1, [ChildReport(n, Work(20, steps=i, train_s=float(i))) for i, n in enumerate(names)]
    )
    below = experiment.tree.below_each(CLOUD)
    ledger = Ledger(below, Account(), below=below)
    for child, devices in below.items():
        ledger.enter_reports(child, "s", [ChildReport(name) for name in devices])
    folder.write_of_links(ledger)()
    run = Run(folder.path)
    table = run_tables.work(run)
    assert [row[0] for row in table.rows] == list(QUANTILES)
    steps = [column.name for column in table.columns].index("SGD steps")
    assert [row[steps] for row in table.rows] == [
        0.0,
        0.1 * (many - 1),
        0.5 * (many - 1),
        0.9 * (many - 1),
        many - 1.0,
    ]
    assert len(run.links) > 2 * many and "devices.csv" in table.title


def test_a_picture_of_a_split_shows_evenly_spaced_ones_of_many_devices() -> None:
    held = {
        f"device-{i}": {"parent": "institution-0", "by_class": [1, 2]}
        for i in range(10 * NODES_MOST)
    }
    picture = partition({"devices": held, "data": {}, "seed": 1, "digest": "d"})
    assert picture.table is not None and len(picture.table.rows) == NODES_MOST
    assert f"{NODES_MOST} of {len(held)} devices" in picture.text
    assert spaced([1, 2, 3], most=3) == [1, 2, 3] and spaced([1, 2, 3, 4], most=3) == [1, 3]
