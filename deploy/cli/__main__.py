"""`python -m deploy.cli`: the command `fedstrata` where the package is not installed."""

from deploy.cli.main import main

main()
