"""The measured likelihood of demonstrations: token by token, and which forms are likelier."""

import json
from itertools import pairwise
from statistics import fmean

import pytest
import torch

from experiments.toy.base_model import make_model
from experiments.toy.familiarity import FAMILIARITY, FORMS, SEEDS, SHARES, logprobs
from experiments.toy.task import make_tokenizer


def test_each_token_and_the_end_have_their_logprob_one_forward_pass_a_token() -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    lm = make_model(tokenizer, hidden=16)
    prompt, response = "01233+33210=", ";01233:30003"
    found = logprobs(lm, tokenizer, prompt, response)
    text = [*tokenizer.encode(prompt)]
    wanted = []
    for token in [*tokenizer.encode(response), tokenizer.eos_token_id]:
        last = lm(torch.tensor([text])).logits[0, -1].detach().double()
        wanted.append(float(last[token] - torch.logsumexp(last, 0)))
        text.append(token)
    assert found == pytest.approx(wanted, abs=1e-5)


def test_the_own_form_is_the_likeliest_under_every_base_model() -> None:
    rows = json.loads(FAMILIARITY.read_text())
    assert [(row["share"], row["seed"], row["form"]) for row in rows] == [
        (share, seed, form) for share in SHARES for seed in SEEDS for form in FORMS
    ]
    own = [row for row in rows if row["form"].startswith("own")]
    other = [row for row in rows if not row["form"].startswith("own")]
    for key in ("logprob", "p"):
        assert min(row[key] for row in own) > max(row[key] for row in other)
    means = [fmean(row["logprob"] for row in rows if row["form"] == form) for form in FORMS]
    assert all(first > second for first, second in pairwise(means[:3]))
