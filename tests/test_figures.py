"""A broker's word on itself, at a parent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.links import Link
from common.net.link import BrokerAddress
from common.node.figures import DROPPED, HEAP, Figures
from common.node.identity import Identity, new_session
from common.node.parent import ParentFace
from common.spec import Transfer
from common.wire.messages import NodeState
from deploy import broker


@pytest.mark.parametrize("open_", [True, False], ids=["open", "forbidden"])
def test_mosquitto_tells_where_it_may(tmp_path: Path, open_: bool) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("only mosquitto tells of itself")
    rules = tmp_path / "acl"
    rules.write_text("topic readwrite fs1/#\n" + "topic read $SYS/broker/#\n" * open_)
    rules.chmod(0o700)

    async def play(address: BrokerAddress) -> None:
        identity = Identity("run-1", "cloud", "cloud", new_session())
        parent = ParentFace(address, identity, links={"i0": Link()}, transfer=Transfer())
        told = parent.figures.told
        async with asyncio.timeout(30):
            serving = asyncio.create_task(parent.endpoint.run(connect_timeout_s=9))
            await parent.endpoint.introduced(timeout_s=9)
            while open_ and set(told) != {HEAP, DROPPED}:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            parent.endpoint.set_state(NodeState.READY)
            await parent.endpoint.flush(timeout_s=9)
        serving.cancel()
        await asyncio.wait((serving,))
        assert parent.endpoint.link.reconnects == 0 and parent.endpoint.ignored == 0
        assert (told[HEAP] > 1000 and told[DROPPED] == 0) if open_ else not told

    with broker.start(directory=tmp_path, settings={"acl_file": str(rules), "sys_interval": 1}) as served:
        asyncio.run(play(BrokerAddress(served.host, served.port)))


def test_nonsense_is_taken_and_forgotten() -> None:
    figures = Figures()
    assert figures.take(HEAP, b"70000") and figures.take(HEAP, b"much") and figures.take(HEAP, b"9" * 20)
    assert figures.told == {HEAP: 70000}
    assert not figures.take("$SYS/broker/uptime", b"5 seconds")
    assert not figures.take("fs1/lab/run-1/i0/state", b"70000")
