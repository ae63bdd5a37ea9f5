"""Measurements of the head: our backends and their peers on the same tensors, in one process."""
