"""When a parent closes a round: with all results, or with a quorum of them."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.settings.tables import Count, Positive, Refused, SettingsTable


class Closing(SettingsTable):
    """When a round closes: with all results, or with `quorum` of them once `deadline_s` has
    passed.
    """

    # `all` waits for every child that takes part; `quorum` needs the two keys below.
    rule: Literal["all", "quorum"] = "all"
    quorum: Count | None = None  # results that are enough
    # seconds since the round opened; before that the round waits for all
    deadline_s: Positive | None = None

    def among(self, children: int) -> Closing:
        """Return the rule of a round with so many children: a larger quorum is all of them."""
        if (self.quorum or 0) <= children:
            return self
        return self.model_copy(update={"quorum": children})

    def uploads_of(self, children: int) -> int:
        """Return how many uploads of so many children close a round."""
        if self.rule == "all":
            return children
        return min(self.quorum or children, children)


def refused_closing(key: str, closing: Closing, children: int) -> Refused:
    """Yield why a round with this number of children cannot close."""
    if closing.rule == "all":
        return
    for name in ("quorum", "deadline_s"):
        if getattr(closing, name) is None:
            yield name, "rule 'quorum' needs it", f"Set {key}.closing.{name}."
    if (closing.quorum or 0) > children:
        problem = f"more than the children that take part ({children})"
        yield "quorum", problem, f"Give at most {children}."
