"""Prompts, answers and demonstrations from files, their order of use, and packing for the trainer.

The names are imported on first use: a report reads kept samples without torch.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.train.data.ends import ends_text, find_ends, turn_end, turn_warning
    from rlplus.train.data.examples import Example, load_examples, read_examples
    from rlplus.train.data.load_report import LoadReport
    from rlplus.train.data.packing import balance, pack
    from rlplus.train.data.problems import distinct, found_columns, load_problems, read_problems
    from rlplus.train.data.prompts import with_response
    from rlplus.train.data.sample_store import (
        SAMPLES,
        KeptSample,
        drop_kept,
        iter_kept,
        kept_facts,
        kept_steps,
        read_kept,
        write_kept,
    )
    from rlplus.train.data.sample_types import MicroBatch, Sample, per_token
    from rlplus.train.data.sampler import PromptSampler, variants
    from rlplus.train.data.tokenizer import byte_tokenizer, load_tokenizer, response_text, token_texts

__all__ = [
    "SAMPLES",
    "Example",
    "KeptSample",
    "LoadReport",
    "MicroBatch",
    "PromptSampler",
    "Sample",
    "balance",
    "byte_tokenizer",
    "distinct",
    "drop_kept",
    "ends_text",
    "find_ends",
    "found_columns",
    "iter_kept",
    "kept_facts",
    "kept_steps",
    "load_examples",
    "load_problems",
    "load_tokenizer",
    "pack",
    "per_token",
    "read_examples",
    "read_kept",
    "read_problems",
    "response_text",
    "token_texts",
    "turn_end",
    "turn_warning",
    "variants",
    "with_response",
    "write_kept",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "sample_store": (
            "SAMPLES",
            "KeptSample",
            "drop_kept",
            "iter_kept",
            "kept_facts",
            "kept_steps",
            "read_kept",
            "write_kept",
        ),
        "ends": ("ends_text", "find_ends", "turn_end", "turn_warning"),
        "examples": ("Example", "load_examples", "read_examples"),
        "load_report": ("LoadReport",),
        "packing": ("balance", "pack"),
        "problems": ("distinct", "found_columns", "load_problems", "read_problems"),
        "prompts": ("with_response",),
        "sample_types": ("MicroBatch", "Sample", "per_token"),
        "sampler": ("PromptSampler", "variants"),
        "tokenizer": ("byte_tokenizer", "load_tokenizer", "response_text", "token_texts"),
    },
)
