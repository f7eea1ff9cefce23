"""The worker process, which trains for the devices of another process; started by `device.pool.worker_process`.

Standard input is a socket: a line of JSON per request and per reply. Models are passed in the shared memory whose
descriptor is the argument. When the agent's process ends, its end of the socket closes, and the worker ends too.

    {"experiment": TEXT, "digest"}            a new experiment
    {"prepare": DEVICE}                    -> {"layout", "samples", "partition"}
    {"train": [{"job", "device", "epochs", "round"}, ...], "row_bytes"}
                                           -> for each job {"job", "steps", "of"} ..., then {"job", "result"}
    {"cancel": JOB}

A DEVICE is [digest, name, accelerator]. Instead of a result a reply may have "invalid", "failed" or "cancelled". The
first line, without a request, has the "accelerators" of this machine.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.errors import FedstrataError, InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.memory import keep_large_buffers
from device.jobs import Cancelled, Ending, HostedDevice, LocalResult, Order
from device.pool.shared import SharedRows

if TYPE_CHECKING:
    from device.pool.trainers import Trainers


class WorkerChannel:
    """The worker's end of the socket; a thread reads the requests, so that a cancellation has an effect at once."""

    def __init__(self, descriptor: int = 0) -> None:
        self._requests = os.fdopen(descriptor, "rb")
        self._replies = os.fdopen(os.dup(descriptor), "wb")
        self._taken: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.cancelled: dict[int, threading.Event] = {}

    def listen(self) -> None:
        """Read requests until the agent is gone, then end the process immediately."""
        try:
            for line in self._requests:
                request = json.loads(line)
                if "cancel" in request:
                    if (event := self.cancelled.get(request["cancel"])) is not None:
                        event.set()
                    continue
                for job in request.get("train", ()):
                    self.cancelled[job["job"]] = threading.Event()
                self._taken.put(request)
        finally:
            os._exit(0)

    def next(self) -> dict[str, Any]:
        """Return the next request."""
        return self._taken.get()

    def send(self, **facts: object) -> None:
        """Send one line of JSON."""
        try:
            self._replies.write(json.dumps(facts, default=str).encode() + b"\n")
            self._replies.flush()
        except OSError:
            os._exit(0)  # the agent is gone


def main() -> None:
    """Serve one agent's process until it ends."""
    keep_large_buffers()
    channel = WorkerChannel()
    threading.Thread(target=channel.listen, daemon=True).start()
    from device.pool.trainers import Trainers
    from device.training.computing import accelerators  # imports torch: seconds

    trainers, rows = Trainers(), SharedRows(int(sys.argv[1]))
    experiments: dict[str, Experiment] = {}
    channel.send(accelerators=accelerators())
    while True:
        request = channel.next()
        if "experiment" in request:
            experiments[request["digest"]] = parse(request["experiment"])
        elif "prepare" in request:
            device, accelerator = _device(request["prepare"], experiments)
            try:
                prepared = trainers.prepare(device, accelerator)
                channel.send(layout=prepared.layout.to_json(), samples=prepared.samples, partition=prepared.partition)
            except FedstrataError as error:
                channel.send(**_fault(error))
        else:
            orders = request["train"]
            pairs = rows.pairs(len(orders), request["row_bytes"])
            _train(channel, trainers, orders, pairs, experiments)


def _train(
    channel: WorkerChannel,
    trainers: Trainers,
    orders: list[dict[str, Any]],
    pairs: npt.NDArray[np.uint8],
    experiments: dict[str, Experiment],
) -> None:
    work = []
    for wanted, (row, out) in zip(orders, pairs, strict=True):
        row.flags.writeable = False
        number = wanted["job"]
        device, accelerator = _device(wanted["device"], experiments)
        report = partial(_report, channel, number)
        work.append((device, Order(row, out, wanted["epochs"], wanted["round"], report, channel.cancelled[number])))

    def done(place: int, how: Ending) -> None:
        number = orders[place]["job"]
        if isinstance(how, LocalResult):
            channel.send(job=number, result=astuple(how))
        else:
            channel.send(job=number, **_fault(how))
        del channel.cancelled[number]

    try:
        trainers.train(work, accelerator, done)
    except FedstrataError as error:
        for place, wanted in enumerate(orders):
            if wanted["job"] in channel.cancelled:
                done(place, error)


def _device(sent: list[Any], experiments: dict[str, Experiment]) -> tuple[HostedDevice, str]:
    digest, node, accelerator = sent
    return HostedDevice(experiments[digest], digest, node), accelerator


def _report(channel: WorkerChannel, job: int, steps: int, of: int) -> None:
    channel.send(job=job, steps=steps, of=of)


def _fault(error: FedstrataError | Cancelled) -> dict[str, object]:
    if isinstance(error, Cancelled):
        return {"cancelled": True}
    return {"invalid": error.parts} if isinstance(error, InvalidExperiment) else {"failed": str(error)}


if __name__ == "__main__":
    main()
