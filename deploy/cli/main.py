"""The command `fedstrata`: one sub-command for each role, and `run` for a whole lab on this
machine.

Standard output has data, standard error has messages. Exit codes: 0 done, 1 run failed, 2 usage, 3
connection or login, 4 invalid experiment, 5 timed out without progress, 6 file or folder of this
machine, 130 interrupted.

Each command imports what it needs when it runs: a cloud or an institution never loads torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

# One BLAS thread per role: equal sums on every machine, and no idle threads on small ones.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.deploy.cli import data, inspection, lab, links, roles
from fedstrata.deploy.cli.audit import audit
from fedstrata.deploy.cli.check import check
from fedstrata.deploy.cli.chosen import (
    Resume,
    already_finished,
    kept_once_begun,
    tree_of,
    warn_of_direct,
)
from fedstrata.deploy.cli.doctor import doctor
from fedstrata.deploy.cli.export import export
from fedstrata.deploy.cli.new import new
from fedstrata.deploy.cli.plan import plan
from fedstrata.deploy.cli.serving import METRICS, Insecure, MetricsAddress, check_metrics
from fedstrata.deploy.cli.sweep import sweep
from fedstrata.deploy.cli.watch import watch
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.options import (
    Accelerator,
    LabOption,
    Output,
    Overrides,
    Runs,
    refuse,
    refuse_given,
    with_records,
)
from fedstrata.deploy.console.reporting import Commands, StandardOutput, reporting
from fedstrata.deploy.console.shipped import OptionalExperimentFile
from fedstrata.deploy.console.stages import stages

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment

app = typer.Typer(
    name="fedstrata",
    cls=Commands,
    help=(
        "Hierarchical federated learning on real networks: cloud, institutions and devices over "
        "MQTT."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("fedstrata"))
        raise typer.Exit


@app.callback()
def _root(
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="FEDSTRATA_LOG")
    ] = "warning",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(
            help="Standard error: text, or one JSON object per line.", envvar="FEDSTRATA_LOG_FORMAT"
        ),
    ] = "text",
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
) -> None:
    try:
        logs.begin(log_level, json_lines=log_format == "json")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run, in whichever mode."""

    runs: Runs = Path("runs")
    resume: Resume = None
    output: Output = "table"
    accelerator: Accelerator = None
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --simulate: trainings at once.  [default: as cores]",
            show_default=False,
        ),
    ] = None
    speeds: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help=(
                "With --simulate: a new run has machines as fast as in this run.  [default: "
                "measured]"
            ),
            show_default=False,
        ),
    ] = None

    @property
    def json_lines(self) -> bool:
        """Whether standard output has the run's events."""
        return self.output == "json"

    def again(self, mode: str) -> list[str]:
        """Return the command that resumes a run of this process, without its folder."""
        on = ["--accelerator", self.accelerator] if self.accelerator not in (None, "cpu") else []
        return ["fedstrata", "run", mode, *on]


@with_records
def run(
    context: typer.Context,
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Print the effective experiment and exit.")] = False,
    direct: Annotated[
        bool,
        typer.Option(
            "--direct",
            help=(
                "Without a network: all roles in this process, devices in turn (on a GPU vmapped)."
            ),
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="In virtual time: real training, simulated machines and links."
        ),
    ] = False,
    lab: LabOption = DEFAULT_LAB,
    metrics: MetricsAddress = METRICS,
    insecure: Insecure = False,
    *,
    own: RunOptions,
) -> None:
    """Run a whole lab on this machine: broker, cloud, institutions and devices, as processes or all
    in this one.
    """
    from fedstrata.common.experiment.reading import parse, to_toml
    from fedstrata.deploy.local.beforehand import check_lab
    from fedstrata.deploy.local.process_lab import LocalLab

    here = direct or simulate
    resume = own.resume
    refuse(
        own.accelerator is not None and not here,
        "--accelerator",
        "valid only with --direct or --simulate",
    )
    refuse(own.workers is not None and not simulate, "--workers", "valid only with --simulate")
    refuse(own.speeds is not None and not simulate, "--speeds", "valid only with --simulate")
    if here:
        refuse_given(
            context, ("lab", "metrics", "insecure"), "valid only without --direct and --simulate"
        )
    refuse(direct and simulate, "--direct", "valid only without --simulate")
    with reporting():
        if not dry_run and already_finished(
            experiment, overrides, resume, direct=direct, simulated=simulate, output=own.output
        ):
            return
        chosen = parse(tree_of(experiment, overrides, resume))
        if dry_run:
            text = f"{chosen.to_json()}\n" if own.json_lines else to_toml(chosen)
            typer.echo(text, nl=False)
            return
        home = own.runs if resume is None else None
        check_lab(chosen, home, direct=here)
        check_metrics(metrics)
        if simulate:
            _run_simulated(chosen, own)
            return
        if direct:
            _run_direct(chosen, own)
            return
        code = LocalLab(
            chosen,
            runs=own.runs,
            resume=resume,
            json_lines=own.json_lines,
            lab=lab,
            metrics=[metrics, *["--insecure"] * insecure],
        ).run()
    raise typer.Exit(code)


