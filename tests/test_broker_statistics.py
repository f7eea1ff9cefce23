"""The statistics that a broker publishes about itself, at a parent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.messages import NodeState
from fedstrata.common.protocol.peers import ToChildren
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime.endpoint import DROPPED, HEAP, BrokerStatistics
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.brokers import broker


@pytest.mark.parametrize("open_", [True, False], ids=["open", "forbidden"])
def test_mosquitto_publishes_statistics_where_it_may(tmp_path: Path, open_: bool) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("only mosquitto publishes statistics")
    rules = tmp_path / "acl"
    rules.write_text("topic readwrite fs1/#\n" + "topic read $SYS/broker/#\n" * open_)
    rules.chmod(0o700)

    async def play(address: BrokerAddress) -> None:
        identity = Identity("r-1", "cloud", "cloud", new_session())
        parent = ParentEndpoint(
            address, identity, ToChildren(links={"i0": LinkSettings()}, transfer=TransferSettings())
        )
        values = parent.statistics.values
        async with asyncio.timeout(30):
            serving = asyncio.create_task(parent.run(connect_timeout_s=9))
            await parent.introduced(timeout_s=9)
            while open_ and set(values) != {HEAP, DROPPED}:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
            parent.set_state(NodeState.READY)
            await parent.flush(timeout_s=9)
        serving.cancel()
        await asyncio.wait((serving,))
        assert parent.connection.reconnects == 0 and parent.session.link.refusals.total == 0
        assert (values[HEAP] > 1000 and values[DROPPED] == 0) if open_ else not values

    with broker.start(
        directory=tmp_path, settings={"acl_file": str(rules), "sys_interval": 1}
    ) as served:
        asyncio.run(play(BrokerAddress(served.host, served.port)))


def test_values_that_are_no_numbers_are_dropped() -> None:
    statistics = BrokerStatistics("here:1")
    assert all(statistics.take(HEAP, body) for body in (b"70000", b"much", b"9" * 20))
    assert statistics.values == {HEAP: 70000}
    assert not statistics.take("$SYS/broker/uptime", b"5 seconds")
    assert not statistics.take("fs1/r1/i0/state", b"70000")


@pytest.mark.parametrize(("lost_at", "asked"), [(3.0, False), (3.1, True)])
def test_a_broker_that_closes_soon_after_the_subscription_is_asked_once(
    lost_at: float, asked: bool
) -> None:
    statistics = BrokerStatistics("here:1")
    statistics.disconnected(0.0)
    assert statistics.to_subscribe(1.0)
    statistics.disconnected(lost_at)
    statistics.disconnected(3.2)
    assert bool(statistics.to_subscribe(4.0)) is asked
