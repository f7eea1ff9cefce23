"""Endpoints on real brokers: what a simulated one cannot show of sockets, clients and processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.net import packet_limit
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.endpoint import PACKET_ROOM
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess, Kind
from tests.helpers.broken import broker_killed_in_mid_transfer, connection_broken_in_mid_upload
from tests.helpers.nodes import (
    FINE,
    PARENT,
    Middle,
    assert_models,
    child_of,
    drawn,
    layout_of,
    living,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.sites import PATIENCE_S, RealSite, RestartableBroker, real


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Return a broker of the test's own: what an earlier test left retained would speak for these
    nodes.
    """
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as one:
        yield one


@pytest.fixture
def site(served: BrokerProcess) -> RealSite:
    return RealSite(BrokerAddress(served.host, served.port))


@pytest.fixture(params=["mosquitto", "embedded"])
def breakable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RestartableBroker]:
    kind: Kind = request.param
    if kind == "mosquitto" and broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    one = RestartableBroker(kind, tmp_path)
    yield one
    one.close()


def test_a_model_passes_an_institution_in_both_directions(site: RealSite) -> None:
    async def run() -> None:
        layout, names = layout_of(2_000_000), ["device-0", "device-1"]
        cloud = parent_of(site, [PARENT], layout=layout, name="cloud", transfer=FINE)
        middle = Middle(site, layout, children=names)
        devices = [
            serving(site, child_of(site, name), layout, place) for place, name in enumerate(names)
        ]
        async with together(living(site, cloud), middle.live(), *devices):
            for global_round in range(2):
                row = drawn(layout, global_round)
                assert_models(
                    await play(cloud, row, global_round=global_round),
                    row,
                    layout=layout,
                    places={PARENT: 0},
                )

    real(run())


def test_a_real_broker_that_is_killed_in_mid_transfer_costs_no_chunk_that_had_arrived(
    breakable: RestartableBroker,
) -> None:
    real(
        broker_killed_in_mid_transfer(
            RealSite(breakable.address), kill=breakable.kill, start=breakable.start
        )
    )


@asynccontextmanager
async def after_a_round(
    site: RealSite, model_bytes: int
) -> AsyncIterator[tuple[ParentEndpoint, ChildEndpoint]]:
    """Connect a parent and a child, and play a round of a model of so many bytes."""
    layout = layout_of(model_bytes)
    parent, child = parent_of(site, ["device-0"], layout=layout), child_of(site, "device-0")
    async with together(living(site, parent), serving(site, child, layout, 0)):
        row = drawn(layout, 1)
        for endpoint in (parent, child):  # rounds begin once the children have joined
            await endpoint.introduced(timeout_s=PATIENCE_S)
        assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
        yield parent, child


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"message_size_limit": 300_000}, "drops packets of 500512 bytes and does not report it"),
        ({"retain_available": "false"}, "it retains no messages: who comes late asks"),
    ],
)
def test_a_broker_that_carries_less_is_named_and_serves(
    settings: dict[str, str | int],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr(broker, "_MOSQUITTO", {})  # it would report its limit of packets

    async def run(site: RealSite) -> None:
        async with after_a_round(site, 2_500_000) as (parent, child):
            chunk = (
                250_256 - PACKET_ROOM
                if "message_size_limit" in settings
                else TransferSettings().chunk_bytes
            )
            assert (
                parent.session.link.offers.chunk_most
                == child.session.link.offers.chunk_most
                == chunk
            )
            reconnects = 0 if "message_size_limit" in settings else 1
            assert parent.connection.reconnects == child.connection.reconnects == reconnects

    with broker.start(directory=tmp_path, kind="mosquitto", settings=settings) as served:
        real(run(RealSite(BrokerAddress(served.host, served.port))))
    assert [record.levelname for record in caplog.records if line in record.getMessage()] == [
        "WARNING"
    ]


def test_a_limit_that_stays_unknown_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load the trials of packets stay unanswered: a model of 60 kB must not go inside its
    announcement.
    """
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr(broker, "_MOSQUITTO", {})  # it would report its limit of packets
    monkeypatch.setattr(packet_limit, "_try", lambda *_: packet_limit._NO_ANSWER)

    async def run(site: RealSite) -> None:
        async with after_a_round(site, 60_000) as (parent, _):
            assert parent.session.link.offers.chunk_most == packet_limit.LEAST_BYTES - PACKET_ROOM

    with broker.start(
        directory=tmp_path, kind="mosquitto", settings={"message_size_limit": 50_000}
    ) as served:
        real(run(RealSite(BrokerAddress(served.host, served.port))))


def test_a_child_whose_socket_is_shut_in_mid_upload_goes_on_where_it_was(site: RealSite) -> None:
    def shut(child: Any) -> None:
        child.connection._client._client.socket().shutdown(socket.SHUT_RDWR)

    real(connection_broken_in_mid_upload(site, shut))


def test_a_cancellation_that_came_with_the_connection_is_not_lost(site: RealSite) -> None:
    # Before Python 3.12 asyncio.wait_for, by which the client waits for the broker's answer, may
    # swallow it.
    async def run() -> None:
        connection: Any = child_of(site, "device-0").connection
        make = connection._new_client

        def swallowing() -> aiomqtt.Client:
            client = make()
            enter = client.__aenter__

            class Swallowing:
                def __getattr__(self, name: str) -> Any:
                    return getattr(client, name)

                async def __aenter__(self) -> aiomqtt.Client:
                    await enter()
                    task.cancel()
                    try:
                        await asyncio.sleep(0)
                    except asyncio.CancelledError:
                        pass
                    return client

                async def __aexit__(self, *error: Any) -> None:
                    await client.__aexit__(*error)

            return Swallowing()  # type: ignore[no-any-return]

        connection._new_client = swallowing
        task = asyncio.create_task(connection.run(connect_timeout_s=PATIENCE_S))
        done, _ = await asyncio.wait((task,), timeout=5)
        task.cancel()
        await asyncio.wait((task,))
        assert done, "it went on"

    real(run())


def test_the_keep_alive_is_the_experiments() -> None:
    nowhere = RealSite(BrokerAddress("nowhere"))

    async def run() -> None:
        connection: Any = child_of(
            nowhere, "device-0", transfer=TransferSettings(keepalive_s=7)
        ).connection
        assert connection._new_client()._keepalive == 7

    real(run())
