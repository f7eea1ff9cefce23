"""Choice of the run to watch among the announcements that a broker retains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from common.errors import InvalidExperiment, WireError
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.protocol import serialization, topics
from common.protocol.messages import Announcement, NodeState, Presence

SETTLE_S: Final = 0.5  # retained messages arrive at once, but in any order
DEVICES_MOST: Final = 100_000
HELD_MOST: Final = 64_000_000  # characters
NAMES_COST: Final = 200  # of each, for the names of its run and its node
ALIVE: Final = (NodeState.INIT, NodeState.READY)


@dataclass(slots=True)
class _Run:
    announced: dict[str, str] = field(default_factory=dict)  # the experiment's text, by the announcing node
    alive: dict[str, str] = field(default_factory=dict)


class Runs:
    """The runs of one lab, from the announcements on its brokers. Sans-IO.

    `wanted`: the id of a run, active or ended; None for the newest active run.
    """

    def __init__(self, wanted: str | None, *, lab: str = topics.DEFAULT_LAB) -> None:
        self.lab: Final = lab
        self._wanted = wanted
        self._runs: dict[str, _Run] = {}
        self._held = 0
        self._settled_at: float | None = None
        self.ignored = 0

    def receive(self, topic: topics.Topic, body: bytes, now: float) -> None:
        """Process an announcement or a presence. Malformed messages are counted in `ignored`."""
        try:
            self._take(topic, body)
        except WireError:
            self.ignored += 1
        if self._settled_at is None and self._candidates():
            self._settled_at = now + SETTLE_S

    def choose(self, now: float) -> tuple[str, Experiment] | None:
        """Return the id and the experiment of the run to watch, or None so far.

        The run has a valid experiment, and a node that announced it is alive. Of several runs the one with the greatest
        id is the newest: ids begin with the start time.
        """
        if self._settled_at is None or now < self._settled_at:
            return None
        for name in self._candidates():
            announced = self._runs[name].announced
            for node in sorted(announced, key=lambda node: node != CLOUD):
                try:
                    return name, _read(announced[node])
                except InvalidExperiment:
                    self.ignored += 1
                    self._held -= _cost(announced.pop(node))
        self._settled_at = None
        return None

    def names(self) -> list[str]:
        """Return the ids of all announced runs, newest first."""
        return sorted((name for name, run in self._runs.items() if run.announced), reverse=True)

    def _candidates(self) -> list[str]:
        if self._wanted is not None:
            return [name for name in self.names() if name == self._wanted]
        return [name for name in self.names() if self._runs[name].announced.keys() & self._runs[name].alive.keys()]

    def _take(self, topic: topics.Topic, body: bytes) -> None:
        if topic.lab != self.lab or not isinstance(topic, (topics.SpecTopic, topics.StateTopic)):
            raise WireError("not an announcement of this lab")
        message = serialization.decode(body)[1] if body else None
        run = self._runs.setdefault(topic.run, _Run())
        held: dict[str, str] = run.announced if isinstance(topic, topics.SpecTopic) else run.alive
        self._held -= _cost(held.pop(topic.node, None))
        if isinstance(topic, topics.SpecTopic) and isinstance(message, Announcement):
            text = message.experiment
        elif isinstance(topic, topics.StateTopic) and isinstance(message, Presence) and message.state in ALIVE:
            text = ""
        else:
            if not (run.announced or run.alive):
                del self._runs[topic.run]
            return
        if self._held + _cost(text) > HELD_MOST:
            raise WireError(f"announcements of more than {HELD_MOST} characters")
        self._held += _cost(text)
        held[topic.node] = text


def _read(text: str) -> Experiment:
    """Return the experiment. Raises InvalidExperiment, also for more than DEVICES_MOST devices."""
    experiment = parse(text)
    count = sum(experiment.sizes()[-1])
    if count > DEVICES_MOST:
        raise InvalidExperiment("devices", count, "too many to watch", f"Use at most {DEVICES_MOST}.")
    return experiment


def _cost(text: str | None) -> int:
    return 0 if text is None else NAMES_COST + len(text)
