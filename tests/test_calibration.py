"""Links measured before a run: noise each way, counted apart, and an error where a link is not as
declared.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.accounting.traffic import Measured
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol.messages import Probe, Probed
from fedstrata.common.runtime import calibration
from fedstrata.common.runtime.calibration import (
    TOGETHER_BYTES_S,
    TOGETHER_MOST,
    UNDECLARED,
    Probes,
    measure_all,
)
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.world import REAL
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkDirection, Links, LinkSet, LinkSettings
from tests.helpers.nodes import PARENT, child_of, layout_of, living, parent_of, together
from tests.helpers.sites import SimulatedSite, virtual


@virtual
async def test_each_link_is_measured_both_ways_and_the_noise_counted_apart(
    site: SimulatedSite,
) -> None:
    links = {
        "device-0": LinkSettings(up_mbit=4.0, down_mbit=8.0),
        "device-1": LinkSettings(up_mbit=16.0, down_mbit=16.0),
        "device-2": LinkSettings(),
    }
    parent = parent_of(site, list(links), layout=layout_of(4000), links=links)
    children = [child_of(site, name, link=link) for name, link in links.items()]
    async with together(living(site, parent), *(living(site, child) for child in children)):
        await parent.gather(Closing())
        await parent.measure(Links(check="warn"))
        found = parent.ledger.measured
        assert found.keys() == links.keys()
        for name, link in links.items():
            for carried, declared in (
                (found[name].up, link.up.rate),
                (found[name].down, link.down.rate),
            ):
                assert carried > 1e6 if declared is None else abs(carried / declared - 1) < 0.05
            assert min(found[name].up_bytes, found[name].down_bytes) > 60_000
            traffic = parent.session.link.counters.traffic(name)
            assert traffic.sent_model_payload == traffic.received_model_payload == 0
            assert traffic.sent_control_payload > 0
        for child in children:
            child.probes.end()
            assert not child.session.link.sender.serving(PARENT)


@virtual
async def test_a_link_that_carries_less_than_declared_ends_the_run_with_both_numbers(
    site: SimulatedSite,
) -> None:
    link = LinkSettings(up_mbit=8.0, down_mbit=8.0)
    parent = parent_of(site, ["device-0"], layout=layout_of(4000), link=link)
    site.link("device-0").change(down_rate=5e5)
    async with together(living(site, parent), living(site, child_of(site, "device-0", link=link))):
        await parent.gather(Closing())
        with pytest.raises(
            InvalidExperiment, match=r"device-0\.down_mbit.*8\.0.*carries (3\.\d+|4) Mbit/s"
        ):
            await parent.measure(Links(check="error"))


@virtual
async def test_a_child_that_is_killed_while_its_link_is_measured_is_left_out(
    site: SimulatedSite,
) -> None:
    links = {"device-0": LinkSettings(), "device-1": LinkSettings()}
    parent = parent_of(
        site, list(links), layout=layout_of(4000), transfer=TransferSettings(idle_s=30.0)
    )
    children = [child_of(site, name) for name in links]
    async with together(living(site, parent), *(living(site, child) for child in children)):
        await parent.gather(Closing())
        site.kill(children[0])
        begun = parent.now()
        await parent.measure(Links(check="warn"))
        assert parent.ledger.measured.keys() == {"device-1"} and parent.now() - begun < 10


@pytest.mark.parametrize(
    "link", [LinkSettings(), LinkSettings(up_mbit=16.0, down_mbit=16.0)], ids=["none", "declared"]
)
@pytest.mark.parametrize("slow", ["down", "up", "both"])
@virtual
async def test_a_link_slower_than_declared_is_measured_with_little_noise(
    site: SimulatedSite, slow: str, link: LinkSettings
) -> None:
    names = ["device-0", "device-1"]
    parent = parent_of(site, names, layout=layout_of(4000), link=link)
    site.link("device-0").change(
        **{f"{way}_rate": 5e4 for way in ("down", "up") if slow in (way, "both")}
    )
    children = [child_of(site, name, link=link) for name in names]
    async with together(living(site, parent), *(living(site, child) for child in children)):
        await parent.gather(Closing())
        await parent.measure(Links(check="warn"))
        found, other = (parent.ledger.measured[name] for name in names)
        rate = found.down if slow == "down" else found.up
        assert abs(rate / 5e4 - 1) < 0.1
        assert max(found.up_bytes, found.down_bytes) < 80_000
        assert min(other.up_bytes, other.down_bytes) > 500_000


class Exchanges(Probes):
    """Probes of a link that carries more the longer an exchange lasts; notes what each asks for."""

    def __init__(self, endpoint: ParentEndpoint, *rates: float) -> None:
        super().__init__(endpoint, REAL)
        self.asked: list[float] = []
        self._rates = list(rates)

    async def _exchange(self, peer: str, rate: float) -> Measured:
        self.asked.append(rate)
        carried = self._rates.pop(0)
        return Measured(carried, carried)


@pytest.mark.parametrize(
    ("mbit", "carried", "asked"),
    [
        (1.0, [120e3], [125e3]),
        (20.0, [1e6, 2.4e6], [256e3, 2.5e6]),
        (100.0, [1e6, 8e6, 12.4e6], [256e3, 2.56e6, 12.5e6]),
        (1000.0, [1e6, 8e6, 60e6, 120e6], [256e3, 2.56e6, 25.6e6, 125e6]),
        (100.0, [60e3], [256e3]),
        (100.0, [70e3, 600e3], [256e3, 2.56e6]),
    ],
)
@virtual
async def test_an_exchange_is_followed_by_a_longer_one_while_the_link_carries_it(
    site: SimulatedSite, mbit: float, carried: list[float], asked: list[float]
) -> None:
    link = LinkSettings(up_mbit=mbit, down_mbit=mbit)
    probes = Exchanges(parent_of(site, ["device-0"], layout=layout_of(4000), link=link), *carried)
    assert await probes.measure("device-0") == Measured(carried[-1], carried[-1])
    assert probes.asked == asked


class KnownProbes:
    """An endpoint's probes whose answers are known."""

    def __init__(self, answers: dict[str, Measured | Exception]) -> None:
        self._answers = answers

    async def measure(self, peer: str) -> Measured:
        answer = self._answers[peer]
        if isinstance(answer, Exception):
            raise answer
        return answer


