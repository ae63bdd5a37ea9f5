"""Pretrained models on GSM8K: the methods beside each other, and a step beside TRL's."""
