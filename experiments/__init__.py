"""Checks of the paper on small models, from a checkout: not in the wheel, and nothing of rlplus or bench imports it."""
