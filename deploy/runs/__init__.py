"""The folders that runs leave: their files, read into records. For scripts and notebooks:

from deploy.runs import load, start

run = await start("demo", {"rounds": 5})        # or start(...).wait()
run.frame("rounds")                             # a pandas.DataFrame
"""

from deploy.runs.run import Run as Run
from deploy.runs.starting import RunningLab as RunningLab
from deploy.runs.starting import load as load
from deploy.runs.starting import start as start