def broker(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            help="Port to listen on.  [default: 1883, by TLS 8883]",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        Literal["auto", "mosquitto", "embedded"], typer.Option(help="Kind of broker.")
    ] = "auto",
    password_file: Annotated[
        Path | None,
        typer.Option(
            help="Logins, written by mosquitto_passwd; for the embedded broker by `htpasswd -B`."
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="PEM file of the broker's certificate: listen by TLS.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its key.")] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(help="PEM file of the authority of which clients need a certificate."),
    ] = None,
    tls_crl: Annotated[
        str | None,
        typer.Option(
            help="PEM file of the certificates that this authority has revoked, for mosquitto."
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="Access rules in the broker's own form, as `provision` writes them."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Let everybody on the network use the broker, unencrypted."
        ),
    ] = False,
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one.

    On other addresses than this machine's own it needs logins or clients' certificates, and TLS, or
    --insecure.
    """
    from fedstrata.common.net import address, tls
    from fedstrata.deploy.brokers.broker import run_foreground
    from fedstrata.deploy.brokers.guard import Guard, check_readable

    with reporting():
        for option, value, needed, given in (
            ("--tls-key", tls_key, "--tls-cert", tls_cert),
            ("--tls-ca", tls_ca, "--tls-cert", tls_cert),
            ("--tls-crl", tls_crl, "--tls-ca", tls_ca),
        ):
            if value and not given:
                raise InvalidExperiment(
                    option, value, f"of no use without {needed}", f"Give {needed}, too."
                )
        own = tls.Tls(tls_ca, tls_cert, tls_key, tls_crl) if tls_cert else None
        if own is not None:
            own.server_context(clients=tls.REQUIRED)  # names files that cannot be used
        guard = Guard(password_file, own, rules)
        for option, path in (("--password-file", password_file), ("--rules", rules)):
            if path is not None:
                check_readable(option, path)
        guard.check_reach(host, insecure=insecure)
        number = port or (tls.PORT if own else address.PORT)
        run_foreground(host=host, port=number, kind=kind, guard=guard)


def _run_direct(chosen: Experiment, own: RunOptions) -> None:
    from fedstrata.cloud.run_folder import RunFolder
    from fedstrata.common.host.memory import keep_large_buffers
    from fedstrata.deploy.local.direct import run_in_process
    from fedstrata.deploy.results.kept import cost_noted
    from fedstrata.deploy.watching.showing import show
    from fedstrata.device.pool.pool import is_cpu

    accelerator = own.accelerator or "cpu"
    resume = own.resume
    if not is_cpu(accelerator):
        from fedstrata.common.learning.computing import resolve_accelerator

        resolve_accelerator(accelerator)
    keep_large_buffers()
    if resume is None:
        warn_of_direct([chosen])
    if resume:
        folder = RunFolder.reopen(resume, direct=True)
    else:
        folder = RunFolder.create(own.runs, chosen, direct=True)
    with (
        kept_once_begun(folder, own.again("--direct")),
        cost_noted(folder),
        show(chosen, json_lines=own.json_lines) as observe,
    ):
        run_in_process(folder, resume=resume is not None, accelerator=accelerator, observe=observe)


def _run_simulated(chosen: Experiment, own: RunOptions) -> None:
    """Run, or resume, an experiment in virtual time. Raises FedstrataError, KeyboardInterrupt."""
    from fedstrata.cloud.run_folder import SIMULATED, RunFolder
    from fedstrata.common.host.memory import keep_large_buffers
    from fedstrata.deploy.planning.machine_speed import load_line
    from fedstrata.deploy.planning.simulated_run import STAGES, machine_speeds, simulated_run
    from fedstrata.deploy.results.kept import cost_noted
    from fedstrata.deploy.results.run import Run
    from fedstrata.deploy.simulation.virtual_run import check_simulated
    from fedstrata.deploy.watching.showing import show

    check_simulated(chosen)
    keep_large_buffers()
    # the cloud's events are shown, not each node's
    logging.getLogger(logs.ACTIVITY).setLevel(logging.WARNING)
    if own.resume is None:
        with stages(STAGES) as begin:
            facts = machine_speeds(chosen, of=own.speeds, runs=own.runs, begin=begin)
        if facts.get("load", {}).get("busy"):
            logs.write_line(
                load_line(facts["load"], facts["speeds"]["share"]).strip(), level=logging.WARNING
            )
        folder = RunFolder.create(own.runs, chosen, simulated=facts)
    else:
        facts = Run(own.resume).manifest[SIMULATED]
        folder = RunFolder.reopen(own.resume, simulated=True)
    run = simulated_run(folder, facts, accelerator=own.accelerator or "cpu", workers=own.workers)
    with (
        kept_once_begun(folder, own.again("--simulate")),
        cost_noted(folder),
        show(chosen, json_lines=own.json_lines, clock=run.now) as observe,
    ):
        run.run(observe)


# Commands and groups of commands, as `--help` has them.
GROUPS: Final[Mapping[str, Sequence[Callable[..., None] | tuple[str, typer.Typer]]]] = {
    "Run": (run, sweep, plan, inspection.replay, inspection.experiments),
    "Look": (watch, inspection.report, inspection.compare, audit, export, ("runs", inspection.app)),
    "Lab": (
        *(roles.cloud, roles.institution, roles.device, broker, lab.provision, doctor),
        *(("lab", lab.app), ("links", links.app)),
    ),
    "Own code": (new, check, ("data", data.app)),
}
for title, members in GROUPS.items():
    for member in members:
        if isinstance(member, tuple):
            app.add_typer(member[1], name=member[0], rich_help_panel=title)
        else:
            app.command(rich_help_panel=title)(member)


def main() -> None:
    """Run the command line."""
    if (out := sys.stdout) is not None:  # it may be closed
        sys.stdout = StandardOutput(
            out.buffer,
            encoding=out.encoding,
            errors=out.errors,
            line_buffering=bool(out.line_buffering),
        )
    app()
