"""What a broker lacks that refuses us: MQTT 3.1.1 has five codes for a CONNECT, and for the rest a
closed socket.

So a refused client tries what it has asked for piece by piece, over connections of its own: the
first piece that fails is what the broker lacks. Most of it a node can do without.
"""

from __future__ import annotations

import secrets
import string
import time
from dataclasses import dataclass
from enum import Enum
from typing import Final

from paho.mqtt.reasoncodes import ReasonCode

from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.plain_client import ConnectRefused, PlainClient, Will, connected, pump

ID_MOST: Final = 23  # letters and digits, which every broker of MQTT 3.1.1 takes as an id
ALIVE_S: Final = 0.3  # in which a broker ends a connection whose id another one takes
TRIES: Final = 3
_DRAWN: Final = 6  # characters at the end of an id


class Lack(Enum):
    """What a broker lacks, and the remedy."""

    VERSION = "it does not take MQTT 3.1.1. Allow that version"
    UNAVAILABLE = (
        "it reports that it is unavailable. Wait until it has started, or look into its log"
    )
    LOGIN = "it refuses the login. Give the login and the certificate that it knows"
    CLIENTS = (
        "closed by the broker before CONNACK, whatever is asked for. Raise its number of clients "
        "(mosquitto: "
        "max_connections), or give its port of plain MQTT: not that of TLS or websockets"
    )
    ID = "it takes short client ids of letters and digits only: such a one is used"
    WILL = (
        "it takes no will of this login: a dead node is noticed after transfer.idle_s only. Let "
        "each node write its "
        "own state"
    )
    QOS1 = "it has no QoS 1: it may forget states"
    RETAINED = "it retains no messages: who comes late asks, which takes up to 2 s"
    BESIDE = (
        "it ends a connection when another one has the same login: it makes ids of logins. Turn "
        "that off (mosquitto, "
        "EMQX: use_username_as_clientid)"
    )
    READING = "it refuses a subscription. Let this login read the topic"


# By the code of a CONNACK, in the numbers of MQTT 5, to which paho converts those of MQTT 3.1.1.
CODES: Final = {
    0x84: Lack.VERSION,
    0x85: Lack.ID,
    0x86: Lack.LOGIN,  # bad user name or password
    0x87: Lack.LOGIN,  # not authorized
    0x88: Lack.UNAVAILABLE,
}
FINAL: Final = frozenset({Lack.VERSION, Lack.LOGIN})  # another attempt would fail, too
DONE_WITHOUT: Final = frozenset({Lack.ID, Lack.WILL, Lack.QOS1, Lack.RETAINED})


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks of a broker: an id, perhaps a will, perhaps a subscription."""

    client_id: str
    keepalive_s: int
    will: Will | None = None
    reads: str = ""


def lack_of(code: object) -> Lack | None:
    """Return what the code of a CONNACK means, None if it is another one."""
    if isinstance(code, ReasonCode):
        return CODES.get(code.value)
    return None


def short_id(client_id: str) -> str:
    """Return an id of letters and digits that every broker takes, which another client hardly
    has.
    """
    letters = [each for each in client_id if each in string.ascii_letters + string.digits]
    drawn = secrets.token_hex(_DRAWN)
    return "".join(letters)[: ID_MOST - len(drawn)] + drawn


def find_lack(address: BrokerAddress, asked: Asked) -> Lack | None:
    """Return the first piece of what a client asks that a broker refuses; None if there is none, or
    no answer.

    It takes some connections. Nothing is published: no will is left behind, as each client
    disconnects.
    """
    try:
        return _connect(address, asked) or _beside(address, asked)
    except (ConnectionFailed, InvalidExperiment, OSError, ValueError):
        return None  # it is away, or so slow that nothing can be concluded


def _connect(address: BrokerAddress, asked: Asked) -> Lack | None:
    """Connect with one piece more each time."""
    similar = asked.client_id[:-_DRAWN] + secrets.token_hex(_DRAWN // 2)
    if (
        refused := _refusal(address, short_id(asked.client_id), asked.keepalive_s, None)
    ) is not None:
        return CODES.get(refused.code or 0, Lack.CLIENTS)
    pieces: list[tuple[Lack, Will | None]] = [(Lack.ID, None)]
    if (own := asked.will) is not None:
        pieces.append((Lack.WILL, Will(own.topic, qos=0, retain=False)))
        if own.qos:
            pieces.append((Lack.QOS1, Will(own.topic, qos=own.qos, retain=False)))
        if own.retain:
            pieces.append((Lack.RETAINED, own))
    for lack, will in pieces:
        if _refusal(address, similar, asked.keepalive_s, will) is not None:
            return lack
    return None


def _refusal(
    address: BrokerAddress, client_id: str, keepalive_s: int, will: Will | None
) -> ConnectRefused | None:
    try:
        PlainClient(address, will=will, client_id=client_id, keepalive_s=keepalive_s).leave()
    except ConnectRefused as refused:
        return refused
    return None


def _beside(address: BrokerAddress, asked: Asked) -> Lack | None:
    """Connect two clients beside each other, and subscribe with one.

    If both are lost, a client of another process may have taken their id meanwhile: then again.
    """
    for _ in range(TRIES):
        with connected(address) as first, connected(address) as second:
            if not both_last((first, second)):
                return Lack.BESIDE
            if not first.turn():
                continue
            reads = not asked.reads or second.granted([asked.reads]) is not False
            if reads or not first.turn():
                return None
            return Lack.READING
    return None


def both_last(both: tuple[PlainClient, PlainClient]) -> bool:
    """Wait whether the broker ends the first of two connections of one login, whose ids differ, and
    not the second.
    """
    began = time.monotonic()
    pump(both, lambda: time.monotonic() > began + ALIVE_S)
    first, second = both
    return first.turn() or not second.turn()
