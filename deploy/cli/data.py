"""The commands `fedstrata data ...`: check data sets, and write an experiment's split."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.data import FOLDERS, found_in
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import json_text
from fedstrata.deploy.console.logs import write_line
from fedstrata.deploy.console.options import Output, Overrides
from fedstrata.deploy.console.reporting import reporting, require
from fedstrata.deploy.console.shipped import ExperimentFile

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.common.learning.datasets import Dataset

SET_COLUMNS = (
    "dataset",
    "train",
    "test",
    "shape",
    "classes",
    "numbers",
    "tokens",
    "users",
    "digest",
    "original",
)

app = typer.Typer(
    help="Check data sets, and show how they are split.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Names of data sets or sweeps, or experiments (FILE.toml); else all that have a "
                "folder."
            )
        ),
    ] = None,
    node: Annotated[
        str, typer.Option(help="Of an experiment with private data: the node whose data to read.")
    ] = CLOUD,
    root: Annotated[Path, typer.Option(help="The folder of data sets, data.root.")] = Path("data"),
    output: Output = "table",
) -> None:
    """Read whole data sets, as a run does, and describe them. Exit code 4 if one is missing or
    damaged.

    `original`: whether MNIST, Fashion-MNIST and CIFAR have the samples and the split of their
    authors, by known digests and means.

    An experiment's file stands for its data set, which may also be a folder, a table or a function
    of your own. A sweep stands for all data sets of its cells that have files.
    """
    from fedstrata.common.experiment.reading import load, parse
    from fedstrata.common.settings.tables import proposal

    with reporting():
        if names:
            wanted = list(dict.fromkeys(one for name in names for one in _needed(name)))
        else:
            wanted = found_in(root)
        if not wanted:
            known = ", ".join(f"{folder} ({name})" for name, folder in FOLDERS.items())
            raise InvalidExperiment(
                "data.root", str(root), "contains no data set", f"Known folders: {known}."
            )
        for unknown in (
            name for name in wanted if name not in FOLDERS and not name.endswith(".toml")
        ):
            remedy = proposal(unknown, [*FOLDERS, "FILE.toml"], what="There are")
            raise InvalidExperiment("data.dataset", unknown, "not read from a root", remedy)
        require("torch")
        from fedstrata.common.learning import datasets

        headed = output != "table"
        failed: InvalidExperiment | None = None
        for name in wanted:
            try:
                if name.endswith(".toml"):
                    data = load(Path(name)).data
                else:
                    data = parse({"data": {"dataset": name, "root": str(root)}}).data
                found = datasets.load(data, node=node)
            except InvalidExperiment as error:
                if failed is not None:
                    write_line(f"fedstrata: {failed}", level=logging.ERROR)
                failed = error
                continue
            for note in found.notes:
                write_line(note, level=logging.WARNING)
            facts = _describe(data.dataset, found)
            if not headed:
                typer.echo("\t".join(SET_COLUMNS))
                headed = True
            cells = "\t".join(str(facts[key]) for key in SET_COLUMNS)
            line = json_text(facts) if output == "json" else cells
            typer.echo(line)
        if failed is not None:
            raise failed


def _needed(name: str) -> list[str]:
    """Return the data sets that a sweep needs from a folder, of a name or a file; else the name as
    it is.
    """
    from fedstrata.common.experiment.reading import read
    from fedstrata.deploy.console.shipped import shipped_sweeps
    from fedstrata.deploy.sweeps.grid import is_sweep, load

    file = shipped_sweeps().get(name, Path(name))
    if name in FOLDERS or not file.is_file() or not is_sweep(read(file)):
        return [name]
    return [
        one.data.dataset for one in load(file).experiments.values() if one.data.dataset in FOLDERS
    ]


@app.command()
def partition(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for the three files.")] = Path("partition"),
    output: Output = "table",
) -> None:
    """Split the data as in a run, and write each device's samples.

    partition.npz contains each device's indices (int64), and those of held-out samples;
    partition.json their digest and the samples by class, or by bin of numbers, and partition.svg a
    picture of the latter if matplotlib is installed.
    """
    from fedstrata.common.experiment.reading import load

    with reporting():
        facts = write_partition(load(experiment, overrides or ()), out)
        if output == "json":
            typer.echo(json_text(facts))
            return
        kind = "by_class"
        what = "classes"
        if any("by_bin" in device for device in facts["devices"].values()):
            kind = "by_bin"
            what = "bins"
        typer.echo("\t".join(("device", "parent", "samples", what)))
        for name, device in facts["devices"].items():
            held = sum(count > 0 for count in device[kind])
            typer.echo(f"{name}\t{device['parent']}\t{device['samples']}\t{held}")
        if held_out := facts.get("held_out"):
            write_line(f"{held_out['samples']} samples are held out for the aggregating nodes")
        write_line(f"digest {facts['digest']}, in {out}")


def write_partition(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Write the three files into a folder and return the content of partition.json. Raises
    InvalidExperiment.
    """
    from fedstrata.common.learning import splits
    from fedstrata.deploy.results.maps import partition

    split = splits.split_of(experiment)
    try:
        out.mkdir(parents=True, exist_ok=True)
        facts = splits.write(experiment, split, out)
        if find_spec("matplotlib") is not None:
            (out / "partition.svg").write_bytes(partition(facts).files(["svg"])["svg"])
    except OSError as error:
        raise InvalidExperiment(
            "--out", str(out), error.strerror or str(error), "Name a writable folder."
        ) from None
    return facts


def _describe(name: str, dataset: Dataset) -> dict[str, Any]:
    from fedstrata.common.learning.originals import digest_of, original

    return {
        "dataset": name,
        "train": len(dataset.train_labels),
        "test": len(dataset.test_labels),
        "shape": list(dataset.inputs.shape),
        "classes": 0 if dataset.inputs.numbers else dataset.classes,
        "numbers": dataset.classes if dataset.inputs.numbers else 0,
        "tokens": dataset.tokens,
        "users": len(dataset.users),
        "digest": digest_of(dataset),
        "original": original(name, dataset),
    }
