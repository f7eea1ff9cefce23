"""`fedstrata sweep --cluster`: runs on workers of a Dask cluster, which see the sweep's folder or
not, and may die.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.settings.tables import write
from fedstrata.deploy.results.run import Run, State, folders
from fedstrata.deploy.sweeps import cluster
from tests.helpers.commands import invoke, tensors
from tests.helpers.direct import HereProcess

distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Dask's connections
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TREE: dict[str, Any] = {
    "title": "Two rates",
    "experiment": {
        "topology": {"institutions": 0, "devices": 2},
        "data": {
            "dataset": "synthetic",
            "samples": 60,
            "test_samples": 40,
            "classes": 3,
            "image_shape": [1, 8, 8],
        },
        "model": {"name": "mlp_digits"},
    },
    "axes": {"training.learning_rate": [0.01, 0.1]},
}


def words(home: Path, runs: str, *, rounds: int) -> list[str | Path]:
    file = home / "rates.toml"
    file.write_text(write({**TREE, "experiment": {**TREE["experiment"], "rounds": rounds}}))
    return ["sweep", file, "--direct", "--runs", home / runs, "--format", "csv"]


def models(runs: Path) -> dict[str, bytes]:
    """Return the final models by the digests of their experiments."""
    return {str(Run(path).manifest["experiment_digest"]): tensors(path) for path in folders(runs)}


@contextmanager
def workers(count: int, home: Path, *, processes: bool) -> Iterator[Any]:
    """Start a cluster of this host."""
    with distributed.LocalCluster(
        n_workers=count, threads_per_worker=1, processes=processes, dashboard_address=None,
        silence_logs=50,
        local_directory=str(home / "scratch"),
    ) as found:  # fmt: skip
        yield found


@pytest.mark.parametrize("shared", [True, False])
def test_a_cluster_gives_the_runs_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr("fedstrata.deploy.sweeps.execution.WorkerProcess", HereProcess)
    monkeypatch.setattr(cluster, "WorkerProcess", HereProcess)
    # only the main thread is
    monkeypatch.setattr("fedstrata.deploy.local.direct.interruptible", nullcontext)
    alone = invoke(*words(tmp_path, "alone", rounds=3), "--jobs", "1")
    assert alone.exit_code == 0, alone.stderr
    if not shared:
        monkeypatch.setattr(cluster, "_sees", lambda folder, mark: False)
    with workers(1, tmp_path, processes=False) as found:
        done = invoke(
            *words(tmp_path, "many", rounds=3),
            "--cluster",
            found.scheduler_address,
            "--kept",
            tmp_path / "k",
        )
    assert done.exit_code == 0, done.stderr
    assert done.stdout == alone.stdout and models(tmp_path / "many" / "rates") == models(
        tmp_path / "alone" / "rates"
    )
    assert "2/2: " in done.stderr and len(folders(tmp_path / "k" / "rates")) == 2
    for path in folders(tmp_path / "many" / "rates"):
        assert Run(path).state is State.FINISHED and (path / "checkpoints").exists() == shared
    assert not list((tmp_path / "scratch").rglob("fedstrata-*"))


def test_a_scheduler_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.2)
    refused = invoke(*words(tmp_path, "runs", rounds=1), "--cluster", "tcp://127.0.0.1:9")
    assert (
        refused.exit_code == 3
        and "--cluster: tcp://127.0.0.1:9: " in refused.stderr.splitlines()[-1]
    )


@pytest.mark.slow
def test_a_run_of_a_worker_that_was_killed_is_resumed_by_another(tmp_path: Path) -> None:
    alone = invoke(*words(tmp_path, "alone", rounds=60), "--jobs", "1")
    assert alone.exit_code == 0, alone.stderr
    with workers(2, tmp_path, processes=True) as found:

        def kill() -> None:
            """Kill a worker once each has done some global rounds of its run."""
            while len(begun := list((tmp_path / "many").glob("rates/*/rounds.csv"))) < 2:
                time.sleep(0.1)
            while min(len(each.read_text().splitlines()) for each in begun) < 5:
                time.sleep(0.1)
            os.kill(next(iter(found.workers.values())).process.pid, signal.SIGKILL)

        killing = threading.Thread(target=kill, daemon=True)
        killing.start()
        done = invoke(*words(tmp_path, "many", rounds=60), "--cluster", found.scheduler_address)
        killing.join(1)
    assert (
        done.exit_code == 0 and "its process was lost; resumed behind global round" in done.stderr
    ), done.stderr
    assert done.stdout == alone.stdout and models(tmp_path / "many" / "rates") == models(
        tmp_path / "alone" / "rates"
    )
    assert [Run(path).state for path in folders(tmp_path / "many" / "rates")] == [
        State.FINISHED
    ] * 2
