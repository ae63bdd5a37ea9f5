"""A language-model head: what it is, what a model has, its products and what they cost."""
