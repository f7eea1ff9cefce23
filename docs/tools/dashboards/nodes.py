"""The dashboards of one institution and of one device, and the panels that every node has."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.panel import (
    BYTES,
    BYTES_PER_SECOND,
    CELSIUS,
    COUNT,
    RATE,
    SECONDS,
    SHARE,
    Panel,
    one,
)

INSTITUTION: Final = 'run="$run", role="institution", node="$node"'
DEVICE: Final = 'run="$run", role="device", parent="$parent", node="$node"'


def phases(of: str) -> list[Panel]:
    """Return panels of a node's time by phase."""
    return [
        Panel(
            "Seconds by phase, so far",
            [(f"fedstrata_phase_seconds_total{{{of}}}", "{{phase}}")],
            (
                "Seconds that this node has spent in each phase of its rounds. They add up to the "
                "duration of the rounds."
            ),
            (
                "Much dispatch or collect: the links. Much train: the devices. Much wait: the "
                "slowest "
                "child."
            ),
            SECONDS,
            stacked=True,
        ),
        Panel(
            "Share of time by phase",
            [(f"rate(fedstrata_phase_seconds_total{{{of}}}{RATE})", "{{phase}}")],
            "Seconds of each phase per second, over the last scrapes: which phase it is in now.",
            "A phase counts when it ends, so gaps and peaks are those of long phases. In a long "
            "gap the node waits: "
            "see `Time without progress`.",
            SHARE,
            stacked=True,
        ),
    ]


def traffic(of: str) -> list[Panel]:
    """Return panels of a node's received and sent bytes."""
    return [
        Panel(
            f"Bytes {direction}, MQTT packets",
            [
                (
                    f"sum by (peer, kind) (rate(fedstrata_message_bytes_total{{{of}, "
                    f'direction="{direction}"}}{RATE}))',
                    "{{peer}} {{kind}}",
                )
            ],
            f"Bytes per second {direction} by this node, by the other end of the link: models, "
            "extras, control, and "
            "calibration (probe).",
            (
                "At the declared rate of the link, the link decides the duration of the round: a "
                "codec, or a faster link."
            ),
            BYTES_PER_SECOND,
            stacked=True,
        )
        for direction in ("received", "sent")
    ]


def machine(of: str) -> list[Panel]:
    """Return panels of a node's process, which it may share with other nodes, and of its host."""
    here = f"and on (run, instance) fedstrata_run_info{{{of}}}"
    return [
        Panel(
            "CPU of its process, cores",
            [(f"rate(fedstrata_process_cpu_seconds_total{RATE}) {here}", "{{instance}}")],
            (
                "Cores that the node's process and those that it started keep busy. Nodes may "
                "share a "
                "process."
            ),
            (
                "At the number of cores, training or mixing is limited by the processor: fewer "
                "slots, "
                "or another host."
            ),
        ),
        Panel(
            "Memory of its process",
            [(f"fedstrata_process_resident_bytes {here}", "{{instance}}")],
            (
                "Resident memory of the node's process and those that it started; memory that they "
                "share counts in each."
            ),
            "If it grows from round to round, report it with the run's folder. If it is too much: "
            "fewer slots, or a "
            "lower `transfer.resident_mb`.",
            BYTES,
        ),
        Panel(
            "Temperature of its host",
            [(f"fedstrata_host_temperature_celsius {here}", "{{sensor}}")],
            (
                "Temperatures of the host's thermal zones. Empty where Linux knows none, as in "
                "most "
                "virtual machines."
            ),
            "A Raspberry Pi throttles from 80 °C on, and its training takes longer: cool it.",
            CELSIUS,
        ),
        Panel(
            "GPUs of its host",
            [(f"fedstrata_gpu_busy_ratio {here}", "GPU {{gpu}}")],
            (
                "Share of NVML's last sample period in which each NVIDIA GPU of the host had "
                "work, by "
                "any process."
            ),
            (
                "Near 0 while devices train: models are too small for a GPU, or data loading "
                "limits. "
                "Try vmapped training."
            ),
            SHARE,
            most=1,
        ),
    ]


PROGRESS: Final = (
    "Seconds since each child for which the open round waits last moved bytes or trained a step.",
    "At `transfer.idle_s` the child is given up. Look at its process, its host and its link.",
)
LOSS: Final = (
    "If it grows: lower the learning rate. If it stays: compare this node's data with "
    "that of others."
)
REFUSED: Final = (
    "Its parent's log has each reason. Versions or experiments that differ are the usual one."
)

