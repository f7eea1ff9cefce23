"""The command `fedstrata` in a fork, which costs a tenth of a process that imports everything."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from fedstrata.deploy.cli.main import main


def forked(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a fork of this process, which has imported what a new one
    imports in three seconds.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            _become(words, output.fileno(), errors.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *texts)


def _become(words: list[str], output: int, errors: int) -> NoReturn:
    """Run a command in this fork, without what pytest made of its process, and end it."""
    code: object = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for mine, given in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
            os.dup2(given, mine)
        streams = [os.fdopen(mine, mode, buffering=1) for mine, mode in enumerate("rww")]
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.argv = ["fedstrata", *words]
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        for category in (DeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - the interpreter would show it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
