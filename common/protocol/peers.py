"""What a node is to its parent, and to its children: who they are, the links to them, and what they
may send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.experiment.schema import Experiment, TransferSettings
from fedstrata.common.model.layout import FrozenForm
from fedstrata.common.protocol.limits import (
    ChildLimits,
    Entering,
    TaskLimits,
    entering_below,
    limits_below,
    task_limits,
)
from fedstrata.common.settings.links import LinkSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ToParent:
    """A child's side of the link to its parent."""

    parent: str
    link: LinkSettings
    transfer: TransferSettings
    shaped: bool = True  # this end enforces the link's rate and delay
    session: str = ""  # the parent's that replied during discovery, empty if none did
    limits: TaskLimits | None = None  # of the parent's tasks
    frozen: FrozenForm | None = None  # the form of the run's frozen arrays
    below: Ledger | None = None  # the byte ledger of this node's own children, if it has any
    # Of `gone_after_s`; None, and before the run has begun: `idle_s`.
    patience_s: float | None = None
    # The experiment names another parent or none, so each process of this one has to be asked to
    # take the node in.
    entered: bool = False
    secure: bool = False  # the parent learns sums alone

    @property
    def gone_after_s(self) -> float:
        """Seconds after which a parent that is not there is gone, once the run has begun."""
        return self.patience_s or self.transfer.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ToChildren:
    """A parent's side of the links to its children."""

    links: Mapping[str, LinkSettings]  # of each child, by its name, in order
    transfer: TransferSettings
    shaped: bool = True  # this end enforces the links' rates and delays
    rounds: int = 1  # of this parent in a global round
    # what each may report, and the nodes below it
    limits: Mapping[str, ChildLimits] = field(default_factory=dict)
    entering: Entering | None = None  # who else may become a child
    onward: Mapping[str, float] = field(default_factory=dict)  # see `LinkSet`
    secure: bool = False  # the parent learns sums alone


def to_parent(
    experiment: Experiment,
    node: str,
    parent: str,
    *,
    session: str,
    frozen: FrozenForm | None,
    below: Ledger | None = None,
    patience_s: float | None = None,
    entered: bool = False,
) -> ToParent:
    """Return a node's side of the link to this parent. Raises KeyError if the experiment has no
    such nodes.
    """
    return ToParent(
        parent=parent,
        link=experiment.link(node),
        transfer=experiment.transfer,
        shaped=experiment.links.enforce == "bucket",
        session=session,
        limits=task_limits(experiment, node, parent),
        frozen=frozen,
        below=below,
        patience_s=patience_s,
        entered=entered,
        secure=experiment.tier_above(node).secure is not None,
    )


def to_children(experiment: Experiment, parent: str) -> ToChildren:
    """Return a node's side of the links to its children."""
    return ToChildren(
        links={name: experiment.link(name) for name in experiment.tree.children[parent]},
        transfer=experiment.transfer,
        shaped=experiment.links.enforce == "bucket",
        rounds=experiment.rounds_of(experiment.tree.depth(parent)),
        limits=limits_below(experiment, parent),
        entering=entering_below(experiment, parent),
        onward=experiment.onward_rates(parent),
        secure=experiment.tier_below(parent).secure is not None,
    )
