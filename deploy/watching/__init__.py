"""`fedstrata watch`: shows a lab from the messages on its brokers. It only subscribes and is not a
node of the run.
"""
