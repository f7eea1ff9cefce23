"""The command `fedstrata`: sub-commands for the roles, for whole labs, and for results."""

import sys
from importlib.util import find_spec

# A folder of the user's own on the path may hide one of fedstrata's packages.
for _package, _module in (("common", "errors"), ("cloud", "agent"), ("device", "agent"), ("institution", "agent")):
    if (_found := find_spec(_package)) is None or find_spec(f"{_package}.{_module}") is None:
        _where = "nowhere" if _found is None else _found.origin
        sys.stderr.write(f"fedstrata: {_package} is {_where}, not fedstrata's. Rename it, or take it off PYTHONPATH.\n")
        sys.exit(4)
