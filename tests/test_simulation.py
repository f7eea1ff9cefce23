"""Labs in virtual time: they end, repeat bit for bit, and survive what happens to them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from fedstrata.cloud.cloud_agent import STATUS_S
from fedstrata.common.errors import FedstrataError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.net.bulk import Body
from fedstrata.common.net.connection import Handlers
from fedstrata.common.runtime.world import Connection
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.hardware import Durations
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.deploy.simulation.simulated_machines import SimulatedProcess
from fedstrata.deploy.simulation.simulated_world import SimulatedWorld
from fedstrata.deploy.simulation.virtual_loop import (
    START_S,
    Deadlock,
    Livelock,
    TimeLimit,
    VirtualLoop,
)
from tests.helpers.scenarios import TREE, lab, survived, undisturbed
from tests.helpers.sites import SimulatedSite, forever, virtual
from tests.simulation.fault_injection import inject_faults
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.lab import ScenarioLab


def small(**changes: Any) -> Experiment:
    return parse(TREE | changes)


# Whole labs


def test_an_undisturbed_lab_ends() -> None:
    assert set(undisturbed().ended.values()) == {""} and len(undisturbed().ended) == 7
    assert undisturbed().trainings == 2 * 2 * 4
    assert [row["global_round"] for row in undisturbed().rounds] == ["1", "2"]
    assert 2 * 2 * 1.0 < undisturbed().virtual_s < 60
    assert undisturbed().warnings == ()


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"seed": 2, "executor_delay_s": 0.2, "durations": Durations(train_s=20.0, spread=2.0)},
        {
            "seed": 3,
            "broker_each": True,
            "conditions": LinkConditions(up_rate=1e5, down_rate=2e5, delay_s=0.05),
        },
        {
            "seed": 4,
            "spool": False,
            "conditions": LinkConditions(loss=0.1, duplication=0.1, reordering=0.1),
        },
    ],
    ids=["seed", "slow devices and threads", "slow links, a broker each", "losses"],
)
def test_the_model_does_not_depend_on_time(options: Mapping[str, Any]) -> None:
    outcome = survived(**options)
    assert outcome.trace != undisturbed().trace


def test_a_cloud_shows_its_status_twice_a_second_until_its_run_ends() -> None:
    shown: list[tuple[float, dict[str, Any]]] = []

    def observe(event: str, facts: dict[str, Any]) -> None:
        if event == "status":
            shown.append((sim.loop.time(), facts))

    sim = ScenarioLab(small(), observe=observe)
    outcome = sim.run()
    assert outcome.ok, outcome
    times = [at for at, _ in shown]
    assert all(after - before == pytest.approx(STATUS_S) for before, after in pairwise(times))
    assert times[-1] - times[0] > outcome.virtual_s - 3 * STATUS_S
    done = [facts["run"]["closed"] for _, facts in shown if facts["run"]]
    assert done == sorted(done) and len({*done}) == small().rounds


STORM: Final = (
    *(
        Fault(kind, 0.0, 60.0, "institution-0", 0.1)
        for kind in (FaultKind.LOSS, FaultKind.DUPLICATION)
    ),
    Fault(FaultKind.REORDERING, 0.0, 60.0, "institution-1", 0.1),
    *(
        Fault(FaultKind.KILL, 2.0 + place, 0.5, node)
        for place, node in enumerate(("device-1", CLOUD, "institution-1"))
    ),
    Fault(FaultKind.STOP, 6.0, 12.0, "device-2"),
)


def stormy(seed: int) -> str:
    outcome = lab(lambda sim: inject_faults(sim, STORM), seed=seed, executor_delay_s=0.1)
    return (
        f"{outcome.result} {outcome.digest} {outcome.trace} {outcome.virtual_s!r} "
        f"{outcome.faults} {outcome.errors}"
    )


def test_a_seed_gives_the_same_in_every_process() -> None:
    here = stormy(5)
    other = os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, __file__, "5"], env=other, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == here and here.startswith("ok")


# Links and connections


class Pair(SimulatedSite):
    """Clients on one broker."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: dict[str, Connection] = {}
        self.processes: dict[str, SimulatedProcess] = {}
        self.got: dict[str, list[tuple[float, str, bytes]]] = {}

    async def client(self, name: str, *filters: str) -> Connection:
        """Return a connected client, which has subscribed."""
        world = SimulatedWorld(self.network, name)
        got = self.got[name] = []
        connected = asyncio.Event()

        async def main() -> None:
            async def subscribe() -> None:
                self.connections[name].subscribe(list(filters), qos=1)
                connected.set()

            self.connections[name] = connection = world.connection(
                self.address,
                Handlers(
                    lambda topic, body, retained: got.append((self.loop.time(), topic, body)),
                    subscribe,
                ),
                client_id=name,
                keepalive_s=10,
                will=(f"will/{name}", b"gone"),
            )
            await connection.run(connect_timeout_s=5.0)

        world.process = self.processes[name] = SimulatedProcess(self.loop, name, main)
        await connected.wait()
        await self.connections[name].flush()
        return self.connections[name]


