"""vLLM, as a user would start it, on the folder that a finished run leaves: the model that transformers reads there."""

import json
import os
import sys
from pathlib import Path

import processes
import pytest
import torch
from engine_runs import write_start
from trainer_runs import run_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplus.train.trainer import train

PROMPTS = ["3+0=", "0+0=", "5+2=", "what"]
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**24, max_model_len=64)
outputs = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=24, logprobs=0))
answers = [
    {
        "prompt": out.prompt_token_ids,
        "tokens": list(out.outputs[0].token_ids),
        "logprobs": [entry[token].logprob for entry, token in zip(out.outputs[0].logprobs, out.outputs[0].token_ids)],
    }
    for out in outputs
]
open(sys.argv[3], "w").write(json.dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_loads_what_a_run_leaves(tmp_path: Path, tied: bool) -> None:
    """Text in, the same tokens out in greedy decoding, and their logprobs; tokenizer and configuration included."""
    start = {"scratch": None, "path": str(write_start(tmp_path / "start", tied=tied))}
    folder = train(run_config(tmp_path, model=start, train={"steps": 3, "lr": 3e-3})) / "model"
    # vLLM in its own process only, and without the compiler, which is slow to start and not what is tested.
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    answers = tmp_path / "answers.json"
    command = [sys.executable, "-c", GENERATE, str(folder), json.dumps(PROMPTS), str(answers)]
    done = processes.run(command, env=os.environ | here)
    assert done.returncode == 0, done.stderr[-4000:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == tied
    for text, answer in zip(PROMPTS, json.loads(answers.read_text()), strict=True):
        prompt, tokens = answer["prompt"], answer["tokens"]
        assert prompt == tokenizer(text).input_ids
        assert len(tokens) == 24 or tokens[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logprobs = lm(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == tokens
        want = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer["logprobs"], dtype=torch.float64), want, rtol=0, atol=1e-5)
