"""An MQTT connection that reconnects by itself."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from paho.mqtt.reasoncodes import ReasonCode

from fedstrata.common.accounting.tcp import WireMeter
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.net.address import BrokerAddress, HostPort
from fedstrata.common.net.attempts import BACKOFF_MOST_S, REPEAT_S, Attempts, FailureLog
from fedstrata.common.net.bulk import CLOSED, Body, BulkClient, FindPlace, Place, Received
from fedstrata.common.net.client import MqttClient, MqttError
from fedstrata.common.net.plain_client import Will
from fedstrata.common.net.refusals import (
    DONE_WITHOUT,
    FINAL,
    ID_MOST,
    Asked,
    Lack,
    find_lack,
    short_id,
)
from fedstrata.common.protocol.limits import skip_large

OPTIONAL_S: Final = 10.0  # timeout of an optional subscription
ANSWER_S: Final = 2.0  # without any answer, before the first attempt is reported
# A connection that is up for so long has lasted. Of two clients of one id, each is up while the
# other one pauses.
LASTED_S: Final = 2 * BACKOFF_MOST_S
REFUSED: Final = 0x80  # of a SUBACK

# of the brokers of this process
_FAILURES: Final = WeakValueDictionary[tuple[HostPort, ...], FailureLog]()

log = logging.getLogger("fedstrata.connection")


class _Sent(NamedTuple):
    """The last operation on a connection: a packet of `size` bytes, or topics."""

    packet: str
    topic: str
    size: int
    at: float

    def describe(self, now: float) -> str:
        """Return a description as part of a sentence."""
        what = ""
        if self.packet == "PUBLISH":
            what = f" of {self.size} bytes to {self.topic:.100}"
        elif self.size == 1:
            what = f" to {self.topic:.100}"
        elif self.size:
            what = f" to {self.size} topics ({self.topic:.100}, ...)"
        return f"{now - self.at:.1f} s after {self.packet}{what}"


@dataclass(frozen=True, slots=True)
class Handlers:
    """What a connection calls: `received` for each message, `connected` after each connect, `lost`
    when it breaks.

    `find_place(topic, bytes)` may return memory for the payload of a QoS 0 message, where it is
    written as it arrives; then `landed(topic, place)` is called in place of `received`. By default
    what is too large for its topic is dropped.
    """

    received: Received
    connected: Callable[[], Awaitable[None]]
    lost: Callable[[], None] = lambda: None
    find_place: FindPlace = skip_large
    landed: Callable[[str, Place], None] = lambda topic, place: None


class BrokerConnection:
    """A connection that is restored when it breaks. Its handlers run in the loop of `run`.

    A connection is *accepted* once the broker acknowledged its subscriptions, and has *lasted*
    after `LASTED_S`. Only that resets the pauses between attempts, so a broker that drops a client
    immediately is not flooded. It is not lost when `run` is cancelled. `attempts` has the broker's
    address that is connected or tried. Each address gets a client id of its own: when a server of a
    RabbitMQ cluster dies, the others delete the queues of its clients by their ids, also of one
    that has come to them meanwhile, without a word to it.
    """

    def __init__(
        self,
        address: BrokerAddress,
        handlers: Handlers,
        *,
        client_id: str,
        keepalive_s: int,
        will: tuple[str, bytes] | None = None,
    ) -> None:
        self.address = address
        self.attempts = Attempts(address)
        self._client_id = client_id
        self._keepalive_s = keepalive_s
        self._handlers = handlers
        self._will = will
        self._short_id = ""  # in place of the client id, where the broker takes short ones only
        self._qos_most = 1
        self._retains = True
        self._lacks: dict[str, Lack | None] = {}  # what was found out, by what had failed
        self._examined: dict[str, float] = {}
        self._client: MqttClient | None = None
        self._tls: ssl.SSLContext | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._optional: set[asyncio.Task[None]] = set()
        self._unbegun: set[Coroutine[Any, Any, Any]] = set()
        self._leaving: set[Callable[[], None]] = set()
        self._failures = _FAILURES.setdefault(address.hosts, FailureLog())
        self._last_sent: _Sent | None = None
        self._unacknowledged = 0
        self._reads = ""  # a topic of the last subscription, until all are acknowledged
        self._accepted = self._lasted = False
        self.meter = WireMeter()
        self.reconnects = 0

    @property
    def up(self) -> bool:
        """Whether the broker is connected."""
        return self._client is not None

    async def run(self, *, connect_timeout_s: float) -> None:
        """Keep the connection until cancelled.

        Raises ConnectionFailed if no connection was accepted within `connect_timeout_s`, or each
        one is ended soon for so long. Otherwise it reconnects forever; the caller's progress rule
        decides when to give up.
        """
        loop = asyncio.get_running_loop()
        attempts = self.attempts
        attempts.begin(loop.time(), timeout_s=connect_timeout_s)
        while True:
            client = self._new_client()
            self._last_sent = None
            self._unacknowledged = 0
            self._reads = ""
            self._accepted = self._lasted = False
            try:
                async with self._connection(client):
                    self._client = client
                    self._sent("CONNECT")
                    lasting = loop.call_later(LASTED_S, self._has_lasted)
                    try:
                        await self._handlers.connected()
                        await client.ended()
                    finally:
                        lasting.cancel()
                        self._drop()
            except MqttError as error:
                now = loop.time()
                sent = self._last_sent
                if sent is not None:
                    self._handlers.lost()
                reason = client.reason(error)
                thrown_out = sent is not None and reason.startswith(CLOSED)
                lack = None
                if thrown_out or (
                    sent is None and (client.is_refused(error) or reason.startswith(CLOSED))
                ):
                    lack = await self._lack(sent)
                text = reason if sent is None else f"{reason} {sent.describe(now)}"
                if lack not in (None, Lack.LOGIN):
                    text = lack.value if sent is None else f"{text}: {lack.value}"
                failed = attempts.address
                pause_s = attempts.failed(
                    text,
                    now=now,
                    accepted=self._accepted,
                    lasted=self._lasted,
                    thrown_out=thrown_out,
                    final=sent is None
                    and lack not in DONE_WITHOUT
                    and (lack in FINAL or client.is_final(error)),
                    explained=lack not in (None, Lack.LOGIN),
                )
                if line := self._failures.failed(
                    f"{failed} {lack or reason} {sent and sent.packet}", text, now
                ):
                    following = attempts.address if attempts.address != failed else "again"
                    log.warning("broker %s: %s; trying %s", failed, line, following)
            self.meter.detach()
            self.reconnects += 1
            await asyncio.sleep(pause_s)

    def publish(self, topic: str, body: bytes, *, qos: int, retain: bool = False) -> None:
        """Publish a message, or drop it without a connection."""
        self._sent("PUBLISH", topic, len(body))
        if self._client is not None and qos == 0 and not retain and not self._unbegun:
            inner = self._client._client  # nothing to wait for and nothing to overtake: no task
            if isinstance(inner, BulkClient):
                inner.publish_body(topic, Body(memoryview(body)), done=lambda: None)
            else:
                inner.publish(topic, body)
        elif self._client is not None:
            retain = retain and self._retains
            qos = min(qos, self._qos_most)
            self._call(self._client.publish(topic, body, qos=qos, retain=retain, timeout=math.inf))

    def publish_body(self, topic: str, body: Body, *, done: Callable[[], None]) -> None:
        """Publish a large QoS 0 message without a copy; `done` is called when it has left or the
        connection died.
        """

        def left() -> None:
            if left in self._leaving:
                self._leaving.remove(left)
                done()

        self._leaving.add(left)
        self._sent("PUBLISH", topic, len(body.view))
        client = self._client
        if client is None:
            left()
        elif isinstance(inner := client._client, BulkClient):
            inner.publish_body(topic, body, done=left)
        else:
            self._call(client.publish(topic, bytes(body.view), qos=0, timeout=math.inf), left)

    def subscribe(
        self,
        topics: list[str],
        *,
        qos: int,
        refused: Callable[[str], None] = lambda topic: None,
        acknowledged: Callable[[], None] = lambda: None,
        optional: bool = False,
    ) -> None:
        """Subscribe without waiting: a later publish follows on the same connection, so no message
        is missed.

        After the broker's acknowledgement `refused` is called for each topic that this login may
        not read, if the broker reports it, and then `acknowledged`. Neither is called if the
        connection ends before. An `optional` subscription may stay unanswered: the connection works
        without it, and `flush` does not wait for it.
        """
        if self._client is not None and topics:
            self._sent("SUBSCRIBE", topics[0], len(topics))
            self._unacknowledged += not optional
            self._reads = topics[0]
            call = self._subscribe(
                self._client, topics, qos, refused, acknowledged, optional=optional
            )
            self._call(call, optional=optional)

    def unsubscribe(self, topics: list[str]) -> None:
        """Unsubscribe without waiting."""
        if self._client is not None and topics:
            self._sent("UNSUBSCRIBE", topics[0], len(topics))
            self._call(self._client.unsubscribe(topics, timeout=math.inf))

    async def flush(self) -> None:
        """Wait until all messages have left, or the connection died."""
        while self._calls:
            await asyncio.wait(set(self._calls))

    @asynccontextmanager
    async def _connection(self, client: MqttClient) -> AsyncIterator[None]:
        """Connect a client, and disconnect it at the end.

        If cancelled while it connects, wait for the attempt: a thread of aiomqtt opens the socket,
        which would be leaked.
        """
        entering = asyncio.create_task(client.__aenter__(), name="connect")
        slow = asyncio.get_running_loop().call_later(ANSWER_S, self._no_answer_yet)
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:
            await asyncio.wait((entering,))
            if entering.exception() is None:
                await client.__aexit__(None, None, None)
            client.close()
            raise
        except MqttError:
            client.close()
            raise
        finally:
            slow.cancel()
        try:
            yield
        finally:
            try:
                await client.__aexit__(None, None, None)
            except MqttError as error:  # must not replace a cancellation
                log.debug("broker %s: disconnecting: %s", self.attempts.address, error)
            finally:
                client.close()

    async def _lack(self, sent: _Sent | None) -> Lack | None:
        """Return what the broker lacks, as far as it can be found out, and work without it from now
        on.

        A connection that ends after its CONNACK is examined when it is not the first one; both
        kinds once a minute.
        """
        now = asyncio.get_running_loop().time()
        kind = "later"
        if sent is None:
            kind = "CONNECT"
        elif not self.attempts.thrown_out:
            return None
        if now < self._examined.get(kind, -math.inf) + REPEAT_S:
            return self._lacks[kind]
        asked = Asked(self._id(), self._keepalive_s, self._own_will(), self._reads)
        lack = await asyncio.to_thread(find_lack, self.attempts.address, asked)
        match lack:
            case Lack.ID:
                self._short_id = short_id(self._client_id)
            case Lack.WILL:
                self._will = None
            case Lack.QOS1:
                self._qos_most = 0
            case Lack.RETAINED:
                self._retains = False
            case _:
                self._lacks[kind] = lack
                self._examined[kind] = now
        return lack

    def _id(self) -> str:
        place = self.attempts.place
        if self._short_id:
            return f"{self._short_id[: ID_MOST - 2]}{place:02d}"
        return f"{self._client_id}-{place}"

    def _own_will(self) -> Will | None:
        if self._will is None:
            return None
        return Will(self._will[0], qos=self._qos_most, retain=self._retains)

    def _no_answer_yet(self) -> None:
        if self.reconnects == 0:
            log.warning("broker %s: no answer yet", self.attempts.address)

    def _new_client(self) -> MqttClient:
        address = self.attempts.address
        if address.tls is not None:
            try:
                self._tls = address.tls.client_context()
            except InvalidExperiment:
                if self._tls is None:
                    raise  # later the files are about to be renewed: the old ones go on
        own_will = self._own_will()
        will = None
        if own_will is not None and self._will is not None:
            will = own_will, self._will[1]
        client = MqttClient(
            address,
            client_id=self._id(),
            keepalive_s=self._keepalive_s,
            will=will,
            find_place=self._handlers.find_place,
            landed=self._handlers.landed,
            received=self._receive,
            tls=self._tls,
        )
        self.meter.follow(client._client)
        return client

    def _call(
        self,
        call: Coroutine[Any, Any, Any],
        done: Callable[[], None] | None = None,
        *,
        optional: bool = False,
    ) -> None:
        tasks = self._optional if optional else self._calls

        async def run() -> None:
            self._unbegun.discard(call)
            try:
                await call
            except (MqttError, ValueError) as error:
                # the connection's own loop handles it
                log.debug("broker %s: %s", self.attempts.address, error)

        def ended(task: asyncio.Task[None]) -> None:
            call.close()  # if it was cancelled before it began
            self._unbegun.discard(call)
            tasks.discard(task)
            if done is not None:
                done()

        self._unbegun.add(call)
        task = asyncio.create_task(run(), name="mqtt-call")
        tasks.add(task)
        task.add_done_callback(ended)

    async def _subscribe(
        self,
        client: MqttClient,
        topics: list[str],
        qos: int,
        refused: Callable[[str], None],
        acknowledged: Callable[[], None],
        *,
        optional: bool,
    ) -> None:
        timeout_s = OPTIONAL_S if optional else math.inf
        codes: Sequence[int | ReasonCode] = await client.subscribe(
            [(topic, qos) for topic in topics], timeout=timeout_s
        )
        if client is not self._client:
            return  # that connection has ended meanwhile
        if not optional:
            self._unacknowledged -= 1
            if self._unacknowledged == 0:
                self._accepted = True
                self._reads = ""
        for topic, code in zip(topics, codes, strict=False):
            value = code if isinstance(code, int) else code.value
            if value >= REFUSED:
                refused(topic)
        acknowledged()

    def _receive(self, topic: str, body: bytes, retained: bool) -> None:
        if self._client is not None:  # else it disconnects
            self._handlers.received(topic, body, retained)

    def _sent(self, packet: str, topic: str = "", size: int = 0) -> None:
        if self._client is not None:
            self._last_sent = _Sent(packet, topic, size, asyncio.get_running_loop().time())

    def _has_lasted(self) -> None:
        self._lasted = True
        self._examined.clear()
        if line := self._failures.recovered(asyncio.get_running_loop().time()):
            log.info("broker %s: connected, after %s", self.attempts.address, line)

    def _drop(self) -> None:
        self._client = None
        for task in self._calls | self._optional:
            task.cancel()
        for left in list(self._leaving):
            left()
