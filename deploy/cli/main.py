"""The command `fedstrata`: one sub-command for each role, and `run` for a whole lab on this machine.

Standard output has data, standard error has messages. Exit codes: 0 done, 1 run failed, 2 usage, 3 connection or
login, 4 invalid experiment, 5 timed out without progress, 130 interrupted.

Each command imports what it needs when it runs: a cloud or an institution never loads torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

# One BLAS thread per role: equal sums on every machine, and no idle threads on small ones.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from common.experiment.topology import CLOUD
from common.protocol.topics import DEFAULT_LAB
from deploy.cli import data, inspection
from deploy.cli.serving import serve_metrics
from deploy.console import logs
from deploy.console.connecting import ConnectTimeout, LabOption, PasswordFile, Username, run_agent, run_connected
from deploy.console.connecting import address as _address
from deploy.console.options import Output, Overrides, Runs
from deploy.console.reporting import reporting
from deploy.planning.command import plan, predict
from deploy.watching.command import watch

if TYPE_CHECKING:
    from common.experiment.schema import Experiment

SPOOL = "/var/tmp/fedstrata"  # kept when the machine restarts, unlike /tmp

app = typer.Typer(
    name="fedstrata",
    help="Hierarchical federated learning on real networks: cloud, institutions and devices over MQTT.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(data.app, name="data")
app.add_typer(inspection.app, name="runs")
app.command()(inspection.report)
app.command()(inspection.compare)
app.command()(plan)
app.command()(watch)

ExperimentFile = Annotated[Path | None, typer.Argument(help="The experiment, a TOML file.", show_default=False)]
Resume = Annotated[Path | None, typer.Option(help="Resume the run of this folder.", show_default=False)]
BrokerOption = Annotated[str, typer.Option(help="The MQTT broker, host[:port].", envvar="FEDSTRATA_BROKER_ADDRESS")]
SpoolFolder = Annotated[
    str, typer.Option("--spool", help="Folder of partly transferred models, kept after a crash; 'none' = memory.")
]
METRICS = "127.0.0.1:0"
MetricsAddress = Annotated[
    str,
    typer.Option("--metrics", help="Address of /metrics (and of the cloud's /sd), host:port; port 0 = a free one."),
]


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
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Print the effective experiment and exit.")] = False,
    runs: Runs = Path("runs"),
    resume: Resume = None,
    output: Output = "table",
    direct: Annotated[
        bool, typer.Option("--direct", help="Without a network: all roles in this process, devices one after another.")
    ] = False,
    accelerator: Annotated[
        str | None,
        typer.Option(help="With --direct: cpu, cuda, cuda:N or auto.  [default: cpu]", show_default=False),
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
    plan_first: Annotated[
        bool, typer.Option("--plan", help="Predict the run first (`plan --one-host`) and save the prediction with it.")
    ] = False,
) -> None:
    """Run a whole lab on this machine: broker, cloud, institutions and devices, as processes or all in this one."""
    from deploy.local.lab import LocalLab
    from deploy.local.netns import by_kernel, namespaces
    from deploy.local.network import one_host

    for given, option in ((one_broker, "--one-broker"), (no_delay, "--no-delay")):
        if given and not netns:
            raise typer.BadParameter("valid only with --netns", param_hint=option)
    if metrics != METRICS and (direct or netns):
        raise typer.BadParameter("not reachable with --direct or --netns", param_hint="--metrics")
    if direct and netns:
        raise typer.BadParameter("--direct uses no network: use it or --netns", param_hint="--direct")
    if accelerator is not None and not direct:
        raise typer.BadParameter("valid only with --direct", param_hint="--accelerator")
    if plan_first and (direct or resume is not None):
        raise typer.BadParameter("valid only for a new lab of processes", param_hint="--plan")
    network = partial(namespaces, one_broker=one_broker) if netns else one_host
    with reporting():
        chosen = _experiment(experiment, overrides, resume)
        if netns and resume is None:  # a resumed run keeps its experiment
            chosen = by_kernel(chosen, delays=not no_delay)
        if dry_run:
            from common.experiment.reading import to_toml

            typer.echo(f"{chosen.to_json()}\n" if output == "json" else to_toml(chosen), nl=False)
            return
        if direct:
            _run_direct(chosen, runs=runs, resume=resume, json_lines=output == "json", accelerator=accelerator or "cpu")
            return
        found = predict(chosen, one_host=True) if plan_first else None
        code = LocalLab(
            chosen,
            runs=runs,
            resume=resume,
            json_lines=output == "json",
            network=network,
            lab=lab,
            metrics=metrics,
            prediction=found,
        ).run()
    raise typer.Exit(code)


@app.command()
def cloud(
    experiment: ExperimentFile = None,
    overrides: Overrides = None,
    broker: BrokerOption = "localhost",
    lab: LabOption = DEFAULT_LAB,
    runs: Runs = Path("runs"),
    resume: Resume = None,
    output: Output = "table",
    username: Username = None,
    password_file: PasswordFile = None,
    connect_timeout: ConnectTimeout = 30.0,
    metrics: MetricsAddress = METRICS,
    spool: SpoolFolder = SPOOL,
) -> None:
    """Start the cloud: it announces the experiment, runs the global rounds and writes the run's folder."""
    from cloud.agent import CloudAgent
    from cloud.results import RunFolder
    from deploy.console.progress import show

    async def run_cloud() -> None:
        chosen = _experiment(experiment, overrides, resume)
        where = _address(broker, username, password_file)
        registry, address = serve_metrics(metrics, broker=where)
        folder = RunFolder.reopen(resume) if resume else RunFolder.create(runs, chosen)
        with show(json_lines=output == "json") as observe:
            agent = CloudAgent(
                folder,
                broker=where,
                lab=lab,
                resume=resume is not None,
                connect_timeout_s=connect_timeout,
                metrics=registry,
                metrics_address=address,
                observe=observe,
                spool=_folder(spool),
            )
            await run_agent("cloud", agent.run())

    _run_role(run_cloud, "cloud")


