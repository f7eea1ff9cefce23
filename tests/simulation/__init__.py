"""Labs drawn by the thousand and played with faults in virtual time, beside undisturbed twins; what
finds faults.
"""
