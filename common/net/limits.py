"""What a broker takes: its largest packet, which only MQTT 5 tells.

The agents speak MQTT 3.1.1, which every broker does; a connection of its own asks, once, before the first model goes.
A publisher that exceeds the limit is cut off without a word, for ever. Its hundred bytes are in no account.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from common.net.address import BrokerAddress

ASK_S: Final = 2.0
_CONNECT, _CONNACK, _DISCONNECT = 0x10, 0x20, b"\xe0\x00"
_CLEAN_START, _PASSWORD, _USERNAME = 0x02, 0x40, 0x80
_MAXIMUM_PACKET_SIZE: Final = 0x27
# Bytes of a CONNACK's other properties of fixed size, by identifier (MQTT 5, section 3.2.2.3).
_FIXED: Final = {0x11: 4, 0x21: 2, 0x24: 1, 0x25: 1, 0x22: 2, 0x28: 1, 0x29: 1, 0x2A: 1, 0x13: 2}
_TEXTS: Final = {0x12: 1, 0x1F: 1, 0x1A: 1, 0x15: 1, 0x16: 1, 0x1C: 1, 0x26: 2}


async def packet_limit(address: BrokerAddress) -> int | None:
    """Return the most bytes of a packet that a broker takes, None where it sets no limit or does not tell."""
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(_connect(address))
                head = await reader.readexactly(2)
                answer = await reader.readexactly(head[1]) if head[0] == _CONNACK and head[1] < 128 else b""
                writer.write(_DISCONNECT)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    return limit_of(answer)


def limit_of(connack: bytes) -> int | None:
    """Return the Maximum Packet Size in a CONNACK's variable header, None where it is not there or no MQTT 5."""
    if len(connack) < 3 or connack[1] != 0 or connack[2] != len(connack) - 3:
        return None
    at = 3
    while at < len(connack):
        name = connack[at]
        at += 1
        if name == _MAXIMUM_PACKET_SIZE and at + 4 <= len(connack):
            return int.from_bytes(connack[at : at + 4], "big") or None
        if name in _FIXED:
            at += _FIXED[name]
        elif name in _TEXTS:
            for _ in range(_TEXTS[name]):
                at += 2 + int.from_bytes(connack[at : at + 2], "big")
        else:
            return None
    return None


def _connect(address: BrokerAddress) -> bytes:
    flags = _CLEAN_START
    payload = _text(f"fedstrata-asks-{secrets.token_hex(4)}")
    if address.username is not None:
        flags |= _USERNAME
        payload += _text(address.username)
        if address.password is not None:
            flags |= _PASSWORD
            payload += _text(address.password)
    rest = _text("MQTT") + bytes([5, flags, 0, 10, 0]) + payload
    length = bytes([len(rest)]) if len(rest) < 128 else bytes([len(rest) & 127 | 128, len(rest) >> 7])
    return bytes([_CONNECT]) + length + rest


def _text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(2, "big") + data
