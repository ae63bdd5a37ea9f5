"""`rlplus compare`: several methods from the same base model, over seeds, in one table."""
