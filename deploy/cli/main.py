"""The command `fedstrata`: one sub-command for each role, and `run` for a whole lab on this machine.

Standard output has data, standard error has messages. Exit codes: 0 done, 1 run failed, 2 usage, 3 connection or
login, 4 invalid experiment, 5 timed out without progress, 6 file or folder of this machine, 130 interrupted.

Each command imports what it needs when it runs: a cloud or an institution never loads torch.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

# One BLAS thread per role: equal sums on every machine, and no idle threads on small ones.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from common.errors import InvalidExperiment
from common.protocol.topics import DEFAULT_LAB
from deploy.cli import data, inspection, lab, links, roles
from deploy.cli.check import check
from deploy.cli.chosen import Resume, already_finished, kept_once_begun, tree_of, warn_of_direct
from deploy.cli.doctor import doctor
from deploy.cli.export import export
from deploy.cli.plan import plan
from deploy.cli.serving import METRICS, Insecure, MetricsAddress, check_metrics
from deploy.cli.sweep import sweep
from deploy.cli.watch import watch
from deploy.console import logs
from deploy.console.options import LabOption, Output, Overrides, Runs
from deploy.console.reporting import Commands, StandardOutput, reporting
from deploy.console.shipped import OptionalExperimentFile
from deploy.console.stages import stages

if TYPE_CHECKING:
    from common.experiment.schema import Experiment

app = typer.Typer(
    name="fedstrata",
    cls=Commands,
    help="Hierarchical federated learning on real networks: cloud, institutions and devices over MQTT.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(data.app, name="data")
app.add_typer(inspection.app, name="runs")
app.add_typer(lab.app, name="lab")
app.add_typer(links.app, name="links")
app.command()(roles.cloud)
app.command()(roles.institution)
app.command()(roles.device)
app.command()(inspection.report)
app.command()(inspection.compare)
app.command()(export)
app.command()(inspection.replay)
app.command()(inspection.experiments)
app.command()(lab.provision)
app.command()(check)
app.command()(doctor)
app.command()(plan)
app.command()(sweep)
app.command()(watch)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("fedstrata"))
        raise typer.Exit


@app.callback()
def _root(
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", envvar="FEDSTRATA_LOG")] = "warning",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Standard error: text, or one JSON object per line.", envvar="FEDSTRATA_LOG_FORMAT"),
    ] = "text",
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    try:
        logs.begin(log_level, json_lines=log_format == "json")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from None


@app.command()
def run(
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Print the effective experiment and exit.")] = False,
    runs: Runs = Path("runs"),
    resume: Resume = None,
    output: Output = "table",
    direct: Annotated[
        bool, typer.Option("--direct", help="Without a network: all roles in this process, devices in turn or vmapped.")
    ] = False,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="With --direct or --simulate: cpu, cuda, cuda:N or auto.  [default: cpu]", show_default=False
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In virtual time: real training, simulated machines and links.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --simulate: trainings at once.  [default: as cores]", show_default=False),
    ] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="With --simulate: a new run has machines as fast as in this run's folder.  [default: measured]",
            show_default=False,
        ),
    ] = None,
    netns: Annotated[
        bool, typer.Option("--netns", help="In network namespaces, with links emulated by the kernel.")
    ] = False,
    one_broker: Annotated[
        bool, typer.Option("--one-broker", help="With --netns: a single broker at the cloud, none at institutions.")
    ] = False,
    no_delay: Annotated[
        bool, typer.Option("--no-delay", help="With --netns: omit the links' delays, which need netem.")
    ] = False,
    lab: LabOption = DEFAULT_LAB,
    metrics: MetricsAddress = METRICS,
    insecure: Insecure = False,
    plan_first: Annotated[
        bool, typer.Option("--plan", help="Predict the run first (`plan --one-host`) and save the prediction with it.")
    ] = False,
) -> None:
    """Run a whole lab on this machine: broker, cloud, institutions and devices, as processes or all in this one."""
    from common.experiment.reading import parse, to_toml
    from deploy.local.beforehand import check_lab
    from deploy.local.lab import LocalLab
    from deploy.local.netns import by_kernel, namespaces
    from deploy.local.network import one_host

    here, new = direct or simulate, resume is None
    for given, option, fits, needed in (
        (one_broker, "--one-broker", netns, "with --netns"),
        (no_delay, "--no-delay", netns, "with --netns"),
        (accelerator is not None, "--accelerator", here, "with --direct or --simulate"),
        (workers is not None, "--workers", simulate, "with --simulate"),
        (speeds is not None, "--speeds", simulate, "with --simulate"),
        (plan_first, "--plan", new and not here, "for a new lab of processes"),
        (metrics != METRICS, "--metrics", not (here or netns), "without --direct, --simulate and --netns"),
        (direct, "--direct", not (simulate or netns), "without --simulate and --netns"),
        (simulate, "--simulate", not netns, "without --netns"),
    ):
        if given and not fits:
            raise typer.BadParameter(f"valid only {needed}", param_hint=option)
    network = partial(namespaces, one_broker=one_broker) if netns else one_host
    with reporting():
        if not dry_run and already_finished(
            experiment, overrides, resume, direct=direct, simulated=simulate, output=output
        ):
            return
        chosen = parse(tree_of(experiment, overrides, resume))
        if netns and resume is None:  # a resumed run keeps its experiment
            chosen = by_kernel(chosen, delays=not no_delay)
        if dry_run:
            typer.echo(f"{chosen.to_json()}\n" if output == "json" else to_toml(chosen), nl=False)
            return
        check_lab(chosen, runs if resume is None else None, direct=direct or simulate)
        check_metrics(metrics)
        if simulate:
            _run_simulated(
                chosen, runs=runs, resume=resume, json_lines=output == "json", accelerator=accelerator or "cpu",
                workers=workers, speeds=speeds,
            )  # fmt: skip
            return
        if direct:
            _run_direct(chosen, runs=runs, resume=resume, json_lines=output == "json", accelerator=accelerator or "cpu")
            return
        found = None
        if plan_first:
            from deploy.planning.predicting import STAGES, Predictor
            from deploy.planning.simulated import Site

            with stages(STAGES) as begin:
                found = Predictor(site=Site.ONE_HOST).predict(chosen, begin=begin, reach=begin.reach)
        code = LocalLab(
            chosen,
            runs=runs,
            resume=resume,
            json_lines=output == "json",
            network=network,
            lab=lab,
            metrics=(metrics, *(("--insecure",) if insecure else ())),
            prediction=found,
        ).run()
    raise typer.Exit(code)


@app.command()
def broker(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Port to listen on.  [default: 1883, by TLS 8883]", show_default=False),
    ] = None,
    kind: Annotated[Literal["auto", "mosquitto", "embedded"], typer.Option(help="Kind of broker.")] = "auto",
    password_file: Annotated[
        Path | None, typer.Option(help="Logins, written by mosquitto_passwd; for the embedded broker by `htpasswd -B`.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file of the broker's certificate: listen by TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its key.")] = None,
    tls_ca: Annotated[
        str | None, typer.Option(help="PEM file of the authority of which clients need a certificate.")
    ] = None,
    tls_crl: Annotated[
        str | None, typer.Option(help="PEM file of the certificates that this authority has revoked, for mosquitto.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="Access rules in the broker's own form, as `provision` writes them.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody on the network use the broker, unencrypted.")
    ] = False,
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one.

    On other addresses than this machine's own it needs logins or clients' certificates, and TLS, or --insecure.
    """
    from common.net import address, tls
    from deploy.brokers.broker import run_foreground
    from deploy.brokers.guard import Guard, check_readable

    with reporting():
        for option, value, needed, given in (
            ("--tls-key", tls_key, "--tls-cert", tls_cert),
            ("--tls-ca", tls_ca, "--tls-cert", tls_cert),
            ("--tls-crl", tls_crl, "--tls-ca", tls_ca),
        ):
            if value and not given:
                raise InvalidExperiment(option, value, f"of no use without {needed}", f"Give {needed}, too.")
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


