"""Labs in virtual time, and what happens to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from math import inf
from typing import Any, Final

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Message
from fedstrata.deploy.simulation.hardware import Workload
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_lab import AgentFactory
from fedstrata.deploy.simulation.simulated_world import SimulatedWorld
from tests.helpers.commands import table
from tests.helpers.direct import events
from tests.simulation.lab import Scenario, ScenarioLab
from tests.simulation.outcome import LabOutcome

IDLE_S: Final = 60.0
MODEL_BYTES: Final = 10_000
TREE: Final[dict[str, Any]] = {
    "name": "scenario",
    "rounds": 2,
    "topology": {"institutions": 2, "devices": 4},
    "institution": {"rounds": 2},
    "links": {"check": "off"},
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768, "keepalive_s": 10, "idle_s": IDLE_S},
}


def lab(
    scenario: Scenario | None = None, *, tree: dict[str, Any] | None = None, **options: Any
) -> LabOutcome:
    return ScenarioLab(
        parse(TREE | (tree or {})),
        scenario=scenario,
        **{"model_bytes": MODEL_BYTES, "time_limit_s": 900.0} | options,
    ).run()


Event = dict[str, Any]
Played = tuple[LabOutcome, list[Event], dict[str, list[dict[str, str]]]]


def played(
    tree: Mapping[str, Any],
    scenario: Scenario | None = None,
    *,
    absent: Sequence[str] = (),
    kind: str = "plan",
    **options: Any,
) -> Played:
    """Run a lab, without `absent` nodes at first; return its outcome, its events of a kind and its
    tables.
    """
    experiment, found, tables = parse(tree), list[Event](), dict[str, list[dict[str, str]]]()

    def at_end(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.extend(events(folder, kind))
        tables.update({name: table(folder / f"{name}.csv") for name in ("devices", "links")})

    there = [name for name in ("cloud", *experiment.tree.nodes) if name not in absent]
    usual = {"seed": 1, "model_bytes": 10_000, "autostart": there, "at_end": at_end}
    return ScenarioLab(experiment, scenario=scenario, **usual | options).run(), found, tables


def completed(tree: Mapping[str, Any], scenario: Scenario | None = None, **options: Any) -> Played:
    """Run a lab, see `played`, which must end well."""
    outcome, *others = played(tree, scenario, **options)
    assert outcome.ok, outcome.result
    return outcome, *others


@cache
def undisturbed() -> LabOutcome:
    """Return the outcome of the lab to which nothing happens."""
    outcome = lab()
    assert outcome.ok, outcome
    return outcome


def survived(
    scenario: Scenario | None = None, *, within_s: float = inf, **options: Any
) -> LabOutcome:
    """Run a lab, whose model must be the undisturbed one, at most so many virtual seconds later."""
    outcome = lab(scenario, **options)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed().digest
    assert outcome.virtual_s < undisturbed().virtual_s + within_s
    return outcome


def quorum(number: int, *, deadline_s: float) -> dict[str, Any]:
    return {"rule": "quorum", "quorum": number, "deadline_s": deadline_s}


def ended_with(outcome: LabOutcome, node: str) -> str:
    assert node in outcome.ended, outcome
    return outcome.ended[node]


def warned(outcome: LabOutcome, *patterns: str) -> None:
    """Check that each pattern is in a line of the log."""
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in outcome.warnings), (
            pattern,
            outcome.warnings,
        )


# What scenarios do


def later(
    *nodes: str, at_s: float, then: Callable[[ScenarioLab, str], object] = ScenarioLab.kill
) -> Scenario:
    """Return the scenario in which something happens to these nodes: they are killed."""

    async def disturb(lab: ScenarioLab) -> None:
        await asyncio.sleep(at_s)
        for node in nodes:
            then(lab, node)

    return disturb


def restarted(node: str, *pauses_s: float, for_s: float = 1.0) -> Scenario:
    """Return the scenario in which a node is killed after each pause, and started again after
    `for_s`.
    """

    async def kill(sim: ScenarioLab) -> None:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            sim.kill(node)
            await asyncio.sleep(for_s)
            sim.start(node)

    return kill


class KilledLab:
    """A lab whose nodes are killed at shares of the time that it takes undisturbed.

    `workload` makes what the nodes compute; without it they add noise to `model_bytes`.
    """

    def __init__(
        self,
        tree: Mapping[str, Any] | Experiment,
        *,
        workload: Callable[[Experiment], Workload] | None = None,
        **options: Any,
    ) -> None:
        self.experiment = tree if isinstance(tree, Experiment) else parse(tree)
        self._workload, self._options = workload, options

    @cached_property
    def undisturbed(self) -> LabOutcome:
        return self.run()

    def run(self, *, ok: bool = True, **options: Any) -> LabOutcome:
        """Run the lab, which must end well if it is to be `ok`."""
        computed = {} if self._workload is None else {"workload": self._workload(self.experiment)}
        outcome = ScenarioLab(self.experiment, seed=1, **computed, **self._options, **options).run()
        assert not ok or outcome.ok, outcome.result
        return outcome

    def assert_same_if_killed(self, node: str, *shares: float) -> None:
        """Check that the model is that of the undisturbed lab if a node is killed, each time after
        such a pause.
        """
        pauses_s = [share * self.undisturbed.virtual_s for share in shares]
        assert self.run(scenario=restarted(node, *pauses_s)).digest == self.undisturbed.digest

    def loses_files(self, node: str, *, share: float) -> LabOutcome:
        """Return the outcome of the lab in which a node is killed and starts again with an empty
        disk.
        """
        pause_s = share * self.undisturbed.virtual_s

        async def kill(sim: ScenarioLab) -> None:
            await asyncio.sleep(pause_s)
            sim.kill(node)
            sim.start(node, keep_files=False)

        return self.run(ok=False, scenario=kill)


def run_of(sim: ScenarioLab) -> str:
    """Return the id of the run whose cloud announced itself last."""
    runs = [topic.split("/")[2] for topic in sim.broker().retained if topic.endswith("/cloud/spec")]
    return runs[-1]


def inbox(sim: ScenarioLab, node: str, sender: str) -> str:
    return topics.inbox(topics.DEFAULT_LAB, run_of(sim), node, sender)


def decoded(body: bytes) -> tuple[str, Message | None]:
    try:
        return serialization.decode(body)
    except Exception:  # noqa: BLE001 - a chunk
        return "", None


def is_for(message: Routed, kind: type[Message], node: str = "") -> bool:
    """Return whether a message of this kind goes to a node, to any without one."""
    receiver, inbox, _ = message.topic.partition("/inbox/")
    return (
        bool(inbox)
        and receiver.endswith(f"/{node}" if node else "")
        and isinstance(decoded(message.body)[1], kind)
    )


class OtherAgents:
    """In place of a lab's factory: the agents that `of` names are made by another one."""

    def __init__(self, sim: ScenarioLab) -> None:
        self.usual = sim.agents
        self.of: dict[str, AgentFactory] = {}
        self.resume = True
        sim.agents = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual, name)

    def new(self, node: str, world: SimulatedWorld, *, resume: bool, **how: Any) -> Any:
        return self.of.get(node, self.usual).new(node, world, resume=resume and self.resume, **how)
