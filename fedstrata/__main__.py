"""`python -m fedstrata`: the command `fedstrata` without installing the package."""

from fedstrata.deploy.cli.main import main

main()
