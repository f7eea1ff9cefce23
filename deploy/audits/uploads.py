"""What the parent of a device sees of it: an upload, made again as a lab without a network does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import nn

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.methods.rule import link_layouts
from fedstrata.common.methods.statistics import TrainingReport
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol.messages import Task
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import Dispatch, Report, WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.local.calls import Calls, Clock
from fedstrata.device.jobs import Ending, HostedDevice, LocalResult
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.training.tasks import LocalWork


@dataclass(frozen=True, slots=True, eq=False)
class AuditedModel:
    """The module of an experiment, its layout, and a flat model, uint8 [row_bytes]."""

    module: nn.Module
    layout: ModelLayout
    row: Row

    @classmethod
    def first(cls, experiment: Experiment) -> AuditedModel:
        """Return the model with which an experiment begins. Raises InvalidExperiment."""
        module = models.of(experiment, inputs=datasets.load(experiment.data).inputs)
        parts, row, _, _ = models.first_of(experiment, module)
        return cls(module.eval(), parts.exchanged, row)

    @classmethod
    def last(cls, experiment: Experiment, run: str) -> AuditedModel:
        """Return the final model of a run, by its folder. Raises InvalidExperiment."""
        model = experiment.model.model_copy(update={"initial": run})
        return cls.first(experiment.model_copy(update={"model": model}))

    def read(self, row: Row) -> nn.Module:
        """Return the module with a flat model."""
        models.read_row(self.module, self.layout, row)
        return self.module

    def moves(self, row: Row) -> list[torch.Tensor]:
        """Return how far another model's trained parameters are from this one's, by parameter."""
        ends = []
        for each in (row, self.row):
            weights = models.weights_of(self.read(each), self.layout).values()
            ends.append([weight.detach().clone() for weight in weights])
        return [end - start for end, start in zip(*ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """A model as the parent has it, uint8 [row_bytes], and what was reported with it."""

    row: Row
    report: TrainingReport


def upload(
    experiment: Experiment, device: str, model: AuditedModel, *, epochs: int, number: int
) -> Upload:
    """Return what a device's parent has of its local round of this number, in which it got a model.

    A device that keeps something from task to task begins as in its first one. Raises
    InvalidExperiment, RunFailed.
    """
    trainers = Trainers()
    hosted = HostedDevice(experiment, experiment.digest, device)
    prepared = trainers.prepare(hosted, "cpu")
    tier = experiment.tier_above(device)
    layouts = link_layouts(tier.aggregation, prepared.layout)
    if layouts.down.extras:
        problem = "its devices get more than a model, which an audit does not make again"
        raise InvalidExperiment("aggregation.name", tier.aggregation.name, problem, "Omit it.")

    def secret() -> bytes:
        return generator(experiment.seed, Purpose.AUDIT, f"{device}/noise").bytes(32)

    local = LocalWork(experiment, device, prepared, states=Spool(None), secret=secret)
    ended: list[Ending] = []

    async def work(task: Task, given: Arriving, report: Report) -> WorkResult:
        order = local.order(task, given.row, lambda done, of: None)
        assert not isinstance(order, WorkResult), "a task with epochs trains"
        trainers.train([(hosted, order)], "cpu", lambda _, how: ended.append(how))
        if not isinstance(ended[0], LocalResult):
            raise ended[0]
        return local.encoded(task, local.result(ended[0]), given.row)

    async def once() -> Upload:
        parent = Calls(
            {device: work},
            samples={device: prepared.samples},
            tests={device: prepared.tests},
            layouts=layouts,
            codecs=tier.transfer,
            spool=Spool(None),
            resident_mb=experiment.transfer.resident_mb,
            clock=Clock(),
        )
        place = divmod(number, experiment.device_rounds)
        closed = await parent.round(
            Dispatch(*place, [(model.row.copy(), [device])], {device: epochs}, Closing())
        )
        report = closed.uploads.reports[0]
        assert report is not None, "its only child has answered"
        return Upload(closed.uploads.rows_K[0].copy(), report)

    return asyncio.run(once())