ONE_INSTITUTION: Final = [
    one(
        "Rounds",
        f"fedstrata_round{{{INSTITUTION}}}",
        "Local rounds that this institution has closed.",
        "If it stands still, `Time without progress` names the child that it waits for.",
    ),
    one(
        "Epochs",
        f"fedstrata_epochs{{{INSTITUTION}}}",
        "Local epochs of its present round, as its parent assigned them.",
        (
            "Not what the experiment has: epoch control (Tempo) at the cloud decides it from the "
            "measured seconds."
        ),
    ),
    one(
        "Training loss",
        f"fedstrata_train_loss{{{INSTITUTION}}}",
        "Mean training loss of the last epoch below this institution, weighted by samples.",
        LOSS,
    ),
    one(
        "Children present",
        f"sum (fedstrata_child_up{{{INSTITUTION}}})",
        "Children of this institution that are present now.",
        "Fewer than it has: `Children present` below has the names.",
    ),
    one(
        "Refused models",
        f"fedstrata_refused_models_total{{{INSTITUTION}}}",
        (
            "Uploads that this institution has refused since its start: damaged, unfit, or not "
            "finite."
        ),
        REFUSED,
    ),
    one(
        "Late results",
        f"fedstrata_late_results_total{{{INSTITUTION}}}",
        "Results that arrived after their round had closed, so that their training was in vain.",
        "Raise `deadline_s` or `quorum`, or give slow devices fewer samples.",
    ),
    *phases(INSTITUTION),
    *traffic(INSTITUTION),
    Panel(
        "Training loss",
        [
            (f"fedstrata_train_loss{{{INSTITUTION}}}", "mean"),
            ('fedstrata_train_loss{run="$run", parent="$node"}', "{{node}}"),
        ],
        "Training loss of the last epoch of each child, and their mean weighted by samples.",
        "A child far above the others has other data, or labels that are wrong.",
    ),
    Panel(
        "Children present",
        [(f"fedstrata_child_up{{{INSTITUTION}}}", "{{peer}}")],
        (
            "Each child's presence: 1 present, 0 lost or failed. Children that never came are not "
            "shown."
        ),
        (
            "A child that comes and goes: its Wi-Fi, its power, or its memory. Its own dashboard "
            "has "
            "reconnects."
        ),
        stacked=True,
    ),
    Panel(
        "Time without progress",
        [(f"fedstrata_idle_seconds{{{INSTITUTION}}}", "{{peer}}")],
        *PROGRESS,
        SECONDS,
    ),
    Panel(
        "Links of its children: measured rate, relative to the declared rate",
        [
            (
                f"fedstrata:link_measured:ratio{{{INSTITUTION}}}",
                ("{{peer}} {{direction}} by {{source}}"),
            )
        ],
        (
            "Rate of each child's link by calibration before the run, and by its last model of 8 "
            "chunks or more."
        ),
        "Models far below 100 %: declare what the link carries, or find what slows it. A "
        "calibration alone may have "
        "been delayed by other load.",
        SHARE,
        "bargauge",
    ),
    *machine(INSTITUTION),
]

ONE_DEVICE: Final = [
    one(
        "Rounds",
        f"fedstrata_round{{{DEVICE}}}",
        "Tasks that this device has trained.",
        (
            "If it stands still while others go on, it was not selected, or it is lost: see its "
            "parent's dashboard."
        ),
    ),
    one(
        "SGD steps",
        f"fedstrata_sgd_steps_total{{{DEVICE}}}",
        "Steps of SGD that this device has made since its process began.",
        "Far fewer than others': it has fewer samples, or is selected less often.",
    ),
    one(
        "Training loss",
        f"fedstrata_train_loss{{{DEVICE}}}",
        "Mean training loss of its last epoch.",
        LOSS,
    ),
    one(
        "Epochs",
        f"fedstrata_epochs{{{DEVICE}}}",
        "Local epochs of its last task.",
        "Not what the experiment has: epoch control (Tempo) at the cloud decides it.",
    ),
    one(
        "Round-trip time",
        f"fedstrata_rtt_seconds{{{DEVICE}}}",
        "Round-trip time to the broker's host, smoothed by the kernel.",
        (
            "Much more than a ping when idle: queues in the network are full. A shaped link has "
            "its "
            "own delay."
        ),
        unit=SECONDS,
    ),
    one(
        "Reconnects",
        f"fedstrata_reconnects_total{{{DEVICE}}}",
        "Connections to the broker that broke or failed since the process began.",
        (
            "More than one or two: the network drops it, or the broker is restarted. Its log has "
            "each "
            "reason."
        ),
    ),
    *phases(DEVICE),
    *traffic(DEVICE),
    Panel(
        "Training loss",
        [(f"fedstrata_train_loss{{{DEVICE}}}", "loss")],
        "Mean training loss of the last epoch of each task.",
        LOSS,
    ),
    Panel(
        "Steps",
        [(f"rate(fedstrata_sgd_steps_total{{{DEVICE}}}{RATE})", "steps per second")],
        (
            "Steps of SGD per second, averaged over training and waiting; they count at the end "
            "of a "
            "task."
        ),
        (
            "Slower from task to task: the host is hot or busy (see below). Emulated hardware "
            "adds a "
            "pause on purpose."
        ),
        COUNT,
    ),
    *machine(DEVICE),
]
