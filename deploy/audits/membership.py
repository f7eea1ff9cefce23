"""Membership inference: whether a model was trained on a sample.

    loss    the confidence phi = ln(p / (1 - p)) of the right class         (Yeom et al. 2018)
    LiRA    ln N(phi; in) - ln N(phi; out), of phi in shadow runs that had the sample and that had
            not; deviations are those over all samples          (Carlini et al. 2022, Algorithm 1)

A member is paired with a test sample of its class. Shadow runs come in twos: of each pair one has
the member, the other the test sample. So a device has as many samples of each class in all runs.
Scores and phi_2n are those of n members, and of the n others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning.evaluation import CPU_BATCH
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.audits.estimates import Estimate, auc, true_positives
from fedstrata.deploy.audits.samples import Samples, given, of_device, of_tests
from fedstrata.deploy.audits.uploads import AuditedModel, upload
from fedstrata.deploy.local.direct import run_in_process

PAIRS_MOST: Final = 1000
LEAST_DEVIATION: Final = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class MemberPairs:
    """Places of members in `every` and of the others in `tests`, int64 [n] each.

    `counts`: the samples of each device in `every`, the audited one's first.
    """

    every: Samples
    counts: Mapping[str, int]
    tests: Samples
    members: Tensor
    others: Tensor

    @classmethod
    def of(cls, experiment: Experiment, device: str) -> MemberPairs:
        """Return the pairs of an experiment, a device's first. Raises InvalidExperiment."""
        tests = of_tests(experiment)
        names = sorted(experiment.tree.devices, key=lambda name: name != device)
        each = {name: of_device(experiment, name) for name in names}
        every = Samples.joined(list(each.values()))
        free: dict[int, list[int]] = {}
        for place, label in enumerate(tests.labels.tolist()):
            free.setdefault(label, []).append(place)
        pairs = [
            (place, free[label].pop())
            for place, label in enumerate(every.labels.tolist())
            if free.get(label)
        ]
        places = torch.tensor(pairs[:PAIRS_MOST]).reshape(-1, 2)
        counts = {name: len(some) for name, some in each.items()}
        return cls(every, counts, tests, places[:, 0], places[:, 1])

    def own(self, device: str) -> int:
        """Return how many of the first pairs are the audited device's."""
        return int((self.members < self.counts[device]).sum())

    def swapped(self, out: npt.NDArray[np.bool_]) -> dict[str, Samples]:
        """Return each node's samples, with the others of these pairs in place of the members."""
        inputs = self.every.inputs.clone()
        some = torch.from_numpy(out)
        inputs[self.members[some]] = self.tests.inputs[self.others[some]]
        found = {CLOUD: self.tests}
        begin = 0
        for name, count in self.counts.items():
            part = slice(begin, begin + count)
            found[name] = Samples(inputs[part], self.every.labels[part])
            begin += count
        return found

    def phi_2n(self, model: AuditedModel, row: Row) -> Doubles:
        """Return the confidences of a flat model, float64 [2, n]."""
        some = (self.every[self.members], self.tests[self.others])
        return np.stack([confidence(model, row, each) for each in some])


@torch.no_grad()
def confidence(model: AuditedModel, row: Row, samples: Samples) -> Doubles:
    """Return phi of samples, float64 [n]."""
    module = model.read(row)
    logits = torch.cat([module(some) for some in torch.split(samples.inputs, CPU_BATCH)]).double()
    right = functional.one_hot(samples.labels, logits.shape[1]).bool()
    rest = logits.masked_fill(right, -torch.inf).logsumexp(1)
    found: Doubles = (logits[right] - rest).numpy()
    return found


def measured(
    experiment: Experiment, device: str, pairs: MemberPairs, *, run: Path | None
) -> tuple[Doubles, Doubles]:
    """Return phi_2n of a run's final model, and of a device's upload in the round after the last.

    None: of a run made here. Raises FedstrataError.
    """
    with TemporaryDirectory() as folder:
        model = AuditedModel.last(experiment, str(run or _run(experiment, Path(folder))))
    number = experiment.rounds * experiment.device_rounds
    epochs = experiment.training.epochs
    sent = upload(experiment, device, model, epochs=epochs, number=number)
    return pairs.phi_2n(model, model.row), pairs.phi_2n(model, sent.row)


def shadow(
    experiment: Experiment, device: str, pairs: MemberPairs, *, out: npt.NDArray[np.bool_]
) -> tuple[Doubles, Doubles]:
    """Return the same of a shadow run, made here, with the others of these pairs, bool [n].

    Raises FedstrataError.
    """
    with TemporaryDirectory() as folder:
        lab = given(experiment, Path(folder), pairs.swapped(out))
        return measured(lab, device, pairs, run=None)


def lira(phi_2n: Doubles, shadows: Sequence[Doubles], outs: npt.NDArray[np.bool_]) -> Doubles:
    """Return the likelihood ratios, float64 [2, n], by N shadow runs' phi_2n, and `outs` [N, n]."""
    phi_N2n = np.stack(shadows)
    had_N2n = np.stack((~outs, outs), 1)
    ratios = np.zeros_like(phi_2n)
    for sign, some in ((1, had_N2n), (-1, ~had_N2n)):
        centre_2n = np.mean(phi_N2n, 0, where=some)
        spread = float(np.mean((phi_N2n - centre_2n) ** 2, where=some)) ** 0.5
        deviation = max(spread, LEAST_DEVIATION)
        ratios -= sign * (((phi_2n - centre_2n) / deviation) ** 2 / 2 + np.log(deviation))
    return ratios


def success(scores_2n: Doubles, seed: int) -> dict[str, Estimate]:
    """Return how well an attack by these scores does."""
    chance = generator(seed, Purpose.AUDIT, "bootstrap")
    members, others = scores_2n
    return {"AUC": auc(members, others, chance), "TPR at 1 % FPR": true_positives(members, others)}


def _run(experiment: Experiment, folder: Path) -> Path:
    """Run an experiment in this process; return the run's folder. Raises FedstrataError."""
    made = RunFolder.create(folder, experiment, direct=True)
    try:
        run_in_process(made, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    finally:
        made.release()
    return made.path