@app.command()
def institution(
    name: Annotated[str, typer.Option(help="This institution's name in the experiment.")],
    parent: Annotated[str, typer.Option(help="Its parent, the cloud or another institution.")] = CLOUD,
    broker: BrokerOption = "localhost",
    lab: LabOption = DEFAULT_LAB,
    child_broker: Annotated[
        str | None,
        typer.Option(
            "--child-broker",
            "--device-broker",
            help="The broker of its children.  [default: its parent's]",
            show_default=False,
        ),
    ] = None,
    username: Username = None,
    password_file: PasswordFile = None,
    connect_timeout: ConnectTimeout = 30.0,
    metrics: MetricsAddress = METRICS,
    spool: SpoolFolder = SPOOL,
) -> None:
    """Start an institution: it waits for an experiment and runs its local rounds with its children."""
    from institution.agent import InstitutionAgent

    async def take_part() -> None:
        upward = _address(broker, username, password_file)
        registry, address = serve_metrics(metrics, broker=upward)
        agent = InstitutionAgent(
            name,
            parent=parent,
            broker=upward,
            child_broker=_address(child_broker or broker, username, password_file),
            lab=lab,
            connect_timeout_s=connect_timeout,
            metrics=registry,
            metrics_address=address,
            spool=_folder(spool),
        )
        await run_agent(name, agent.run())

    _run_role(take_part, name)


