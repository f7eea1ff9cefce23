"""Record all messages of a small real lab: `python tests/recordings/record.py` writes `run.msgpack`
beside this file.

Only after the wire format was changed on purpose, and its version raised. The file holds the
experiment as JSON and a list of [seconds, topic, payload, retained] in the order in which the
broker passed them on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgpack
import paho.mqtt.client as mqtt

from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.deploy.brokers import broker

RECORDING = Path(__file__).with_name("run.msgpack")
EXPERIMENT = {
    "name": "recorded",
    "rounds": 2,
    "topology": {"institutions": 1, "devices": 2},
    "model": {"name": "mlp_digits"},
    "institution": {"rounds": 2},
    "links": {"check": "off"},
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768},
}


def main() -> None:
    """Run a lab of processes and write what its broker passed on."""
    experiment = parse(EXPERIMENT)
    messages: list[tuple[float, str, bytes, bool]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        broker.start(directory=Path(name), kind="mosquitto") as served,
    ):
        home, where = Path(name), f"{served.host}:{served.port}"
        file = home / "experiment.toml"
        file.write_text(to_toml(experiment))
        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        begun = time.monotonic()
        client.on_message = lambda _client, _data, message: messages.append(
            (
                round(time.monotonic() - begun, 4),
                message.topic,
                bytes(message.payload),
                message.retain,
            )
        )
        client.connect(served.host, served.port)
        client.subscribe("fs1/#", qos=1)
        client.loop_start()
        roles = (
            ["institution", "--once", "--name", "institution-0"],
            ["device", "--once", *(word for i in range(2) for word in ("--name", f"device-{i}")),
             "--parent", "institution-0", "--slots", "1"],
            ["cloud", str(file), "--runs", str(home / "runs")],
        )  # fmt: skip
        command = [sys.executable, "-m", "fedstrata"]
        processes = [subprocess.Popen([*command, *role, "--broker", where]) for role in roles]
        codes = [process.wait(300) for process in processes]
        client.disconnect()
        client.loop_stop()
    if any(codes):
        raise SystemExit(f"the roles ended with {codes}")
    RECORDING.write_bytes(msgpack.packb({"experiment": experiment.to_json(), "messages": messages}))
    print(f"{len(messages)} messages, {RECORDING.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
