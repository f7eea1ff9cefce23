"""The folders that runs leave: their files, read into records. For scripts and notebooks:

from deploy.results import load, start

run = await start("demo", {"rounds": 5})        # or start(...).wait()
run.frame("rounds")                             # a pandas.DataFrame
"""

from deploy.results.run import Run as Run
from deploy.results.starting import RunningLab as RunningLab
from deploy.results.starting import load as load
from deploy.results.starting import start as start
