"""Links measured before a run: noise each way, counted apart, and an error where a link is not as declared."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidExperiment
from common.links import Link, Links, Way, Ways
from common.net.link import BrokerAddress
from common.protocol.identity import Identity
from common.protocol.messages import NodeState, Probe, Probed
from common.protocol.traffic import Measured
from common.runtime import calibration as probing
from common.runtime.calibration import TOGETHER_BYTES_S, TOGETHER_MOST, Probes, measure_all
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.lifecycle import live
from common.runtime.parent_endpoint import ParentEndpoint
from common.runtime.world import new_session
from common.spec import Closing, Transfer
from deploy import broker
from deploy.broker import Broker

PARENT = "institution-0"
PATIENCE_S = 30.0


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as one:
        yield one


async def nothing() -> None:
    pass


def scenario(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await coroutine

    asyncio.run(bounded())


def parent_of(served: Broker, links: dict[str, Link]) -> ParentEndpoint:
    address = BrokerAddress(served.host, served.port)
    face = ParentEndpoint(
        address, Identity("run-1", PARENT, "institution", new_session()), links=links, transfer=Transfer()
    )
    face.endpoint.set_state(NodeState.READY)
    return face


def child_of(served: Broker, name: str, link: Link) -> ChildEndpoint:
    address, identity = BrokerAddress(served.host, served.port), Identity("run-1", name, "device", new_session())
    face = ChildEndpoint(address, identity, parent=PARENT, transfer=Transfer(), link=link)
    face.endpoint.set_state(NodeState.READY, samples=1)
    return face


def living(face: ParentEndpoint | ChildEndpoint) -> asyncio.Task[Any]:
    forever = asyncio.Event().wait()
    return asyncio.create_task(live([face.endpoint], forever, connect_timeout_s=PATIENCE_S, goodbye=nothing))


def test_each_link_is_measured_both_ways_and_the_noise_counted_apart(served: Broker) -> None:
    async def run() -> None:
        links = {
            "device-0": Link(up_mbit=4.0, down_mbit=8.0),
            "device-1": Link(up_mbit=16.0, down_mbit=16.0),
            "device-2": Link(),
        }
        parent = parent_of(served, links)
        children = [child_of(served, name, link) for name, link in links.items()]
        tasks = [living(face) for face in (parent, *children)]
        try:
            await parent.gather(Closing())
            await parent.measure(Links(check="warn"))
            found = parent.ledger.measured
            assert found.keys() == links.keys()
            for name, link in links.items():  # a bucket lets no more through; how much less is the machine's affair
                for carried, declared in ((found[name].up, link.up.rate), (found[name].down, link.down.rate)):
                    assert 0 < carried <= 1.1 * (declared or 1e12)
                assert min(found[name].up_bytes, found[name].down_bytes) > 60_000
                traffic = parent.endpoint.account.traffic(name)
                assert traffic.sent_model_payload == traffic.received_model_payload == 0
                assert traffic.sent_control_payload > 0
            for child in children:
                child.probes.end()
                assert not child.endpoint.outgoing.serving(PARENT)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    scenario(run())


class Told:
    """Stands in for an endpoint's probes: it knows the answers."""

    def __init__(self, answers: dict[str, Measured | Exception]) -> None:
        self._answers = answers

    async def measure(self, peer: str) -> Measured:
        answer = self._answers[peer]
        if isinstance(answer, Exception):
            raise answer
        return answer


WAYS = Ways(to={"a": Way(1e6), "b": Way()}, from_={"a": Way(5e5), "b": Way()}, shaped=True)


def measure(links: Links, **answers: Measured | Exception) -> dict[str, Measured]:
    told: Any = Told(answers)
    return asyncio.run(measure_all(told, WAYS, links, answers))


def test_a_link_that_is_off_its_declaration_is_an_error_that_says_by_how_much() -> None:
    with pytest.raises(InvalidExperiment, match=r"a\.down_mbit.*8\.0.*carries 4 Mbit/s, -50 %.*links\.tolerance"):
        measure(Links(), a=Measured(5e5, 5e5), b=Measured(1.0, 1.0))
    with pytest.raises(InvalidExperiment, match=r"a\.up_mbit.*\+20 %"):
        measure(Links(), a=Measured(6e5, 1e6))


def test_a_link_may_be_off_where_that_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    off = Measured(5e5, 7e5)
    assert measure(Links(tolerance=0.35), a=off) == {"a": off}
    assert not caplog.records
    assert measure(Links(check="warn"), a=off) == {"a": off}
    assert "-30 %" in caplog.text
    assert measure(Links(check="off"), a=off) == {}


def test_a_link_that_nobody_declared_may_carry_anything() -> None:
    assert measure(Links(), b=Measured(1.0, 0.0)) == {"b": Measured(1.0, 0.0)}


def test_a_child_that_does_not_answer_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert measure(Links(), a=TimeoutError(), b=Measured(1.0, 1.0)).keys() == {"b"}
    assert "link of a" in caplog.text
    with pytest.raises(ZeroDivisionError):
        measure(Links(), a=ZeroDivisionError())


@given(st.lists(st.one_of(st.none(), st.floats(1e3, 1e9)), min_size=1, max_size=30))
def test_links_are_measured_in_groups_that_a_broker_can_carry(rates: list[float | None]) -> None:
    ways = {f"device-{i}": Way(rate) for i, rate in enumerate(rates)}
    groups = probing._groups(Ways(to=ways, from_=ways, shaped=True), ways)
    assert [peer for group in groups for peer in group] == list(ways)
    for group in groups:
        assert 1 <= len(group) <= TOGETHER_MOST
        assert len(group) == 1 or sum(ways[peer].rate or 0 for peer in group) <= TOGETHER_BYTES_S


def test_probes_of_foreign_rounds_and_too_large_noise_are_ignored(served: Broker) -> None:
    async def run() -> None:
        child = child_of(served, "device-9", Link())
        probes: Probes = child.probes
        noise = probes._offer(PARENT)
        huge = Probe(replace(noise, codec="fp32"))
        probes.receive(PARENT, huge)
        answering = probes._answering
        assert answering is not None
        await answering
        assert probes._answer is None and not child.endpoint.incoming.wanted()
        probes.receive(PARENT, Probed("f" * 16, 1.0, noise))  # nobody asked
        child.endpoint.retire(noise.blob)

    scenario(run())
