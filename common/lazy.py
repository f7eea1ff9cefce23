"""numpy, imported when it is first used: experiments are read, and rules are asked, without it.

    from fedstrata.common.lazy import np          in place of    import numpy as np

From Python 3.15 on this is `lazy import numpy as np` (PEP 810).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from importlib import import_module
    from types import ModuleType

    class LazyModule(ModuleType):
        """A module that is imported when one of its names is first needed."""

        def __getattr__(self, name):
            """Return what the module has under a name, and keep it."""
            found = getattr(import_module(self.__name__), name)
            setattr(self, name, found)
            return found

    np = LazyModule("numpy")
    npt = LazyModule("numpy.typing")

__all__ = ["np", "npt"]
