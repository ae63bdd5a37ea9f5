"""GRPO and RL-PLUS on the toy task, from one base model: `python -m experiments.demo`, or `make demo`."""
