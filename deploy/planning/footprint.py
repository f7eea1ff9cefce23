"""The memory of each role and of the broker.

The roles' own memory was measured once: with the demo, on Linux x86-64, with PyTorch's CUDA build.
The rest follows from the models' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fedstrata.common.experiment.schema import Experiment, TransferSettings
from fedstrata.common.model.codec_settings import CodecSettings, FormSettings
from fedstrata.common.model.layout import LinkLayouts, ModelLayout
from fedstrata.common.secure.links import links_of
from fedstrata.common.settings.topology import participants

AGENT_BYTES: Final = 60_000_000
TORCH_BYTES: Final = 560_000_000
BROKER_BYTES: Final = 9_000_000
CHANGE_ROWS: Final = 3  # of top-k: the change, the magnitudes, and their partition
# what was left out, and before; the model that is sent, and as it is decoded
FEEDBACK_ROWS: Final = 4


def memory_of(
    experiment: Experiment,
    layout: ModelLayout,
    *,
    data_bytes: int,
    devices: int,
    kept_bytes: int = 0,
    own_bytes: Sequence[int] = (),
) -> dict[str, int]:
    """Return the peak memory of each process by role, bytes.

    `data_bytes`: size of the data set, which devices, the evaluator and some refiners load.
    `devices`: devices in the largest process. `kept_bytes`: of a device's personal arrays.
    `own_bytes`: of each device's samples, if it reads no others.
    """
    row = layout.row_bytes
    transfer = experiment.transfer
    tiers = experiment.tiers
    children = [max(sizes) for sizes in experiment.sizes()]
    own, *below = [
        participants(most, tier.participation) for most, tier in zip(children, tiers, strict=True)
    ]
    links = [links_of(experiment, tier, layout) for tier in tiers]
    learner = TORCH_BYTES if experiment.training.trainer.learns_module else AGENT_BYTES
    # the model that is evaluated, or kept
    copied = experiment.evaluation.on_cloud or experiment.stop.best
    found = {
        "cloud": _parent(experiment, layout, links[0], 0, own, children[0]) + copied * row,
        "evaluator": learner + data_bytes + _evaluated(experiment) * row,
    }
    if below:
        sizes = range(1, len(tiers))
        found["institution"] = max(
            _parent(experiment, layout, links[i], i, below[i - 1], children[i]) for i in sizes
        )
    for place, tier in enumerate(tiers):
        if tier.aggregation.refines:
            data = data_bytes if tier.aggregation.reads_samples else 0
            name = "institution_refiner" if place else "cloud_refiner"
            uploads = max(below) if place else own
            if tier.aggregation.refined_by is not tier.aggregation:
                uploads = children[place]  # all selected ones
            found[name] = TORCH_BYTES + data + (2 + uploads) * row + 4 * links[place].down.extras
    # A device has five models: received, result, weights, gradients, momentum. And its objective's
    # vectors: in both rows, and as tensors.
    last = links[-1]
    each = _models(experiment) * row + 4 * (2 * last.down.extras + last.up.extras)
    whole = 0
    if kept_bytes:  # in these models, and a copy; a training has two rows of the whole model
        each = each + (_models(experiment) + 1) * kept_bytes
        whole = 2 * (row + kept_bytes)
    each += _encoding(tiers[-1].transfer.up, row)
    held = sum(sorted(own_bytes)[-devices:]) if own_bytes else data_bytes
    device = learner + held + devices * each + whole
    found |= {"device": device, "cloud_broker": _broker(own, row, transfer)}
    if below:
        found["device_broker"] = _broker(max(below), row, transfer)
    return found


def _evaluated(experiment: Experiment) -> int:
    """Return how many models the evaluator has in memory: the cloud's or the first one, its arrays,
    and a module's.
    """
    if experiment.training.trainer.learns_module:
        return 3
    return 2


def _models(experiment: Experiment) -> int:
    """Return how many models a device has in memory."""
    if not experiment.training.trainer.learns_module:
        return 3  # received, result, and that of the trainer
    from fedstrata.device.training.objectives.objectives_by_name import objective_of

    objective = objective_of(experiment.training)
    return 5 + objective.uses_received + 3 * len(objective.keeps)


def direct_bytes(
    experiment: Experiment,
    layout: ModelLayout,
    *,
    data_bytes: int,
    kept_bytes: int = 0,
    own_bytes: Sequence[int] = (),
) -> int:
    """Return the bytes of a process that has all roles of an experiment; it evaluates on all test
    samples.
    """
    sizes = experiment.sizes()
    held = data_bytes + sum(own_bytes)
    memory = memory_of(
        experiment, layout, data_bytes=held, devices=sum(sizes[-1]), kept_bytes=kept_bytes
    )
    return (
        memory["device"] + memory["cloud"] + sum(map(len, sizes[1:])) * memory.get("institution", 0)
    )


def _parent(
    experiment: Experiment,
    layout: ModelLayout,
    links: LinkLayouts,
    place: int,
    taking_part: int,
    children: int,
) -> int:
    """Return the bytes of an agent with children.

    They are the resident uploads (the rest is in the spool), the model, the mixing buffer, and what
    its rule holds.
    """
    row = layout.row_bytes
    resident = experiment.transfer.resident_mb * 1e6
    rule = experiment.tiers[place].aggregation
    held = rule.held_bytes(row, children=children, taking_part=taking_part, resident_bytes=resident)
    uploads = min(taking_part * (row + 4 * links.up.extras), resident)
    encoding = _encoding(experiment.tiers[place - 1].transfer.up, row) if place else 0
    return AGENT_BYTES + int(uploads + held) + 2 * row + 4 * links.down.extras + encoding


def _encoding(codec: CodecSettings, row: int) -> int:
    """Return the most bytes that a sender has beside its model: of the change, and of what was left
    out.
    """
    change = 0 if isinstance(codec, FormSettings) else CHANGE_ROWS
    return (change + FEEDBACK_ROWS * codec.feedback) * row


def _broker(children: int, row: int, transfer: TransferSettings) -> int:
    """Return the broker's own bytes and its queued chunks: a window to the children, and one per
    concurrent upload.
    """
    window = min(row, transfer.window * transfer.chunk_bytes)
    return BROKER_BYTES + (1 + min(children, transfer.upload_slots)) * window
