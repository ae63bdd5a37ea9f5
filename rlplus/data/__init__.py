"""Prompts, answers and demonstrations from files, their order of use, and packing for the trainer."""

from rlplus.data.load import Example, LoadReport, load_examples, read_examples
from rlplus.data.pack import MicroBatch, Sample, balance, pack, per_token
from rlplus.data.problems import distinct, load_problems, read_problems
from rlplus.data.sampler import PromptSampler, variants
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
    "read_examples",
    "read_problems",
    "response_text",
    "variants",
]
