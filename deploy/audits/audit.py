"""The audits of an experiment and its run: each number with its uncertainty, and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, get_args

import numpy as np
import torch
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.randomness import Purpose, generator, torch_seed
from fedstrata.common.settings.tables import proposal
from fedstrata.deploy.audits import canaries, inversion, membership
from fedstrata.deploy.audits.estimates import Estimate, mean
from fedstrata.deploy.audits.inversion_trials import InversionTrials
from fedstrata.deploy.audits.picture import svg
from fedstrata.deploy.audits.samples import check, of_tests

# What an audit does not show.
LIMITS: Final = MappingProxyType(
    {
        "membership": "A stronger attack may find more, and a difference between training and test "
        "samples counts as membership, too.",
        "inversion": "An attacker who repeats the training of several steps, or who knows typical "
        "samples, may restore more.",
        "canaries": "The bound is that of one upload and of random canaries: epsilon may be "
        "anywhere between it and the accountant's.",
    }
)
CHANNELS: Final = (1, 3)  # of images that can be drawn


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A number: of which audit, what was attacked, how, and what was measured."""

    audit: str
    of: str
    attack: str
    measure: str
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Audit:
    """Audits of an experiment, seen from the parent of one device. `begin`: what begins."""

    experiment: Experiment
    device: str
    begin: Callable[[str], None] = lambda what: None

    def __post_init__(self) -> None:
        """Raise InvalidExperiment if there is no such device, or its experiment is not audited."""
        devices = self.experiment.tree.devices
        if self.device not in devices:
            remedy = proposal(self.device, devices, what="There are")
            raise InvalidExperiment("--device", self.device, "no device has this name", remedy)
        check(self.experiment)

    def membership(self, run: Path | None, *, shadows: int) -> Iterator[AuditRow]:
        """Yield how well members are found, of a finished run, or of one made here."""
        lab = self.experiment
        pairs = membership.MemberPairs.of(lab, self.device)
        self.begin("the run to audit")
        targets = membership.measured(lab, self.device, pairs, run=run)
        chance = generator(lab.seed, Purpose.AUDIT, "shadows")
        found = []
        outs = np.zeros((shadows, len(pairs.members)), np.bool_)
        for number in range(shadows):
            self.begin(f"shadow run {number + 1} of {shadows}")
            half = chance.random(outs.shape[1]) < 0.5
            outs[number] = ~outs[number - 1] if number % 2 else half
            found.append(membership.shadow(lab, self.device, pairs, out=outs[number]))
        sizes = {
            "final model": len(pairs.members),
            f"upload of {self.device}": pairs.own(self.device),
        }
        for place, (of, size) in enumerate(sizes.items()):
            phi_2n = targets[place][:, :size]
            attacks = {"loss": phi_2n}
            if shadows:
                others = [each[place][:, :size] for each in found]
                attacks["LiRA"] = membership.lira(phi_2n, others, outs[:, :size])
            for attack, scores_2n in attacks.items():
                for measure, estimate in membership.success(scores_2n, lab.seed).items():
                    yield AuditRow("membership", of, attack, measure, estimate)

    def inversion(self, picture: Path | None, *, trials: int, samples: int) -> Iterator[AuditRow]:
        """Yield how well samples are restored, and draw those of the first trials in `picture`."""
        lab = self.experiment
        tests = of_tests(lab).inputs
        if picture is not None and (tests.dim() != 4 or tests.shape[1] not in CHANNELS):
            problem = f"the samples are no images but {list(tests.shape[1:])}"
            raise InvalidExperiment("--picture", str(picture), problem, "Omit it.")
        low = float(tests.min())
        high = float(tests.max())
        every = InversionTrials(lab, self.device, count=samples)
        module = every.model.read(every.model.row)
        images: dict[str, Tensor] = {}
        for kind, trial in every.kinds.items():
            self.begin(f"inversion: {kind}")
            found: dict[str, list[float]] = {}
            for number in range(trials):
                made = trial(number)
                every.model.read(every.model.row)
                seed = torch_seed(lab.seed, Purpose.AUDIT, kind, number)
                answers = {"mean image": tests.mean(0, keepdim=True)}
                answers |= inversion.by_first_layer(made.gradient, made.like)
                for attack in get_args(inversion.Attack):
                    answers[attack] = inversion.restored(
                        module, made.gradient, made.like, attack=attack, seed=seed
                    )
                for attack, restored in answers.items():
                    values = inversion.psnr(restored, made.true.inputs, span=high - low)
                    found.setdefault(attack, []).extend(values)
                images.setdefault(
                    f"{kind}: true, {', '.join(answers)}",
                    torch.cat([made.like.inputs, *answers.values()]),
                )
            chance = generator(lab.seed, Purpose.AUDIT, "bootstrap")
            for attack, values in found.items():
                estimate = mean(np.array(values), chance)
                yield AuditRow("inversion", kind, attack, "PSNR, dB", estimate)
        if picture is not None:
            picture.write_text(svg(images, low=low, high=high))

    def canaries(self) -> Iterator[AuditRow]:
        """Yield the bound of epsilon from below, up to the accountant's."""
        canaries.check(self.experiment)
        self.begin("a training with canaries")
        found = canaries.bound(self.experiment, self.device)
        yield AuditRow("canaries", f"upload of {self.device}", "one run", "epsilon", found)
