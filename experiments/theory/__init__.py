"""The theory of RL-PLUS (arXiv 2508.00222, appendices A and B) by exact sums over a finite set of outcomes.

    python -m experiments.theory [--figure FILE]

`sums` has the estimators with their bias and variance, `statements` the paper's lemmas, theorems and remarks with what
the sums show, `coefficients` the size of a demonstrated token's update, in the paper's form and in variants of it.
"""
