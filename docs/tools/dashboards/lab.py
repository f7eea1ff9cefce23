"""The dashboard of a lab's run: how far it is, how good, what it waits for, and its hosts."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.nodes import phases
from docs.tools.dashboards.panel import (
    BYTES,
    COUNT,
    JOULES,
    RATE,
    SECONDS,
    SHARE,
    WATTS,
    Panel,
    one,
)

CLOUD: Final = 'run="$run", role="cloud"'
PARTS: Final = "max by (host, source, part)"  # each process of a host reports the same
RUNS: Final = (
    "max by (run, experiment, algorithm, folder) "
    '(last_over_time(fedstrata_run_info{role="cloud"}[$__range]))'
    " * on (run) group_left (state) max by (run, state) "
    "(last_over_time(fedstrata_run_state[$__range]) == 1)"
)

LAB: Final = [
    Panel(
        "Runs in this time range",
        [(RUNS, "{{state}}: {{run}} {{experiment}}, {{algorithm}}")],
        "The runs whose cloud was scraped in this time range: state, id, experiment and the "
        "cloud's algorithm. "
        "Click one for its report, if `fedstrata report` made it and a web server at `reports` "
        "has the folder of runs.",
        "`running` although its cloud is gone: it was killed, and `fedstrata cloud --resume "
        "FOLDER` continues it, and "
        "an `interrupted` one. `failed`: `fedstrata runs list` has the reason.",
        COUNT,
        "stat",
        width=24,
        link=("Report", "${reports:raw}/${__field.labels.folder}/report.html"),
    ),
    one(
        "Global round",
        f"fedstrata_round{{{CLOUD}}}",
        "Global rounds that the cloud has closed, of the whole run.",
        "If it stands still, `Time without progress` names the child that it waits for.",
    ),
    one(
        "Test accuracy",
        f"fedstrata_accuracy_ratio{{{CLOUD}}}",
        "Accuracy of the global model on the test set, from the last evaluation.",
        (
            "If it is that of guessing, see the learning rate, and the share of each class on the "
            "devices."
        ),
        unit=SHARE,
    ),
    one(
        "Training time",
        'run:fedstrata_training_seconds:sum{run="$run"}',
        "Seconds of all closed global rounds: the last `elapsed_s` of `rounds.csv`.",
        "`Seconds by phase` shows where it goes.",
        unit=SECONDS,
    ),
    Panel(
        "Bytes by tier, both directions",
        [('tier:fedstrata_received_bytes:sum{run="$run"}', "{{tier}}")],
        (
            "MQTT packets that arrived in each tier, without link calibration: the numbers of "
            "`links.csv`."
        ),
        (
            "Fewer bytes: a codec (`transfer.wan`, `transfer.lan`), fewer local rounds, or client "
            "selection."
        ),
        BYTES,
        "stat",
        width=8,
    ),
    one(
        "Alerts",
        'count(ALERTS{alertstate="firing"}) or vector(0)',
        (
            "Alerts that fire now, of all runs of this Prometheus. `RunFinished` is one for five "
            "minutes."
        ),
        "Prometheus' page Alerts has their names, and what to do in each description.",
    ),
    Panel(
        "Test accuracy",
        [(f"fedstrata_accuracy_ratio{{{CLOUD}}}", "accuracy")],
        "Accuracy of the global model on the test set, after each evaluation.",
        (
            "If it falls or jumps: lower the learning rate or the local epochs; on skewed data "
            "compare another algorithm."
        ),
        SHARE,
        width=8,
        most=1,
    ),
    Panel(
        "Test score",
        [(f"fedstrata_score{{{CLOUD}}}", "{{score}}")],
        (
            "Score of the global model on the test set, after each evaluation, by the name in "
            "`score.name`."
        ),
        (
            "If it does not improve: another learning rate. Some scores are better when they are "
            "lower."
        ),
        width=8,
        least=None,
    ),
    Panel(
        "Score over devices",
        [(f"fedstrata_devices_score{{{CLOUD}}}", "{{statistic}}")],
        "Where devices score models (`evaluation.at`): the mean over devices, that of the worst "
        "tenth of them, and "
        "the standard deviation.",
        (
            "If the worst tenth stays behind: `devices.csv` names them. A fairer rule helps: "
            "`qfedavg`."
        ),
        width=8,
        least=None,
    ),
    Panel(
        "Epsilon",
        [(f"fedstrata_privacy_epsilon{{{CLOUD}}}", "{{tier}}, {{unit}}")],
        "Where a tier has privacy: epsilon of its worst unit so far, by the accountant.",
        (
            "At `max_epsilon` the run ends. More noise, Poisson sampling or fewer global rounds "
            "make "
            "it smaller."
        ),
        width=8,
    ),
    Panel(
        "Score of devices' own models",
        [(f"fedstrata_personalised_score{{{CLOUD}}}", "{{statistic}}")],
        (
            "Where devices score the models that they train (`evaluation.personalised`): as the "
            "score "
            "over devices."
        ),
        (
            "If it is far above the score over devices: the devices' data differ. Personal parts "
            "of "
            "the model may pay."
        ),
        width=8,
        least=None,
    ),
    Panel(
        "Attacks",
        [
            (f"fedstrata_attack_success{{{CLOUD}}}", "{{column}}: {{attack}}"),
            (f"fedstrata_honest_score{{{CLOUD}}}", "score of honest devices, {{statistic}}"),
        ],
        (
            "Where an experiment has adversaries: the share of an attack's own test samples that "
            "the global model takes as the attack wants, and the score over the devices that are "
            "no adversaries."
        ),
        (
            "If the success grows while the score stays: the attack goes unseen. Compare a robust "
            "rule; `devices.csv` counts whom a rule has refused."
        ),
        width=8,
        least=None,
    ),
    Panel(
        "Loss",
        [
            (f"fedstrata_test_loss{{{CLOUD}}}", "test"),
            (f"fedstrata_train_loss{{{CLOUD}}}", "training, cloud"),
            ('fedstrata_train_loss{run="$run", role="institution"}', "training, {{node}}"),
        ],
        (
            "Loss of the global model on the test set, and the mean training loss of the last "
            "epoch "
            "below each node."
        ),
        "A training loss that grows: lower the learning rate. One that falls while the test loss "
        "grows: local models "
        "overfit, train fewer epochs.",
        width=8,
    ),
    *phases(CLOUD),
    Panel(
        "Nodes by tier and state",
        [('sum by (tier, state) (fedstrata_nodes{run="$run"}) > 0', "{{tier}} {{state}}")],
        "Children of all parents by the state of their presence.",
        (
            "`lost` or `failed`: its parent's log and `fedstrata lab status` have the reason. "
            "`absent`: it never came."
        ),
        stacked=True,
        width=8,
    ),
    Panel(
        "Children by parent and state",
        [('sum by (node, state) (fedstrata_nodes{run="$run"}) > 0', "{{node}} {{state}}")],
        "The same by parent: whether one site is concerned, or all.",
        "If one parent loses all children, look at its broker and its network.",
        stacked=True,
        width=8,
    ),
    Panel(
        "Training devices by parent",
        [
            (
                f'sum by (parent) (rate(fedstrata_phase_seconds_total{{run="$run", role="device", '
                f'phase="train"}}{RATE}))',
                "{{parent}}",
            )
        ],
        "How many devices train at the same time, on average: seconds of training per second.",
        (
            "Far below the number of devices: they wait for models, for an accelerator, or for the "
            "slowest."
        ),
        stacked=True,
        width=8,
    ),
    Panel(
        "Epochs of the cloud's children",
        [(f"fedstrata_epochs{{{CLOUD}}}", "{{node}}")],
        "Local epochs that the cloud assigns to each of its children in this global round.",
        (
            "With Tempo they differ by speed. At 1 for all, no child is faster than the slowest: "
            "check the links."
        ),
        width=8,
    ),
    Panel(
        "Time without progress",
        [('max by (peer) (fedstrata_idle_seconds{run="$run"})', "{{peer}}")],
        (
            "Seconds since each child for which an open round waits last moved bytes or trained a "
            "step."
        ),
        (
            "At `transfer.idle_s` the child is given up. Look at its process, its host and its "
            "link "
            "before that."
        ),
        SECONDS,
        width=8,
    ),
    Panel(
        "Reachable roles",
        [('sum by (role) (up{run="$run"})', "{{role}}")],
        (
            "Processes that Prometheus scrapes successfully. Several devices in one process count "
            "once."
        ),
        (
            "If it falls while the run goes on, `RoleDown` names the process: see its log, or the "
            "network to it."
        ),
        stacked=True,
        width=8,
    ),
    Panel(
        "Broker's memory",
        [
            ('max by (broker) (fedstrata_broker_heap_bytes{run="$run"})', "{{broker}}"),
            ("fedstrata:broker_heap_bound_bytes", "bound"),
        ],
        (
            "Memory that mosquitto has allocated, as it publishes every ten seconds, and the "
            "bound in "
            "`rules.yml`."
        ),
        (
            "Near the bound: a subscriber is too slow. Lower `transfer.window`, or give the broker "
            "more memory."
        ),
        BYTES,
        width=8,
    ),
    Panel(
        "CPU of hosts",
        [("host:fedstrata_cpu_busy:ratio_rate1m", "{{host}}")],
        "Busy share of all cores of each host, by all its processes, over a minute.",
        "At 100 % on a host of several roles, its seconds are not those of separate machines: use "
        "more hosts, or fewer "
        "slots.",
        SHARE,
        width=8,
        most=1,
    ),
    Panel(
        "Free memory of hosts",
        [("host:fedstrata_memory_available:ratio", "{{host}}")],
        "Memory that processes of each host can still get.",
        (
            "Near 0 the kernel kills processes: fewer devices or slots on that host, or a lower "
            "`transfer.resident_mb`."
        ),
        SHARE,
        width=8,
        most=1,
    ),
    Panel(
        "Power of devices",
        [
            (
                f'sum by (node) (rate(fedstrata_device_energy_joules_total{{run="$run"}}{RATE}))',
                "{{node}}",
            )
        ],
        "Each device's share of its host's power, counted with its results.",
        (
            "Empty: start devices with `--energy`, or on hosts with a counter. A run's joules are "
            "in "
            "`devices.csv`."
        ),
        WATTS,
        width=8,
        stacked=True,
    ),
    Panel(
        "Power of hosts",
        [
            (
                f"sum by (host, source) ({PARTS} (rate(fedstrata_energy_joules_total{RATE})))",
                "{{host}} {{source}}",
            )
        ],
        (
            "Power of each host's processors (rapl), GPUs (nvml), rails (pmic), or of all of it "
            "(plug), by all processes."
        ),
        (
            "Empty: the host has no such counter, or fedstrata may not read it (the page of "
            "metrics "
            "has the remedy)."
        ),
        WATTS,
        width=8,
    ),
    Panel(
        "Energy in this time range",
        [
            (
                f"sum by (host, source) ({PARTS} "
                "(increase(fedstrata_energy_joules_total[$__range])))",
                "{{host}} {{source}}",
            )
        ],
        "Energy of each host in this time range, by source: of all its processes, not fedstrata "
        "alone. A plug has all "
        "that the others have. Choose the run's time as the range.",
        (
            "Compare only hosts with the same sources, and subtract what the host takes when it is "
            "idle."
        ),
        JOULES,
        "bargauge",
        width=8,
    ),
    Panel(
        "Disk of spools and runs",
        [
            ("max by (host, folder) (fedstrata_disk_used_bytes)", "{{host}} {{folder}}, used"),
            ("min by (host, folder) (fedstrata_disk_free_bytes)", "{{host}} {{folder}}, free"),
        ],
        "Disk that the files in the folders of spools and runs take, counted once a minute, and "
        "what their file "
        "systems have left.",
        "A full disk stops the run. Remove old runs, or name another folder (`--runs`, `--spool`).",
        BYTES,
        width=8,
    ),
]
