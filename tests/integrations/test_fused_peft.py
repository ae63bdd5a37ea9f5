"""`fuse_head` and peft: adapters beside the head, copies of the head that are trained, virtual tokens."""

import pytest
import torch
from causal_lms import make
from fused_heads import IDS, ON, TARGETS, TEMPERATURE, close, expected, gradients, logprob_and_entropy, loss_of

from rlplus import Objective, head_of, policy_loss
from rlplus.integrations.transformers import fuse_head, unfuse_head

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("first", ["fused", "peft"])
def test_in_peft(first: str) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = make("Cohere", {"logit_scale": 0.25})
    if first == "fused":
        fuse_head(model, temperature=TEMPERATURE)
    wrapped = peft.get_peft_model(model, lora)
    if first == "peft":
        assert fuse_head(wrapped, temperature=TEMPERATURE) is wrapped
    logprob, _, grads = expected(wrapped)
    assert grads
    assert all("lora" in name for name in grads)
    out = wrapped(input_ids=IDS, targets=TARGETS)
    loss_of(out.logprob, out.entropy).backward()
    close(out.logprob, logprob)
    close(gradients(wrapped), grads)
    with wrapped.disable_adapter():
        assert (wrapped(input_ids=IDS, targets=TARGETS).logprob - logprob).abs().max() > 1e-3


@pytest.mark.parametrize("first", ["fused", "peft"])
def test_a_trained_copy_of_the_head_is_the_head(first: str) -> None:
    """modules_to_save: values and gradients are the active adapter's copy's, without adapters the original's."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = make("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": False})
    wrapped = peft.get_peft_model(fuse_head(model, temperature=TEMPERATURE) if first == "fused" else model, lora)
    wrapped.add_adapter("other", lora)
    copies = model.lm_head.modules_to_save
    with torch.no_grad():
        copies["default"].weight.mul_(1.5)
        copies["other"].weight.mul_(0.5)
    if first == "peft":
        fuse_head(wrapped, temperature=TEMPERATURE)

    def check(gradient: str | None) -> None:
        logprob, entropy, grads = expected(wrapped) if gradient else (*logprob_and_entropy(model(IDS).logits), {})
        out = wrapped(input_ids=IDS, targets=TARGETS)
        close((out.logprob, out.entropy), (logprob, entropy))
        if gradient:
            loss_of(out.logprob, out.entropy).backward()
            got = gradients(wrapped)
            assert any(f"lm_head.modules_to_save.{gradient}" in name for name in got)
            close(got, grads)

    for name in ("default", "other"):
        wrapped.set_adapter(name)
        check(name)
        assert head_of(wrapped)["weight"] is copies[name].weight
    with wrapped.disable_adapter():
        check(None)
        assert head_of(wrapped)["weight"] is model.lm_head.original_module.weight
    inputs = {"advantage": ON.double(), "token_weight": ON.double(), "old_logprob": None}
    want, _ = policy_loss(logprob_and_entropy(wrapped(input_ids=IDS).logits)[0], objective=Objective(), **inputs)
    got = wrapped(input_ids=IDS, targets=TARGETS, policy={"objective": Objective(), **inputs}).loss
    close(got, want)
    unfuse_head(wrapped)
    assert not [name for name, module in wrapped.named_modules() if "forward" in vars(module)]


def test_a_copy_of_the_head_holds_no_model() -> None:
    """peft copies the head of a model that was called before; it would copy what the head's `forward` holds, too."""
    model = fuse_head(make("Llama", {}), temperature=TEMPERATURE)
    want = model(input_ids=IDS, targets=TARGETS).logprob
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    copy = model.lm_head.modules_to_save["default"]
    assert copy.forward.head is copy
    assert not [value for value in vars(copy.forward).values() if value is not copy and isinstance(value, type(model))]
    assert torch.equal(wrapped(input_ids=IDS, targets=TARGETS).logprob, want)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_have_no_targets(kind: str) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(make("Llama", {}).float(), config)
    logprob, entropy = logprob_and_entropy(wrapped(input_ids=IDS).logits[:, -7:])
    loss_of(logprob, entropy).backward()
    grads = gradients(wrapped)
    assert grads
    out = fuse_head(wrapped, temperature=TEMPERATURE)(input_ids=IDS, targets=TARGETS)
    loss_of(out.logprob, out.entropy).backward()
    close((out.logprob, out.entropy), (logprob, entropy))
    close(gradients(wrapped), grads)


def test_prompt_tuning_of_a_fused_model_says_what_to_do() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(fuse_head(make("Llama", {}).float()), config)
    with pytest.raises(ValueError, match=r"want targets \(B, 10\), .*call fuse_head after get_peft_model"):
        wrapped(input_ids=IDS, targets=TARGETS)


@pytest.mark.parametrize("first", ["fused", "peft"])
def test_a_head_with_lora_is_refused_by_name(first: str) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    model = make("Llama", {})
    message = r"want the head of LlamaForCausalLM a plain torch.nn.Linear; got peft\."
    if first == "fused":
        wrapped = peft.get_peft_model(fuse_head(model), lora)
        with pytest.raises(ValueError, match=message):
            wrapped(input_ids=IDS, targets=TARGETS)
    else:
        with pytest.raises(ValueError, match=message):
            fuse_head(peft.get_peft_model(model, lora))
