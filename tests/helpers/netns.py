"""Marks of tests that need network namespaces, and what this kernel can do in them."""

from __future__ import annotations

import pytest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.deploy.links.kernel import CommandRefused, check_delays
from tests.helpers.namespaces import Namespace


def unable() -> str:
    """Return why no namespace can be made here, empty where it can."""
    try:
        Namespace().close()
    except InvalidExperiment as error:
        return str(error)
    return ""


def delays() -> bool:
    """Return whether this kernel has netem."""
    if unable():
        return False
    with Namespace() as space, space.entered():
        try:
            check_delays("lo")
        except CommandRefused:
            return False
    return True


in_namespaces = pytest.mark.skipif(bool(reason := unable()), reason=reason)
with_delays = pytest.mark.skipif(not delays(), reason="this kernel has no netem")
without_delays = pytest.mark.skipif(delays(), reason="this kernel has netem")
