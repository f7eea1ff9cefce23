"""Choice of the run to watch among the announcements that a broker retains."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from fedstrata.common.errors import InvalidExperiment, WireError
from fedstrata.common.experiment.reading import recorded
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import LIVING, Announcement, Presence
from fedstrata.common.settings.topology import CLOUD

SETTLE_S: Final = 0.5  # retained messages arrive at once, but in any order
DEVICES_MOST: Final = 100_000
HELD_MOST: Final = 64_000_000  # characters of all announcements
RUNS_MOST: Final = 32  # of each node: those with the greatest ids, which are the newest


@dataclass(slots=True)
class _Announced:
    """What a node has sent in a run: the text of its experiment, empty if it announced none;
    whether it is alive.
    """

    text: str = ""
    alive: bool = False


class Runs:
    """The runs of one lab, from the announcements on its brokers. Sans-IO.

    `wanted`: the id of a run, active or ended; None for the newest active run.

    A broker may retain any number of announcements. So what is kept is bounded for each node, and
    in all: then the node that holds most loses its oldest run, the cloud last.
    """

    def __init__(self, wanted: str | None, *, lab: str = topics.DEFAULT_LAB) -> None:
        self.lab: Final = lab
        self._wanted = wanted
        self._of: dict[str, dict[str, _Announced]] = {}  # by node and run
        self._held = 0  # characters
        self._settled_at = inf

    def receive(self, topic: topics.Topic, body: bytes, now: float) -> None:
        """Process an announcement or a presence. Raises WireError for any other message."""
        if not isinstance(topic, topics.SpecTopic | topics.StateTopic) or topic.lab != self.lab:
            raise WireError("not an announcement of this lab")
        message = serialization.decode(body)[1] if body else None
        sent = self._of.setdefault(topic.node, {}).setdefault(topic.run, _Announced())
        if isinstance(topic, topics.StateTopic):
            sent.alive = isinstance(message, Presence) and message.state in LIVING
        else:
            self._held -= len(sent.text)
            sent.text = message.experiment if isinstance(message, Announcement) else ""
            self._held += len(sent.text)
        if not sent.text and not sent.alive:
            self._forget(topic.node, topic.run)
        self._trim(topic.node)
        if self._settled_at == inf and self._candidates():
            self._settled_at = now + SETTLE_S

    def choose(self, now: float) -> tuple[str, Experiment] | None:
        """Return the id and the experiment of the run to watch, or None so far.

        The run has a valid experiment, and a node that announced it is alive. Of several runs the
        one with the greatest id is the newest: ids begin with the start time.
        """
        if now < self._settled_at:
            return None
        for run in self._candidates():
            for node in sorted(self._of, key=lambda node: node != CLOUD):
                sent = self._of[node].get(run, _Announced())
                if not sent.text:
                    continue
                try:
                    return run, _read(sent.text)
                except InvalidExperiment:
                    self._forget(node, run)
        self._settled_at = inf
        return None

    def names(self) -> list[str]:
        """Return the ids of all announced runs, newest first."""
        return sorted(
            {run for sent in self._of.values() for run, each in sent.items() if each.text},
            reverse=True,
        )

    def _candidates(self) -> list[str]:
        """Return the ids of runs that may be watched: those of a living cloud first, of these the
        newest.
        """
        if self._wanted is not None:
            return [name for name in self.names() if name == self._wanted]
        found = [
            (node == CLOUD, run)
            for node, sent in self._of.items()
            for run, each in sent.items()
            if each.alive and each.text
        ]
        return [run for _, run in sorted(found, reverse=True)]

    def _trim(self, node: str) -> None:
        """Forget the oldest runs of a node that has too many, and of those that hold too much."""
        while len(self._of.get(node, ())) > RUNS_MOST:
            self._forget_oldest(node)
        while self._held > HELD_MOST:
            self._forget_oldest(max(self._of, key=lambda each: (each != CLOUD, self._holds(each))))

    def _holds(self, node: str) -> int:
        return sum(len(sent.text) for sent in self._of[node].values())

    def _forget_oldest(self, node: str) -> None:
        self._forget(node, min(self._of[node], key=lambda run: (run == self._wanted, run)))

    def _forget(self, node: str, run: str) -> None:
        self._held -= len(self._of[node].pop(run).text)
        if not self._of[node]:
            del self._of[node]


def _read(text: str) -> Experiment:
    """Return the experiment. Raises InvalidExperiment, also for more than DEVICES_MOST devices."""
    experiment = recorded(text)
    count = sum(experiment.sizes()[-1])
    if count > DEVICES_MOST:
        raise InvalidExperiment(
            "devices", count, "too many to watch", f"Use at most {DEVICES_MOST}."
        )
    return experiment
