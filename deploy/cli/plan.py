"""The command `fedstrata plan`, which also plans sweeps."""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.sweep import Only, Seeds, SmallForm
from deploy.console.reporting import reporting
from deploy.planning import command

Direct = Annotated[bool, typer.Option("--direct", help="Of a sweep: as `sweep --direct` runs it, on this machine.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Of a sweep: runs at once.  [default: as `sweep`]", show_default=False),
]
OF_A_SWEEP = {"small": SmallForm, "only": Only, "seeds": Seeds, "direct": Direct, "jobs": Jobs}


@wraps(command.plan)
def plan(**given: Any) -> None:
    own = {name: given.pop(name) for name in OF_A_SWEEP}
    with reporting():
        path = given["experiment"]
        sweep = path is not None and _is_sweep(path)
    if sweep:
        _plan_sweep(path, given, **own)
        return
    for name in (name for name, value in own.items() if value):
        raise typer.BadParameter("valid only for a sweep", param_hint=f"--{name}")
    command.plan(**given)


plan.__doc__ = f"""{inspect.cleandoc(command.plan.__doc__ or "")}

Of a sweep's file: hours, bytes and memory of all its runs. Runs that differ only in the seed, in the number of global
rounds or in how data are distributed are predicted once.
"""


def _with_options() -> inspect.Signature:
    """Return the signature of `plan` with the options of sweeps."""
    signature = inspect.signature(command.plan, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=False if name in ("small", "direct") else None, annotation=annotation)
        for name, annotation in OF_A_SWEEP.items()
    ]
    return signature.replace(
        parameters=[*(each.replace(kind=kind) for each in signature.parameters.values()), *options]
    )


plan.__signature__ = _with_options()  # type: ignore[attr-defined]
plan.__annotations__ = {name: each.annotation for name, each in plan.__signature__.parameters.items()}  # type: ignore[attr-defined]


def _is_sweep(path: Path) -> bool:
    from common.experiment.reading import read
    from deploy.sweeps.grid import is_sweep

    return is_sweep(read(path))


def _plan_sweep(
    path: Path,
    given: dict[str, Any],
    *,
    small: bool,
    only: list[str] | None,
    seeds: int | None,
    direct: bool,
    jobs: int | None,
) -> None:
    from deploy.sweeps import planning
    from deploy.sweeps.grid import load
    from deploy.sweeps.jobs import default_jobs

    one_host = given["one_host"] or direct

    def predict(experiment: Any) -> dict[str, Any]:
        found = command.predict(experiment, one_host=one_host, interface_mbit=given["interface"])
        return planning.without_network(experiment, found) if direct else found

    with reporting():
        grid = load(path, small=small, overrides=given["overrides"] or (), only=only or (), seeds=seeds)
        count = jobs or (default_jobs(grid.experiments.values(), ("cpu",)) if direct else 1)
        found = planning.to_json(grid, planning.plan_of(grid, predict), jobs=min(count, len(grid.experiments)))
        if given["out"] is not None:
            from common.host.files import writing

            with writing(given["out"]):
                given["out"].write_text(planning.written(found, "json"), encoding="utf-8")
        typer.echo(planning.written(found, given["output"]), nl=False)
