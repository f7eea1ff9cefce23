"""`fedstrata watch`: a lab as its broker's messages tell it. A client that reads, and is no node of the run."""
