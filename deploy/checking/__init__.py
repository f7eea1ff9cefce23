"""`fedstrata check`: what a user's own rule, model, objective or other part does in all its
calls.
"""
