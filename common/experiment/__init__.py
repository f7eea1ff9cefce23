"""The experiment as a whole: its tiers, its forms as text, and the checks before a run."""