@app.command()
def device(
    name: Annotated[list[str], typer.Option(help="This device's name. Repeat it for several devices in one process.")],
    parent: Annotated[
        list[str] | None,
        typer.Option(
            "--parent",
            "--institution",
            help="Its parent, an institution or the cloud: one for all names, or one per name.  [default: cloud]",
            show_default=False,
        ),
    ] = None,
    broker: Annotated[
        list[str] | None,
        typer.Option(
            help="The MQTT broker, host[:port]: one for all names, or one per name.  [default: localhost]",
            envvar="FEDSTRATA_BROKER_ADDRESS",
        ),
    ] = None,
    lab: LabOption = DEFAULT_LAB,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    slots: Annotated[
        str, typer.Option(help="Concurrent trainings: a number, or auto = one per GPU, else one per core.")
    ] = "auto",
    allow_models: Annotated[
        list[str] | None,
        typer.Option(
            help="A package whose models an experiment may use, besides fedstrata's own.",
            envvar="FEDSTRATA_ALLOW_MODELS",
            show_default=False,
        ),
    ] = None,
    username: Username = None,
    password_file: PasswordFile = None,
    connect_timeout: ConnectTimeout = 30.0,
    metrics: MetricsAddress = METRICS,
    spool: SpoolFolder = "none",
    together: Annotated[
        bool, typer.Option("--together", help="End all devices if one fails before any has trained.")
    ] = False,
) -> None:
    """Start one or more devices: they wait for an experiment, then train each model that their parent assigns."""
    brokers, parents = broker or ["localhost"], parent or [CLOUD]
    for given, option in ((parents, "--parent"), (brokers, "--broker")):
        if len(given) not in (1, len(name)):
            raise typer.BadParameter(f"{len(given)} values given for {len(name)} names", param_hint=option)
    if slots != "auto" and not (slots.isdecimal() and int(slots) > 0):
        raise typer.BadParameter(f"{slots!r}: use auto, or a number from 1", param_hint="--slots")
    if len(set(name)) < len(name):
        raise typer.BadParameter("duplicate name", param_hint="--name")
    homes = parents * len(name) if len(parents) == 1 else parents
    addresses = brokers * len(name) if len(brokers) == 1 else brokers

    async def take_part() -> None:
        from deploy.local.agents import run_agents
        from device.agent import DeviceAgent
        from device.pool.pool import Pool

        registry, address = serve_metrics(metrics, broker=_address(addresses[0], username, password_file))
        count = None if slots == "auto" else int(slots)
        async with Pool(accelerator=accelerator, slots=count, devices=len(name)) as pool:
            agents = {
                each: DeviceAgent(
                    each,
                    parent=home,
                    broker=_address(where, username, password_file),
                    lab=lab,
                    pool=pool,
                    connect_timeout_s=connect_timeout,
                    metrics=registry,
                    metrics_address=address,
                    spool=_folder(spool),
                    allow_models=allow_models or (),
                ).run
                for each, home, where in zip(name, homes, addresses, strict=True)
            }
            await run_agents(agents, shared_failure=lambda: pool.failure, together=lambda: together and pool.moves == 0)

    _run_role(take_part)


@app.command()
def broker(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 1883,
    kind: Annotated[Literal["auto", "mosquitto", "embedded"], typer.Option(help="Kind of broker.")] = "auto",
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one."""
    from deploy.brokers.broker import run_foreground

    with reporting():
        run_foreground(host=host, port=port, kind=kind)


def main() -> None:
    """Run the command line."""
    app()


def _experiment(path: Path | None, overrides: list[str] | None, resume: Path | None) -> Any:
    from common.experiment.reading import load

    if resume is not None:
        if path is not None or overrides:
            raise typer.BadParameter("a resumed run keeps its experiment: omit the file and --set")
        path = resume / "experiment.toml"
    elif path is None:
        raise typer.BadParameter("name an experiment, or resume a run with --resume FOLDER", param_hint="EXPERIMENT")
    return load(path, overrides or ())


def _run_direct(chosen: Experiment, *, runs: Path, resume: Path | None, json_lines: bool, accelerator: str) -> None:
    from cloud.results import RunFolder
    from common.experiment.hardware import HardwareSettings
    from common.experiment.links import Links
    from common.host.memory import keep_large_buffers
    from deploy.console.progress import show
    from deploy.local.direct import run_in_process

    keep_large_buffers()
    if resume is None and chosen.links != Links():
        logs.write_line("--direct: link rates and delays are not enforced", level=logging.WARNING)
    if resume is None and chosen.hardware != HardwareSettings():
        logs.write_line("--direct: slower hardware is not emulated", level=logging.WARNING)
    folder = RunFolder.reopen(resume, direct=True) if resume else RunFolder.create(runs, chosen)
    try:
        with show(json_lines=json_lines) as observe:
            run_in_process(folder, resume=resume is not None, accelerator=accelerator, observe=observe)
    except KeyboardInterrupt:
        logs.write_line(f"\nresume with: fedstrata run --direct --resume {folder.path}")
        raise


def _folder(text: str) -> Path | None:
    return None if text == "none" else Path(text)


def _run_role(role: Callable[[], Coroutine[Any, Any, None]], node: str = "") -> None:
    from common.host.memory import keep_large_buffers

    keep_large_buffers()
    logs.NODE.set(node)
    run_connected(role)
