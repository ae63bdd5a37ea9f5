"""pass@k: sampling, the unbiased estimate, and its intervals (bootstrap over seeds and problems)."""
