"""The largest packet that a broker accepts, which only MQTT 5 reports.

The agents use MQTT 3.1.1, which every broker supports. One extra connection asks once, before the first model is sent:
a broker disconnects a publisher that exceeds the limit, each time and without a reason. The hundred bytes of this
connection are in no account.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from common.net.address import BrokerAddress

ASK_S: Final = 2.0


async def packet_limit(address: BrokerAddress) -> int | None:
    """Return the most bytes of a packet that a broker accepts, None where it sets no limit or reports none."""
    return await asyncio.to_thread(_ask, address)


def _ask(address: BrokerAddress) -> int | None:
    answers: list[Any] = []
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2, client_id=f"fedstrata-asks-{secrets.token_hex(4)}", protocol=mqtt.MQTTv5
    )
    client.connect_timeout = ASK_S
    client.on_connect = lambda _client, _data, _flags, _reason, properties: answers.append(properties)
    deadline = time.monotonic() + ASK_S
    try:
        address.identify(client)
        client.connect(address.host, address.port, keepalive=10)
        while not answers and client.loop(max(0.0, deadline - time.monotonic())) == mqtt.MQTT_ERR_SUCCESS:
            if time.monotonic() >= deadline:
                break
        client.disconnect()
        client.loop(0.0)
    except Exception:  # noqa: BLE001 - whatever a broker sends: without a limit that can be read there is none
        return None
    return getattr(answers[0], "MaximumPacketSize", None) or None if answers else None
