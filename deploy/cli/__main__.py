"""`python -m deploy.cli`: the command `fedstrata` without installing the package."""

from deploy.cli.main import main

main()