paired = functools.partial(virtual, make=Pair)


@pytest.mark.parametrize("direction", ["up", "down"])
@paired
async def test_a_link_takes_its_bytes_by_its_rate(pair: Pair, direction: str) -> None:
    rate, delay_s, count, topic = 1e5, 0.05, 50, "t"
    link = pair.link("sender" if direction == "up" else "receiver")
    sender, receiver = await pair.client("sender"), await pair.client("receiver", topic)
    before = receiver.meter.sample().received
    link.change(**{f"{direction}_rate": rate, "delay_s": delay_s})
    start = pair.loop.time()
    for number in range(count):
        sender.publish_body(
            topic, Body(memoryview(number.to_bytes(2) + bytes(9998))), done=lambda: None
        )
    await asyncio.sleep(60)
    times = [at - start for at, _, _ in pair.got["receiver"]]
    packet = 1 + 2 + 2 + len(topic) + 10_000
    expected = [number * packet / rate + delay_s + 0.0005 for number in range(1, count + 1)]
    assert times == pytest.approx(expected, rel=1e-3)
    assert times[-1] == pytest.approx(expected[-1], rel=1e-6)
    assert [body[:2] for _, _, body in pair.got["receiver"]] == [
        number.to_bytes(2) for number in range(count)
    ]
    assert receiver.meter.sample().received - before == count * packet


@paired
async def test_a_new_rate_holds_from_the_present_byte_on(pair: Pair) -> None:
    sender, receiver = await pair.client("sender"), await pair.client("receiver", "t")
    link = pair.link("receiver")
    link.change(down_rate=1000.0, delay_s=0.0)
    pair.link("sender").change(delay_s=0.0)
    start, before = pair.loop.time(), receiver.meter.received()
    sender.publish("t", bytes(10_000 - 6), qos=0)
    await asyncio.sleep(4)
    assert receiver.meter.received() - before == 4000
    link.change(cut=True)
    await asyncio.sleep(3)
    link.change(cut=False, down_rate=3000.0)
    await asyncio.sleep(10)
    assert [at - start for at, _, _ in pair.got["receiver"]] == pytest.approx([4 + 3 + 2])


@paired
async def test_received_bytes_never_fall(pair: Pair) -> None:
    sender, receiver = await pair.client("sender"), await pair.client("receiver", "t")
    pair.link("receiver").change(down_rate=1000.0, delay_s=0.5, duplication=0.5)
    before = receiver.meter.received()
    for _ in range(10):
        sender.publish("t", bytes(1000 - 6), qos=0)
    counts = []
    while len(counts) < 200:
        await asyncio.sleep(0.1)
        counts.append(receiver.meter.received() - before)
    assert counts == sorted(counts)
    # it flows, and a copy comes at once
    assert max(b - a for a, b in itertools.pairwise(counts[:100])) <= 1100
    assert counts[-1] == 1000 * len(pair.got["receiver"]) > 10_000


@paired
async def test_an_order_stays_when_the_delay_shrinks(pair: Pair) -> None:
    sender = await pair.client("sender")
    await pair.client("receiver", "t")
    pair.link("receiver").change(delay_s=5.0)
    sender.publish("t", b"1", qos=1)
    await asyncio.sleep(1)
    pair.link("receiver").change(delay_s=0.1)
    sender.publish("t", b"2", qos=1)
    await asyncio.sleep(10)
    assert [body for _, _, body in pair.got["receiver"]] == [b"1", b"2"]