WAYS = LinkSet(
    to={"a": LinkDirection(1e6), "b": LinkDirection()},
    from_={"a": LinkDirection(5e5), "b": LinkDirection()},
    shaped=True,
)


def measure(links: Links, **answers: Measured | Exception) -> dict[str, Measured]:
    known: Any = KnownProbes(answers)
    return asyncio.run(measure_all(known, WAYS, links, answers))


def test_a_link_that_is_off_its_declaration_is_an_error_with_the_difference() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"a\.down_mbit.*8\.0.*carries 4 Mbit/s, -50 %.*links\.tolerance"
    ):
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
    ways = {f"device-{i}": LinkDirection(rate) for i, rate in enumerate(rates)}
    groups = calibration._groups(LinkSet(to=ways, from_=ways, shaped=True), ways)
    assert [peer for group in groups for peer in group] == list(ways)
    for group in groups:
        assert 1 <= len(group) <= TOGETHER_MOST
        assert len(group) == 1 or sum(ways[peer].rate or 0 for peer in group) <= TOGETHER_BYTES_S


@virtual
async def test_an_answer_to_no_probe_and_noise_of_another_codec_are_ignored(
    site: SimulatedSite,
) -> None:
    child = child_of(site, "device-9")
    probes = child.probes
    noise = probes._offer(PARENT, UNDECLARED)
    other = Probe(replace(noise, codec="fp32"))
    probes.receive(PARENT, other)
    answering = probes._answering
    assert answering is not None
    await answering
    assert probes._answer is None and not child.session.link.receiver.wanted()
    probes.receive(PARENT, Probed("f" * 16, 1.0, noise))  # nobody asked
    child.retire(noise.blob)
