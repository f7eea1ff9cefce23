"""What a role's /metrics says."""

from __future__ import annotations

import urllib.request
from collections import Counter

from common.metrics import Carried, Metrics

NODE = ("institution", "institution-0", "")
LABELS = 'device="",institution="institution-0",role="institution"'


def scrape(metrics: Metrics) -> list[str]:
    port = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


def test_each_connection_has_its_wire_bytes() -> None:
    metrics = Metrics()
    metrics.watch_wire(NODE, "cloud", lambda: Carried(1000, 2000, 30, 0.0125))
    metrics.watch_wire(NODE, "broker", lambda: Carried(4000, 5000, None, 0.0))  # an old kernel, before its first answer
    metrics.watch_wire(("device", "institution-0", "device-0"), "institution-0", lambda: None)
    found = {line for line in scrape(metrics) if line.startswith(("fedstrata_wire", "fedstrata_retr", "fedstrata_rtt"))}
    up, down = (LABELS.replace(",role", f',peer="{peer}",role') for peer in ("cloud", "broker"))
    with_direction = {
        f"fedstrata_wire_bytes_total{{{labels.replace('institution=', f'{word},institution=', 1)}}} {count}"
        for labels, word, count in (
            (up, 'direction="sent"', 1000.0),
            (up, 'direction="received"', 2000.0),
            (down, 'direction="sent"', 4000.0),
            (down, 'direction="received"', 5000.0),
        )
    }
    assert found == with_direction | {
        f"fedstrata_retransmitted_bytes_total{{{up}}} 30.0",
        f"fedstrata_rtt_seconds{{{up}}} 0.0125",
    }


def test_an_institution_has_one_total_of_its_two_connections() -> None:
    metrics = Metrics()
    metrics.watch_total("reconnects", "Broken connections", node=NODE, read=lambda: 2)
    metrics.watch_total("ignored_messages", "None of ours", node=NODE, read=lambda: 1)
    metrics.watch_total("reconnects", "Broken connections", node=NODE, read=lambda: 3)
    lines = scrape(metrics)
    assert f"fedstrata_reconnects_total{{{LABELS}}} 5.0" in lines
    assert f"fedstrata_ignored_messages_total{{{LABELS}}} 1.0" in lines
    assert max(Counter(line.rpartition(" ")[0] for line in lines).values()) == 1  # else Prometheus refuses them
