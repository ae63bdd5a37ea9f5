"""Every engine ends a response at each of the run's end tokens, as transformers' `generate` does at the model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import CHATML
from ending_models import END_OF_TURN, EOS, turn_tokenizer, write_chat_model
from rollout_models import PROMPTS, requests, save, tiny_model
from servers import FakeServer
from sglang_servers import FakeSGLang
from transformers import AutoModelForCausalLM

from rlplus.train.config import RolloutConfig
from rlplus.train.data import Example
from rlplus.train.rollout import Request, Response, Sampling, make_engine
from rlplus.train.rollout.environments.turns import Turns

ENGINES = [
    {"engine": "transformers"},
    pytest.param({"engine": "transformers", "mode": "process"}, marks=pytest.mark.slow),
    pytest.param({"engine": "vllm"}, marks=[pytest.mark.vllm, pytest.mark.slow]),
]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_response_ends_where_generate_ends_it(kind: dict[str, str], tmp_path: Path) -> None:
    """The tokenizer's eos alone lets the response run to its limit: the model says the other end for ever."""
    folder = str(write_chat_model(tmp_path, "<7>"))
    messages = [{"role": "user", "content": "3+4="}]
    prompt = turn_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = lm.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert want == [*b"<7>", END_OF_TURN]
    config = RolloutConfig.model_validate({"max_response_length": 12, "kv_cache_memory_mb": 16, **kind})
    lengths: dict[str, Any] = {"max_model_len": 64, "pad_token_id": 256, "seed": 0}
    for ends, tokens in (([EOS, END_OF_TURN], want), ([END_OF_TURN], want), ([EOS], [*want, *[END_OF_TURN] * 8])):
        engine = make_engine(config, folder, dtype="float32", end_ids=ends, **lengths)
        engine.push_weights(lm.named_parameters(), 1)
        ((first, second),) = engine.generate([Request(prompt, 2, 12)], Sampling(1.0, 0))
        engine.close()
        assert first.tokens == second.tokens == tokens
        assert first.truncated == second.truncated == (ends == [EOS])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_is_asked_to_end_at_each(kind: str, tmp_path: Path) -> None:
    fake = FakeServer() if kind == "vllm" else FakeSGLang()
    model = tiny_model(tied=False)
    save(model, tmp_path)
    options = {"engine": "sglang", "weights_folder": str(tmp_path)} if kind == "sglang" else {}
    config = RolloutConfig.model_validate(
        {"mode": "server", "server_url": fake.url, "max_response_length": 16, **options}
    )
    try:
        engine = make_engine(
            config, str(tmp_path), dtype="float32", max_model_len=320, end_ids=(1, 9), pad_token_id=0, seed=0
        )
        engine.push_weights(model.named_parameters(), 1)
        engine.generate(requests(PROMPTS[:1], [1], 4), Sampling(1.0, 0, (30,)))
    finally:
        fake.http.shutdown()
        fake.http.server_close()
    params = [each for body in fake.asked for each in _listed(body["sampling_params"])]
    assert params
    assert all(each["stop_token_ids"] == [1, 9, 30] for each in params)


def _listed(params: object) -> list[dict[str, object]]:
    return params if isinstance(params, list) else [params]  # type: ignore[list-item]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("sampled", [END_OF_TURN, EOS])
def test_turns_of_an_environment_end_as_the_template_says(sampled: int, special: bool) -> None:
    """The text that follows is the one behind the template's own end; a turn that was cut gets that end."""
    tokenizer = turn_tokenizer(CHATML.replace("im_end", "stop").replace("<|stop|>", "<end_of_turn>"), special=special)
    user = {"role": "user", "content": "guess"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    response = Response(Example(0, tuple(prompt), "", None), 200)
    turns = Turns(response, tokenizer)
    said = [user]
    for tokens, ended in (([*b"7", sampled], True), ([*b"8"], False)):
        assert turns.open(said, None)
        response.tokens += tokens
        response.trained += [True] * len(tokens)
        response.logprob += [-1.0] * len(tokens)
        response.ended = ended
        turn = turns.close(tools=False)
        assert (turn.content, turn.truncated) == (chr(tokens[0]), not ended)
        said = [*said, {"role": "assistant", "content": turn.content}, user]
    assert turns.open(said, None)
    following = tokenizer.encode("\n<|im_start|>user\nguess<end_of_turn>\n<|im_start|>assistant\n")
    assert response.tokens == [*b"7", sampled, *following, *b"8", END_OF_TURN, *following]
