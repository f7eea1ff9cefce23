"""Who may publish and receive what on the brokers of a lab, for mosquitto, NATS and EMQX.

A node publishes below its own name and, as the last level, its own name into others' topics. It
receives what is below its own name, its parent's state and models, and its children's. So a
sender's name in a topic is true, and no node reads the models of another branch, unless devices of
the lab may move. The lab's `operator` (watch, lab status, doctor) receives everything. It asks all
nodes who they are, and for the status of a run; they answer below their own names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fedstrata.common.host.energy_meters import EnergySource
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.topics import ALL, ROOT
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console.login import NODE, OPERATOR
from fedstrata.deploy.kits.lab_file import Lab

STATISTICS: Final = "$SYS/broker/#"


@dataclass(frozen=True, slots=True)
class Access:
    """Topic filters of one user, or of all: `{name}` then stands for the user's name."""

    publish: tuple[str, ...] = ()
    receive: tuple[str, ...] = ()

    def of(self, name: str) -> Access:
        """Return the filters of one user."""
        publish = tuple(each.replace(NODE, name) for each in self.publish)
        receive = tuple(each.replace(NODE, name) for each in self.receive)
        return Access(publish, receive)

    def __add__(self, other: Access) -> Access:
        return Access(self.publish + other.publish, self.receive + other.receive)


def common(lab: str) -> Access:
    """Return what each user may do."""
    return Access(
        publish=(
            topics.state(lab, "+", NODE),
            topics.spec(lab, "+", NODE),
            topics.status(lab, "+", NODE),
            f"{ROOT}/{lab}/+/{NODE}/blob/#",
            topics.inbox(lab, "+", "+", NODE),
            topics.ask(lab, NODE, NODE),  # whether another process has its name
            topics.answer(lab, "+", NODE),
        ),
        receive=(
            f"{ROOT}/{lab}/+/{NODE}/#",  # also the questions to it, and the answers
            topics.ask(lab, ALL, "+"),
            STATISTICS,
        ),
    )


def users(lab: Lab, broker: str) -> dict[str, Access]:
    """Return the users of one broker of a lab, each with what it may do besides `common`."""
    name = lab.name
    found = {OPERATOR: Access((topics.ask(name, "+", OPERATOR),), (f"{ROOT}/{name}/#",))}
    found[CLOUD] = Access((topics.ask(name, ALL, CLOUD),))  # on all brokers, to find who is there
    for child, parent in _links(lab, broker):
        found[parent] = found.get(parent, Access()) + Access(receive=_from(name, child, to=parent))
        upward = Access(
            (topics.ask(name, parent, child),),
            (topics.spec(name, "+", parent), *_from(name, parent, to=child)),
        )
        found[child] = found.get(child, Access()) + upward
    for machine, own in lab.machines.items():
        kind, _, topic = own.energy.partition(":")
        # its login reads the machine's smart plug
        first = next(iter(lab.devices_of(machine)), None)
        if (
            kind == EnergySource.PLUG
            and first is not None
            and lab.meeting_place(lab.parents[first]) == broker
        ):
            found[first] += Access(receive=(topic,))
    return found


def _links(lab: Lab, broker: str) -> Iterator[tuple[str, str]]:
    """Yield each child on a broker with its parent, and with those to which it may move."""
    homes = dict.fromkeys(group.parent for group in lab.devices) if lab.moves else {}
    for child, parent in lab.parents.items():
        if lab.meeting_place(parent) == broker:
            yield child, parent
            others = homes if child not in lab.institutions else ()
            yield from (
                (child, home)
                for home in others
                if home != parent and lab.meeting_place(home) == broker
            )


def _from(lab: str, sender: str, *, to: str) -> tuple[str, ...]:
    return (
        topics.state(lab, "+", sender),
        f"{ROOT}/{lab}/+/{sender}/blob/{ALL}/#",
        f"{ROOT}/{lab}/+/{sender}/blob/{to}/#",
    )


def mosquitto(lab: Lab, broker: str) -> str:
    """Return the file of mosquitto's `acl_file`."""
    everybody = common(lab.name).of("%u")
    lines = [f"pattern write {each}" for each in everybody.publish]
    lines += [f"pattern read {each}" for each in everybody.receive]
    for name, access in users(lab, broker).items():
        lines += ["", f"user {name}"]
        lines += [f"topic write {each}" for each in access.publish]
        lines += [f"topic read {each}" for each in access.receive]
    return "\n".join(lines) + "\n"


def nats(lab: Lab, broker: str) -> str:
    """Return the value of NATS's `authorization`, JSON; the users are those of certificates."""
    found = []
    for name, own in users(lab, broker).items():
        access = common(lab.name).of(name) + own
        allowed: dict[str, Mapping[str, list[str]]] = {
            "publish": {"allow": _subjects(access.publish)},
            "subscribe": {"allow": _subjects(access.receive)},
        }
        found.append({"user": name, "permissions": allowed})
    return json.dumps({"users": found}, indent=1) + "\n"


def emqx(lab: Lab, broker: str) -> str:
    """Return the file of EMQX's file authorizer, for users whose name is that of their
    certificate.
    """
    everybody = common(lab.name).of("${username}")
    lines = [
        _term("all", "publish", everybody.publish),
        _term("all", "subscribe", everybody.receive),
    ]
    for name, access in users(lab, broker).items():
        who = f'{{username, "{name}"}}'
        lines += [
            _term(who, what, some)
            for what, some in (("publish", access.publish), ("subscribe", access.receive))
        ]
    return "\n".join([*(line for line in lines if line), "{deny, all}."]) + "\n"


FORMS: Final[Mapping[str, Callable[[Lab, str], str]]] = {
    "mosquitto": mosquitto,
    "nats": nats,
    "emqx": emqx,
}


def _term(who: str, what: str, filters: tuple[str, ...]) -> str:
    if filters:
        return f"{{allow, {who}, {what}, {json.dumps(filters)}}}."
    return ""


def _subjects(filters: tuple[str, ...]) -> list[str]:
    """Return topic filters as subjects of NATS, for which `a/#` is two: below `a`, and `a`
    itself.
    """
    found = []
    for each in filters:
        levels = [
            {"+": "*", "#": ">"}.get(level, level.replace(".", "//")) for level in each.split("/")
        ]
        found += [".".join(levels), *([".".join(levels[:-1])] if levels[-1] == ">" else [])]
    return found
