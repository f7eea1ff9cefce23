"""The dashboard of a run's links: what each carries, and what it should carry."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.panel import BYTES, BYTES_PER_SECOND, RATE, SECONDS, SHARE, Panel

_RECEIVED: Final = 'fedstrata:received_bytes:rate1m{run="$run"'
FULL: Final = (
    "At the declared rate for long, this link decides the duration of rounds: use a "
    "codec, or a faster link."
)

LINKS: Final = [
    Panel(
        "Received by tier, over a minute",
        [(f"sum by (tier) ({_RECEIVED}}})", "{{tier}}")],
        "Bytes per second that arrive in each tier, both directions, link calibration included.",
        "Nothing for longer than devices train: see `Time without progress` of the lab.",
        BYTES_PER_SECOND,
        stacked=True,
    ),
    Panel(
        "Received by tier and node, over a minute",
        [(f"sum by (tier, node) ({_RECEIVED}}})", "{{tier}} {{node}}")],
        "The same by the node that receives.",
        FULL,
        BYTES_PER_SECOND,
    ),
    Panel(
        "Up to $parent, over a minute",
        [(f'sum by (peer) ({_RECEIVED}, tier="$tier", node="$parent"}})', "{{peer}}")],
        "Bytes per second that the chosen parent receives from each child of the chosen tier.",
        FULL,
        BYTES_PER_SECOND,
    ),
    Panel(
        "Down from $parent, over a minute",
        [(f'sum by (node) ({_RECEIVED}, tier="$tier", peer="$parent"}})', "{{node}}")],
        "Bytes per second that each child of the chosen tier receives from the chosen parent.",
        FULL,
        BYTES_PER_SECOND,
    ),
    Panel(
        "Measured rate, relative to the declared rate",
        [
            (
                'fedstrata:link_measured:ratio{run="$run"}',
                ("{{tier}} {{peer}}, {{direction}} by its parent, {{source}}"),
            )
        ],
        (
            "Rate of each link by calibration before the run, and by the last model of 8 chunks or "
            "more that came up."
        ),
        "Models far below 100 %: declare what the link carries, or find what slows it; "
        "`LinkBelowProfile` fires. A "
        "calibration alone may have been delayed by other load.",
        SHARE,
        "bargauge",
    ),
    Panel(
        "Declared rate",
        [
            (
                'fedstrata_link_declared_bytes_per_second{run="$run"}',
                "{{tier}} {{peer}}, {{direction}} by its parent",
            )
        ],
        (
            "Rate of each link in the experiment. Links without a declared rate are unlimited, and "
            "not shown."
        ),
        "If it is not what you meant, see `[links]` in the run's `experiment.toml`.",
        BYTES_PER_SECOND,
        "bargauge",
    ),
    # at the child, whose connection has this link only; a parent has `fedstrata_nodes` of the tier
    # below it
    Panel(
        "Three byte counts by tier, both directions",
        [
            (
                f'sum by (tier) (fedstrata_{count}_bytes_total{{run="$run"}}'
                ' unless on (run, tier, node) fedstrata_nodes{run="$run"})',
                f"{{{{tier}}}} {count}",
            )
            for count in ("payload", "message", "wire")
        ],
        (
            "Bytes at the children: blobs and message bodies (payload), whole MQTT packets "
            "(message), "
            "and TCP (wire)."
        ),
        (
            "Wire far above message: losses, or very small messages. It is absent where the kernel "
            "does not count it."
        ),
        BYTES,
    ),
    Panel(
        "TCP retransmissions",
        [('fedstrata:retransmitted:ratio_rate1m{run="$run"}', "{{node}} ({{peer}})")],
        "Retransmitted share of the bytes that each node sent, over a minute.",
        "More than a few per cent: losses by Wi-Fi or a full queue. Measure the path with iperf3.",
        SHARE,
    ),
    Panel(
        "Round-trip time to the broker",
        [('fedstrata_rtt_seconds{run="$run"}', "{{node}} ({{peer}})")],
        "Round-trip time of each connection to the broker's host, smoothed by the kernel.",
        (
            "If it grows under load, a queue in the network is too long; shape below its rate "
            "(`links`)."
        ),
        SECONDS,
    ),
    Panel(
        "Repeated chunks, and messages dropped by brokers",
        [
            (
                f'sum by (role) (rate(fedstrata_chunks_repeated_total{{run="$run"}}{RATE}))',
                "repeated, {{role}}",
            ),
            (
                f'max by (broker) (rate(fedstrata_broker_dropped_messages_total{{run="$run"}}{RATE}))',
                "dropped, {{broker}}",
            ),
        ],
        (
            "Chunks of models that were published again, and messages that mosquitto dropped, per "
            "second."
        ),
        (
            "A broker that drops: raise its `max_queued_messages` or `max_queued_bytes`, or lower "
            "`transfer.window`."
        ),
    ),
]
