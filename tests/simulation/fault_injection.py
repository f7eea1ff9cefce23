"""Fault injection: for each fault of a random lab a task that causes it, waits, and undoes it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from errno import ENOSPC
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_network import SimulatedLink
from tests.simulation import interference
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.lab import ScenarioLab

STRANGERS: Final = 5  # messages of unknown sessions
LEAVING_S: Final = 30.0  # a terminated node has this long to publish its final state
FLOOD: Final = 200
SUPERVISE_S: Final = 5.0
OLD_S: Final = 1.0  # age of an "old" store when the broker stops
LOOK_S: Final = 0.1
RATES: Final = (3e3, 2e4, 1e5, None)  # bytes per second
CHANGES: Final = 8  # of the rate


async def inject_faults(lab: ScenarioLab, faults: tuple[Fault, ...]) -> None:
    """Inject all faults. Their randomness depends only on the seed and the fault."""
    if any(fault.kind is FaultKind.STRANGER for fault in faults):
        lab.network.hooks.append(interference.Wiretap(lab))
    for fault in faults:
        if fault.permanent and fault.kind is not FaultKind.HANG:
            await _until_trained(lab, lab.homes[fault.node])
    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(_inject(lab, fault), name=str(fault))


async def supervise(lab: ScenarioLab) -> None:
    """Restart nodes that ended with an error during the run, like a service manager."""
    while True:
        await asyncio.sleep(SUPERVISE_S)
        for node in [node for node, error in lab.ended.items() if error and node != CLOUD]:
            if not lab.over:
                lab.record(f"start {node} again: {lab.ended[node]}")
                lab.start(node)


async def _inject(lab: ScenarioLab, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    if not lab.over:
        lab.record(str(fault))
        await _HANDLERS[fault.kind](lab, fault)


async def _until_trained(lab: ScenarioLab, institution: str) -> None:
    """Wait until a device of an institution has trained: before the run begins, an absent device is
    waited for.
    """
    while not any(lab.homes[device] == institution for device, _ in lab.hardware.trained):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def _wait_out(fault: Fault) -> None:
    """Wait until a fault ends: for ever if it is permanent."""
    if fault.permanent:
        await asyncio.get_running_loop().create_future()
    await asyncio.sleep(fault.for_s)


async def _kill(lab: ScenarioLab, fault: Fault) -> None:
    node = fault.node
    if not lab.alive(node):
        return
    process = lab.processes[node]
    if fault.kind is FaultKind.TERMINATE:
        lab.terminate(node)
        try:
            async with asyncio.timeout(LEAVING_S):
                await process.ended.wait()
        except TimeoutError:
            lab.kill(node)
    else:
        lab.kill(node)
    await _wait_out(fault)
    _start(lab, fault)


async def _enter(lab: ScenarioLab, fault: Fault) -> None:
    """Start a device that the experiment does not name; kill and restart it once."""
    lab.start(fault.node, parent=fault.detail)
    await asyncio.sleep(fault.for_s)
    if lab.over or not lab.alive(fault.node):
        return
    lab.kill(fault.node)
    await asyncio.sleep(LOOK_S)
    if not lab.over:
        lab.start(fault.node, parent=fault.detail, keep_files=fault.keep)


async def _visit(lab: ScenarioLab, fault: Fault) -> None:
    """Start a device that the experiment does not name; it leaves for good."""
    lab.start(fault.node, parent=fault.detail)
    await asyncio.sleep(fault.for_s)
    if lab.over or not lab.alive(fault.node):
        return
    if fault.clean:
        lab.terminate(fault.node)
    else:
        lab.kill(fault.node)


def _start(lab: ScenarioLab, fault: Fault) -> None:
    """Start a stopped node again unless it has finished its part in the run."""
    node = fault.node
    if not (lab.over or lab.alive(node) or node in lab.ended):
        lab.start(node, keep_files=fault.keep or node == CLOUD, clock_offset_s=fault.amount)


async def _stop(lab: ScenarioLab, fault: Fault) -> None:
    process = lab.processes.get(fault.node)
    if process is None or not process.alive or process.stopped:
        return
    process.stop()
    await asyncio.sleep(fault.for_s)
    process.continue_(slept_s=fault.for_s if fault.kind is FaultKind.SLEEP else 0.0)


async def _broker(lab: ScenarioLab, fault: Fault) -> None:
    broker = lab.broker(fault.node)
    old = broker.snapshot()
    if fault.detail == "old":
        await asyncio.sleep(OLD_S)
    if not broker.up:
        return
    broker.terminate() if fault.clean else broker.kill()
    await asyncio.sleep(fault.for_s)
    broker.start(
        old if fault.detail == "old" else "current" if fault.detail == "current" else "empty"
    )


async def _link(lab: ScenarioLab, fault: Fault) -> None:
    changes = _CONDITIONS[fault.kind](fault)
    links = [link for (name, _), link in lab.network.links.items() if fault.node in ("", name)]
    before = [(link, {name: getattr(link.conditions, name) for name in changes}) for link in links]
    for link in links:
        link.change(**changes)
    await _wait_out(fault)
    for link, earlier in before:
        _undo(lab, link, earlier)


def _undo(lab: ScenarioLab, link: SimulatedLink, earlier: Mapping[str, Any]) -> None:
    """Restore the link's initial conditions, regardless of other faults' changes meanwhile."""
    name = next(key for key, value in lab.network.links.items() if value is link)[0]
    usual = lab.usual.get(name, lab.network.conditions)
    link.change(**{field: getattr(usual, field) for field in earlier})


async def _rates(lab: ScenarioLab, fault: Fault) -> None:
    rng = lab.random(str(fault))
    for _ in range(CHANGES):
        rate = rng.choice(RATES)
        for link in (
            links := [link for (name, _), link in lab.network.links.items() if name == fault.node]
        ):
            link.change(up_rate=rate, down_rate=rate)
        await asyncio.sleep(fault.for_s / CHANGES)
    for link in links:
        _undo(lab, link, {"up_rate": None, "down_rate": None})


async def _packets(lab: ScenarioLab, fault: Fault) -> None:
    for broker in lab.network.brokers.values():
        broker.packet_limit = int(fault.amount)


async def _unread(lab: ScenarioLab, fault: Fault) -> None:
    """Refuse a node what is sent to it, as a wrong access control list does; all connections begin
    anew with a list.
    """
    for refused in (interference.InboxOf(fault.node), ()):
        for broker in lab.network.brokers.values():
            broker.refused = refused
            for session in list(broker.sessions.values()):
                broker.abort(session)
        if refused:
            await asyncio.sleep(fault.for_s)


async def _clock(lab: ScenarioLab, fault: Fault) -> None:
    if lab.worlds[fault.node]:
        world = lab.worlds[fault.node][-1]
        world.clock_offset_s += fault.amount
        await asyncio.sleep(fault.for_s)
        world.clock_offset_s -= fault.amount


async def _disk(lab: ScenarioLab, fault: Fault) -> None:
    """Let the disk of a node be full: what it writes does not reach it."""
    folder, fsync = lab.files(fault.node), os.fsync

    def full(file: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder):
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        fsync(file)

    with patch("os.fsync", full):
        await asyncio.sleep(fault.for_s)


async def _evaluator(lab: ScenarioLab, fault: Fault) -> None:
    lab.hardware.evaluator_ends += int(fault.amount)


async def _worker(lab: ScenarioLab, fault: Fault) -> None:
    lab.hardware.worker_ends[fault.node] += int(fault.amount)


async def _hang(lab: ScenarioLab, fault: Fault) -> None:
    if not lab.alive(fault.node):
        return
    lab.kill(fault.node)
    lab.hardware.hanging.add(fault.node)
    _start(lab, fault)
    await _wait_out(fault)
    lab.hardware.hanging.discard(fault.node)
    lab.kill_second(fault.node)  # it hangs, too, if it began meanwhile
    if lab.alive(fault.node):
        lab.kill(fault.node)
        _start(lab, fault)


async def _wrong(lab: ScenarioLab, fault: Fault) -> None:
    others = [name for name in lab.institutions if name != lab.homes[fault.node]]
    if lab.alive(fault.node):
        lab.kill(fault.node)
    lab.start(fault.node, parent=others[0] if others else "institution-x")
    await asyncio.sleep(fault.for_s)
    if lab.alive(fault.node):
        lab.kill(fault.node)
    if not lab.over:
        lab.start(fault.node)


async def _second(lab: ScenarioLab, fault: Fault) -> None:
    if lab.alive(fault.node) and not lab.has_second(fault.node):
        lab.start_second(fault.node)


async def _filtered(lab: ScenarioLab, fault: Fault) -> None:
    accepts = _FILTERS[fault.kind](lab, fault)
    lab.network.filters.append(accepts)
    await _wait_out(fault)
    lab.network.filters.remove(accepts)


async def _strangers(lab: ScenarioLab, fault: Fault) -> None:
    (tap,) = (hook for hook in lab.network.hooks if isinstance(hook, interference.Wiretap))
    for number in range(count := STRANGERS + int(fault.amount)):
        if not lab.over:
            interference.send_as_stranger(lab, fault, number, tap if number >= STRANGERS else None)
        await asyncio.sleep(fault.for_s / count)


async def _flood(lab: ScenarioLab, fault: Fault) -> None:
    for number in range(FLOOD):
        interference.flood(lab, fault, number)
        await asyncio.sleep(fault.for_s / FLOOD)


async def _remains(lab: ScenarioLab, fault: Fault) -> None:
    interference.leave_remains(lab, fault)


_HANDLERS: Final[Mapping[FaultKind, Callable[[ScenarioLab, Fault], Awaitable[None]]]] = {
    FaultKind.KILL: _kill,
    FaultKind.TERMINATE: _kill,
    FaultKind.STOP: _stop,
    FaultKind.SLEEP: _stop,
    FaultKind.BROKER: _broker,
    FaultKind.PARTITION: _link,
    FaultKind.LOSS: _link,
    FaultKind.DUPLICATION: _link,
    FaultKind.REORDERING: _link,
    FaultKind.SLOW: _link,
    FaultKind.BLACK_HOLE: _link,
    FaultKind.MUTE: _filtered,
    FaultKind.FLIP: _filtered,
    FaultKind.LIES: _filtered,
    FaultKind.STRANGER: _strangers,
    FaultKind.FLOOD: _flood,
    FaultKind.SEEKERS: _flood,
    FaultKind.HANG: _hang,
    FaultKind.WRONG: _wrong,
    FaultKind.REMAINS: _remains,
    FaultKind.SECOND: _second,
    FaultKind.ENTRY: _enter,
    FaultKind.VISIT: _visit,
    FaultKind.ONE_WAY: _link,
    FaultKind.RATES: _rates,
    FaultKind.PACKETS: _packets,
    FaultKind.UNREAD: _unread,
    FaultKind.CLOCK: _clock,
    FaultKind.DISK: _disk,
    FaultKind.EVALUATOR: _evaluator,
    FaultKind.WORKER: _worker,
}
_FILTERS: Final[Mapping[FaultKind, Callable[[ScenarioLab, Fault], Callable[[Routed], bool]]]] = {
    FaultKind.MUTE: interference.MuteFilter,
    FaultKind.FLIP: interference.Flipper,
    FaultKind.LIES: interference.Liar,
}
_CONDITIONS: Final[Mapping[FaultKind, Callable[[Fault], dict[str, Any]]]] = {
    FaultKind.PARTITION: lambda fault: {"cut": True},
    FaultKind.ONE_WAY: lambda fault: {f"cut_{fault.detail}": True},
    FaultKind.LOSS: lambda fault: {"loss": fault.amount},
    FaultKind.DUPLICATION: lambda fault: {"duplication": fault.amount},
    FaultKind.REORDERING: lambda fault: {"reordering": fault.amount},
    FaultKind.SLOW: lambda fault: {"up_rate": fault.amount, "down_rate": fault.amount},
    FaultKind.BLACK_HOLE: lambda fault: {"mtu_bytes": int(fault.amount)},
}


def set_links(lab: ScenarioLab, unequal: Mapping[str, LinkConditions]) -> None:
    """Set the conditions of single nodes' links to every broker."""
    lab.usual.update(unequal)
    for name, conditions in unequal.items():
        for broker in lab.network.brokers:
            lab.network.link(name, broker).restore(conditions)