@paired
async def test_loss_duplication_and_reordering(pair: Pair) -> None:
    sender = await pair.client("sender")
    await pair.client("receiver", "t/#")
    link = pair.link("sender")

    async def sent(qos: int, **conditions: float) -> list[int]:
        pair.got["receiver"].clear()
        link.change(loss=0.0, duplication=0.0, reordering=0.0)
        link.change(**conditions)
        for number in range(1000):
            sender.publish("t", number.to_bytes(2), qos=qos)
        await asyncio.sleep(10)
        return [int.from_bytes(body) for _, _, body in pair.got["receiver"]]

    assert 600 < len(await sent(0, loss=0.3)) < 800
    assert await sent(1, loss=0.3, reordering=0.3) == list(range(1000))
    assert 1200 < len(await sent(1, duplication=0.3)) < 1400
    mixed = await sent(0, reordering=0.3)
    assert sorted(mixed) == list(range(1000)) != mixed


@paired
async def test_a_packet_that_is_too_large_for_the_path_blocks_it(pair: Pair) -> None:
    sender = await pair.client("sender")
    await pair.client("receiver", "t", "will/#")
    pair.link("sender").change(mtu_bytes=1000)
    for size in (100, 2000, 200):
        sender.publish("t", bytes(size), qos=1)
    await asyncio.sleep(30)
    assert [(topic, len(body)) for _, topic, body in pair.got["receiver"]] == [
        ("t", 100),
        ("will/sender", 4),
    ]
    assert sender.up and sender.reconnects == 1
    sender.publish("t", bytes(300), qos=1)
    await asyncio.sleep(1)
    assert len(pair.got["receiver"][-1][2]) == 300


@paired
async def test_no_byte_of_a_packet_that_is_too_large_is_received(pair: Pair) -> None:
    sender, receiver = await pair.client("sender"), await pair.client("receiver", "t")
    pair.link("receiver").change(mtu_bytes=1000, down_rate=1000.0)
    before = receiver.meter.received()
    for size in (1994, 94):
        sender.publish("t", bytes(size), qos=0)
    for _ in range(5):
        await asyncio.sleep(1)
        assert receiver.meter.received() == before


@paired
async def test_a_partition_ends_connections_by_their_keep_alive(pair: Pair) -> None:
    sender = await pair.client("sender")
    await pair.client("receiver", "t", "will/#")
    link, start = pair.link("sender"), pair.loop.time()
    link.change(cut=True)
    sender.publish("t", b"before it heals", qos=1)
    await asyncio.sleep(3)
    link.change(cut=False)
    await asyncio.sleep(1)
    assert [body for _, _, body in pair.got["receiver"]] == [
        b"before it heals"
    ] and sender.reconnects == 0
    link.change(cut=True)
    await asyncio.sleep(25)
    assert not sender.up
    link.change(cut=False)
    await asyncio.sleep(20)
    assert sender.up
    at, topic, _ = pair.got["receiver"][1]
    assert topic == "will/sender" and 5 <= at - start - 4 <= 15 + 0.01


@pytest.mark.parametrize("direction", ["up", "down"])
@paired
async def test_a_link_that_is_cut_in_one_direction(pair: Pair, direction: str) -> None:
    node, other = (
        await pair.client("node", "to node"),
        await pair.client("other", "from node", "will/#"),
    )
    pair.link("node").change(**{f"cut_{direction}": True})
    node.publish("from node", b"up", qos=0)
    other.publish("to node", b"down", qos=0)
    await asyncio.sleep(3)
    assert len(pair.got["node"]) == (direction == "up") and len(pair.got["other"]) == (
        direction == "down"
    )
    await asyncio.sleep(22)
    assert not node.up  # no answer to its pings
    assert "will/node" in [topic for _, topic, _ in pair.got["other"]]


