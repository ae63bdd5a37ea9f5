"""Prompts, answers and demonstrations from files; the order in which they are used; packing for the trainer."""

from rlplus.data.load import Example, LoadReport, load_examples, variants
from rlplus.data.pack import MicroBatch, Sample, balance, pack, per_token
from rlplus.data.problems import distinct, load_problems
from rlplus.data.sampler import PromptSampler
from rlplus.data.tokenizer import byte_tokenizer, load_tokenizer, response_text

__all__ = [
    "Example",
    "LoadReport",
    "MicroBatch",
    "PromptSampler",
    "Sample",
    "balance",
    "byte_tokenizer",
    "distinct",
    "load_examples",
    "load_problems",
    "load_tokenizer",
    "pack",
    "per_token",
    "response_text",
    "variants",
]
