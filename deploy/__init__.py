"""The command line, labs on one machine, brokers, predictions, simulation, reports, and the files
of a deployment.
"""
