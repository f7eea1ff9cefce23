"""The dashboard that lays two runs beside each other."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.panel import BYTES, COUNT, SECONDS, SHARE, Panel

BOTH: Final = 'run=~"$run_a|$run_b"'
RANGE: Final = "The time range must contain both runs."

COMPARE: Final = [
    Panel(
        "Global rounds",
        [(f'fedstrata_round{{{BOTH}, role="cloud"}}', "{{run}}")],
        f"Closed global rounds of both runs over time. {RANGE}",
        "A gap is a cloud that was not running. A flat line is a round that waits.",
    ),
    Panel(
        "Test accuracy",
        [(f'fedstrata_accuracy_ratio{{{BOTH}, role="cloud"}}', "{{run}}")],
        f"Test accuracy of both global models over time. {RANGE}",
        (
            "`fedstrata compare` has the same over rounds, seconds and bytes, with the seconds to "
            "a "
            "target."
        ),
        SHARE,
        most=1,
    ),
    Panel(
        "Worst tenth of devices",
        [(f'fedstrata_devices_score{{{BOTH}, role="cloud", statistic="worst"}}', "{{run}}")],
        f"Where devices score models: the mean score of the worst tenth of them. {RANGE}",
        "`fedstrata report` of both runs has the whole distribution.",
        least=None,
    ),
    *(
        Panel(
            title,
            [(f"max by (run{more}) (max_over_time({expr}[$__range]))", legend)],
            shows,
            remedy,
            unit,
            "bargauge",
        )
        for title, expr, more, legend, unit, shows, remedy in (
            (
                "Best accuracy",
                f'fedstrata_accuracy_ratio{{{BOTH}, role="cloud"}}',
                "",
                "{{run}}",
                SHARE,
                "Highest test accuracy of each run within the time range.",
                (
                    "Compare runs of several seeds before you conclude: `fedstrata compare` shows "
                    "the "
                    "spread."
                ),
            ),
            (
                "Training time",
                f"run:fedstrata_training_seconds:sum{{{BOTH}}}",
                "",
                "{{run}}",
                SECONDS,
                "Seconds of all closed global rounds of each run.",
                (
                    "Compare only runs on the same hosts and links: `fedstrata compare` names what "
                    "differs."
                ),
            ),
            (
                "Seconds by phase",
                f'fedstrata_phase_seconds_total{{{BOTH}, role="cloud"}}',
                ", phase",
                "{{run}} {{phase}}",
                SECONDS,
                "Seconds of the cloud in each phase of its global rounds.",
                (
                    "The phase with the largest difference is the cause: links (dispatch, "
                    "collect) or "
                    "devices (train, wait)."
                ),
            ),
            (
                "Bytes by tier, both directions",
                f"tier:fedstrata_received_bytes:sum{{{BOTH}}}",
                ", tier",
                "{{run}} {{tier}}",
                BYTES,
                "MQTT packets that arrived in each tier, without link calibration.",
                (
                    "More than expected: other codecs, more local rounds, or models sent again "
                    "after "
                    "losses."
                ),
            ),
            (
                "SGD steps",
                f'fedstrata_sgd_steps_total{{{BOTH}, role="cloud"}}',
                "",
                "{{run}}",
                COUNT,
                "Steps of SGD of all devices of each run.",
                (
                    "If they differ, the runs did not train equally much: epochs, selection, or "
                    "late "
                    "results."
                ),
            ),
        )
    ),
    Panel(
        "Experiments",
        [
            (
                "max by (run, experiment, algorithm, digest) "
                f'(last_over_time(fedstrata_run_info{{{BOTH}, role="cloud"}}'
                "[$__range]))",
                "{{run}}: {{experiment}}, {{algorithm}}, {{digest}}",
            )
        ],
        (
            "Experiment, the cloud's algorithm and the digest of each run. Equal digests: equal "
            "experiments."
        ),
        "If digests differ where they should not, compare the two `experiment.toml`.",
        kind="stat",
        width=24,
    ),
]
