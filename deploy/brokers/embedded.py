"""The embedded broker: amqtt in a process of its own, with fixes for clients that disconnect and reconnect."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker as Amqtt
from amqtt.contexts import BrokerConfig, ListenerConfig, ListenerType


def _repaired(passwords: Path | None) -> Any:
    class Repaired(Amqtt):  # type: ignore[misc]
        """amqtt 0.12 with fixes for clients that disconnect and reconnect; tests/test_broker.py shows each case."""

        async def _handle_client_session(
            self, reader: Any, writer: Any, session: Any, handler: Any, *rest: Any
        ) -> None:
            # amqtt ignores an elapsed keep-alive: it would never publish the will of a node whose link is silent.
            session.keep_alive += session.keep_alive // 2
            handler.handle_read_timeout = lambda: handler._reader_task.cancel()  # noqa: PLW0108 - it is made later
            await super()._handle_client_session(reader, writer, session, handler, *rest)

        async def _delete_session(self, client_id: str) -> None:
            # amqtt leaves the client's previous connection open and publishes its will when that breaks.
            _, handler = self._sessions.get(client_id, (None, None))
            if handler is not None:
                await handler.handle_connection_closed()
                await handler.stop()
            await super()._delete_session(client_id)

        async def _publish_retained_messages_for_subscription(
            self, subscription: tuple[str, int], session: Any
        ) -> None:
            # amqtt sends a new client the retained messages of all others' subscriptions, and disconnects it if another
            # client subscribes meanwhile.
            if any(owner is session for owner, _ in self._subscriptions.get(subscription[0], ())):
                await super()._publish_retained_messages_for_subscription(subscription, session)

    plugins: dict[str, dict[str, object]] = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {}}
    if passwords is not None:
        passwords.open().close()  # amqtt's own error would only name a plugin
        plugins = {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(passwords)}}
    listener = ListenerConfig(type=ListenerType.EXTERNAL)  # `_serve` opens the sockets
    return Repaired(BrokerConfig(listeners={"default": listener}, plugins=plugins))


async def _serve(host: str, port: int, *, passwords: Path | None) -> None:
    class Writer(StreamWriterAdapter):  # type: ignore[misc]
        async def close(self) -> None:
            # amqtt waits until the peer has received all queued data, but the peer may be gone.
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(super().close(), timeout=1.0)
            self._writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await broker.external_connected(StreamReaderAdapter(reader), Writer(writer), "default")
        except Exception as error:  # noqa: BLE001
            # The socket may receive arbitrary bytes: they end this connection only.
            print(f"connection ended by {error!r}", file=sys.stderr, flush=True)
        finally:
            writer.transport.abort()

    logging.getLogger("amqtt").setLevel(logging.CRITICAL)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, _context: None)  # amqtt drops its futures when a client leaves
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    broker = _repaired(passwords)
    await broker.start()
    server = await asyncio.start_server(serve, host, port)
    await ended.wait()
    server.close()
    await broker.shutdown()


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m deploy.brokers.embedded")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--password-file", type=Path)
    arguments = parser.parse_args()
    try:
        asyncio.run(_serve(arguments.host, arguments.port, passwords=arguments.password_file))
    except OSError as error:
        sys.exit(f"{error.filename or f'{arguments.host}:{arguments.port}'}: {os.strerror(error.errno or 0)}")


if __name__ == "__main__":
    main()