@paired
async def test_what_signals_do_to_a_process(pair: Pair) -> None:
    sender = await pair.client("sender")
    receiver = await pair.client("receiver", "t", "will/#")
    process = pair.processes["receiver"]
    process.stop()
    sender.publish("t", b"while stopped", qos=1)
    await asyncio.sleep(3)
    assert pair.got["receiver"] == []
    process.continue_()
    await asyncio.sleep(0.1)
    assert [body for _, _, body in pair.got["receiver"]] == [b"while stopped"]
    process.stop()
    await asyncio.sleep(16)
    assert (
        "receiver" not in pair.broker.sessions
        and pair.broker.retained["will/receiver"].body == b"gone"
    )
    assert receiver.up  # it does not know
    process.continue_()
    await asyncio.sleep(6)
    assert receiver.reconnects == 1 and "receiver" in pair.broker.sessions
    pair.processes["sender"].kill()
    await asyncio.sleep(0.1)
    assert (
        pair.got["receiver"][-1][1:] == ("will/sender", b"gone")
        and not pair.processes["sender"].alive
    )
    before = pair.broker.messages
    process.terminate()
    await process.ended.wait()
    await asyncio.sleep(1)
    assert pair.broker.messages == before and pair.broker.sessions == {}  # a clean end has no will


@paired
async def test_a_broker_that_does_not_come_is_an_error(pair: Pair) -> None:
    pair.broker.kill()
    world, failures = SimulatedWorld(pair.network, "late"), list[FedstrataError]()

    async def main() -> None:
        handlers = Handlers(lambda topic, body, retained: None, forever)
        connection = world.connection(pair.address, handlers, client_id="late", keepalive_s=10)
        try:
            await connection.run(connect_timeout_s=5.0)
        except FedstrataError as error:
            failures.append(error)

    world.process = pair.processes["late"] = SimulatedProcess(pair.loop, "late", main)
    await pair.processes["late"].ended.wait()
    assert "connection refused" in str(failures[0])


# The event loop


def in_virtual_time(main: Callable[[], Awaitable[Any]], **options: Any) -> VirtualLoop:
    loop = VirtualLoop(**options)
    loop.time_limit = START_S + 100
    try:
        loop.run_until_complete(main())
    finally:
        loop.discard()
    return loop


def test_time_jumps_and_timers_of_one_instant_keep_their_order() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_at(START_S + 7.1, order.append, number)
        await asyncio.sleep(50)
        assert loop.time() == START_S + 50

    assert in_virtual_time(main).crept_s == 0
    assert order == list(range(20))


@pytest.mark.parametrize(
    ("error", "seconds"), [(Deadlock, None), (Livelock, 0.0), (TimeLimit, 30.0)]
)
def test_a_loop_that_cannot_go_on_raises(error: type[Exception], seconds: float | None) -> None:
    async def main() -> None:
        while True:
            if seconds is None:
                await asyncio.get_running_loop().create_future()
            else:
                await asyncio.sleep(seconds)

    with pytest.raises(error):
        in_virtual_time(main)


def test_the_clock_of_a_process_stands_still_while_its_host_sleeps() -> None:
    ended: list[tuple[float, float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def wait(seconds: float, name: str) -> None:
            begun = loop.time()
            await asyncio.sleep(seconds)
            ended.append((loop.now - START_S, loop.time() - begun, name))

        async def works() -> None:
            await asyncio.gather(wait(3.0, "due meanwhile"), wait(20.0, "due later"))

        for slept_s in (10.0, 0.0):
            process = SimulatedProcess(loop, "node", works)
            await asyncio.sleep(1.0)
            process.stop()
            await asyncio.sleep(10.0)
            process.continue_(slept_s=slept_s)
            await process.ended.wait()

    in_virtual_time(main)
    assert ended[:2] == [(13.0, 3.0, "due meanwhile"), (30.0, 20.0, "due later")]
    assert ended[2:] == [(41.0, 11.0, "due meanwhile"), (50.0, 20.0, "due later")]


def test_work_for_executors_ends_late_and_keeps_its_errors() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(20):
            assert await loop.run_in_executor(None, lambda: 7) == 7
            with pytest.raises(ZeroDivisionError):
                await loop.run_in_executor(None, lambda: 1 / 0)
        assert loop.time() > START_S

    in_virtual_time(main, executor_delay_s=0.5)


if __name__ == "__main__":
    print(stormy(int(sys.argv[1])))