def main() -> None:
    """Run the command line."""
    if (out := sys.stdout) is not None:  # it may be closed
        sys.stdout = StandardOutput(
            out.buffer, encoding=out.encoding, errors=out.errors, line_buffering=bool(out.line_buffering)
        )
    app()


def _run_direct(chosen: Experiment, *, runs: Path, resume: Path | None, json_lines: bool, accelerator: str) -> None:
    from cloud.results import RunFolder
    from common.host.memory import keep_large_buffers
    from deploy.local.direct import run_in_process
    from deploy.results.kept import cost_noted
    from deploy.watching.showing import show
    from device.pool.pool import is_cpu

    if not is_cpu(accelerator):
        from common.learning.computing import resolve_accelerator

        resolve_accelerator(accelerator)
    keep_large_buffers()
    if resume is None:
        warn_of_direct([chosen])
    folder = RunFolder.reopen(resume, direct=True) if resume else RunFolder.create(runs, chosen, direct=True)
    command = ["fedstrata", "run", "--direct", *(["--accelerator", accelerator] if accelerator != "cpu" else [])]
    with kept_once_begun(folder, command), cost_noted(folder), show(chosen, json_lines=json_lines) as observe:
        run_in_process(folder, resume=resume is not None, accelerator=accelerator, observe=observe)


def _run_simulated(
    chosen: Experiment,
    *,
    runs: Path,
    resume: Path | None,
    json_lines: bool,
    accelerator: str,
    workers: int | None,
    speeds: Path | None,
) -> None:
    """Run, or resume, an experiment in virtual time. Raises FedstrataError, KeyboardInterrupt."""
    from cloud.results import SIMULATED, RunFolder
    from common.host.memory import keep_large_buffers
    from deploy.planning.predicting import load_line
    from deploy.planning.simulated_run import STAGES, machine_speeds, simulated_run
    from deploy.results.kept import cost_noted
    from deploy.results.run import Run
    from deploy.simulation.run import check_simulated
    from deploy.watching.showing import show

    check_simulated(chosen)
    keep_large_buffers()
    logging.getLogger(logs.ACTIVITY).setLevel(logging.WARNING)  # the cloud's events are shown, not each node's
    if resume is None:
        with stages(STAGES) as begin:
            facts = machine_speeds(chosen, of=speeds, begin=begin)
        if facts.get("load", {}).get("busy"):
            logs.write_line(load_line(facts["load"], facts["speeds"]["share"]).strip(), level=logging.WARNING)
        folder = RunFolder.create(runs, chosen, simulated=facts)
    else:
        facts = Run(resume).manifest[SIMULATED]
        folder = RunFolder.reopen(resume, simulated=True)
    run = simulated_run(folder, facts, accelerator=accelerator, workers=workers)
    command = ["fedstrata", "run", "--simulate", *(["--accelerator", accelerator] if accelerator != "cpu" else [])]
    with (
        kept_once_begun(folder, command),
        cost_noted(folder),
        show(chosen, json_lines=json_lines, clock=run.now) as observe,
    ):
        run.run(observe)
