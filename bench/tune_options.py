"""rlplus-bench tune: finds the fastest tiling of the `triton` backend on a GPU, for `rlplus.use_tuning`.

One part after another, each with the choices of the parts before it. A candidate is timed only if its results pass the
self-check's bounds. Candidates take turns, and one replaces the default only if it is faster by a margin.
"""

import argparse
from collections.abc import Sequence
from math import inf
from pathlib import Path

from .case import NAMES, Case


def parse(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="rlplus-bench tune", description=__doc__)
    parser.add_argument("model", nargs="?", help="Hugging Face folder or hub name, or a configuration (.yaml)")
    parser.add_argument("--head", nargs=2, type=int, metavar=("V", "H"), help="sizes, instead of a model")
    parser.add_argument("--dtype", choices=NAMES, help="default: the configuration's, or bfloat16")
    parser.add_argument("--tokens", type=int, default=16_384, metavar="N", help="tokens per call; default: %(default)s")
    parser.add_argument("--max-scratch-mb", type=int, metavar="MB", help="default: the configuration's, or 1250")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a file in the folder of the verdicts")
    parser.add_argument("--seconds", type=float, default=inf, metavar="S", help="no new candidates after this time")
    return parser, parser.parse_args(arguments)


def described(options: argparse.Namespace) -> tuple[Case, int]:
    """The head and its scratch in MB. ValueError if an option is missing or wrong."""
    dtype, scratch = "bfloat16", 1250
    if options.model is not None and options.model.endswith((".yaml", ".yml")):
        from rlplus.config import load_config

        config = load_config(options.model)
        if config.model.path is None:
            raise ValueError(f"want a configuration with model.path, or --head; {options.model} has model.scratch")
        options.model, dtype = config.model.path, config.model.dtype
        scratch = config.train.max_scratch_mb or scratch
    if (options.model is None) == (options.head is None):
        raise ValueError(f"want a model or --head V H; got {'neither' if options.model is None else 'both'}")
    V, H = options.head or head_size(options.model)
    case = Case("tune", N=options.tokens, H=H, V=V, dtype=options.dtype or dtype, methods=())
    scratch = options.max_scratch_mb or scratch
    for name, value in {"tokens": case.N, "V": V, "H": H, "max-scratch-mb": scratch}.items():
        if value < 1:
            raise ValueError(f"want {name} >= 1; got {value}")
    return case, scratch


def head_size(model: str) -> tuple[int, int]:
    """Vocabulary and columns of the head of a transformers configuration."""
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"want a Hugging Face folder or hub name; got {model!r}: {reason}") from error
    return text.vocab_size, text.hidden_size
