"""`fedstrata doctor`: what fedstrata needs of a broker, examined on real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.host.processes import free_port
from deploy.brokers import broker
from deploy.brokers.guard import Guard
from tests.helpers.commands import invoke

TIGHT: Mapping[str, str | int] = {"max_packet_size": 100_000, "max_queued_messages": 3}


def examined(served: broker.BrokerProcess) -> tuple[int, dict[str, dict[str, Any]]]:
    done = invoke("doctor", "--broker", f"{served.host}:{served.port}", "--format", "json")
    return done.exit_code, {row["item"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_mosquitto_has_all_of_it(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path, kind="mosquitto") as served:
        code, found = examined(served)
    assert code == 0 and len(found) == 11 and all(row["there"] for row in found.values())
    assert [item for item, row in found.items() if row["needed"]] == [
        "subscriptions are granted", "messages are delivered", "packets of 33792 bytes",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_embedded_broker_has_what_is_needed(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path, kind="embedded") as served:
        code, found = examined(served)
    assert code == 0 and all(row["there"] for row in found.values() if row["needed"])


@pytest.mark.slow
def test_what_a_tight_broker_lacks_is_named(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path, kind="mosquitto", settings=TIGHT) as served:
        code, found = examined(served)
    assert code == 0 and "65536 bytes pass" in found["packets of 33792 bytes"]["note"]
    assert "of 32 chunks arrived" in found["a slow reader gets everything"]["note"]
    with broker.start(directory=tmp_path, kind="mosquitto", settings={"max_packet_size": 2000}) as served:
        code, found = examined(served)
    assert code == 1 and not found["packets of 33792 bytes"]["there"]


def test_a_broker_that_is_away_or_refuses_the_login(tmp_path: Path) -> None:
    away = invoke("doctor", "--broker", f"127.0.0.1:{free_port()}")
    assert away.exit_code == 3 and "Is it running there?" in away.output
    passwords = tmp_path / "passwords"
    passwords.touch()
    with broker.start(directory=tmp_path, kind="mosquitto", guard=Guard(passwords=passwords)) as served:
        refused = invoke("doctor", "--broker", f"{served.host}:{served.port}")
    assert refused.exit_code == 3 and "Are the login and --broker right?" in refused.output
