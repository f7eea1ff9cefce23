"""What trains a model where fedstrata's own loop does not: the user's trainers, Flower's clients,
and their scores.
"""
