"""`fuse_head` against the models' own logits and autograd: values, gradients, and the wrappers of a real training."""

import copy
import pickle
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import quick
import torch
from causal_lms import FAMILIES, make
from fused_heads import IDS, ON, TARGETS, TEMPERATURE, close, expected, gradients, logprob_and_entropy, loss_of, slopes
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from rlplus import Objective, linear_logprob, policy_loss
from rlplus.integrations.transformers import fuse_head, unfuse_head
from rlplus.loss.head.causal_lm import LogitTransform

HEADS = [FAMILIES[i] for i in (0, 1, 5, 8, 16, 22)]  # plain, tied, bias, softcap, scale after, scale before the head


@pytest.mark.parametrize(
    ("family", "changes", "transform"), FAMILIES, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(FAMILIES)]
)
def test_logprobs_entropies_and_gradients_are_those_of_a_familys_own_logits(
    family: str, changes: dict[str, Any], transform: LogitTransform
) -> None:
    model = make(family, changes)
    logprob, entropy, grads = expected(model)
    assert len(grads) > 5
    out = fuse_head(model, temperature=TEMPERATURE)(input_ids=IDS, targets=TARGETS)
    close(out.logprob, logprob)
    close(out.entropy, entropy)
    loss_of(out.logprob, out.entropy).backward()
    got = gradients(model)
    assert got.keys() == grads.keys()
    close(got, grads)


def constants(policy: Tensor) -> dict[str, Tensor]:
    """Per-token inputs of the loss, one advantage per sequence, near the logprobs of the policy."""
    noise, other = slopes()
    weight = torch.where(ON, other.abs(), 0.0)
    weight[0, 2] = 0.0
    external = torch.tensor([[True], [False]]).expand(IDS.shape)
    return {"old_logprob": policy.detach() + 0.1 * noise, "token_weight": weight, "external": external}


@pytest.mark.parametrize(("family", "changes", "transform"), HEADS, ids=[name for name, *_ in HEADS])
def test_the_policy_loss_is_that_of_a_familys_own_logprobs(
    family: str, changes: dict[str, Any], transform: LogitTransform
) -> None:
    objective = Objective(internal="clip", entropy_coef=0.1)
    model = make(family, changes)
    logprob, entropy = logprob_and_entropy(model(input_ids=IDS).logits)
    inputs = constants(logprob) | {"advantage": torch.tensor([1.5, -0.5])}
    whole = inputs | {"advantage": inputs["advantage"][:, None].expand(IDS.shape)}
    want, stats = policy_loss(logprob, entropy=entropy, objective=objective, **whole)
    want.backward()
    grads = gradients(model)

    fuse_head(model, temperature=TEMPERATURE)
    out = model(input_ids=IDS, targets=TARGETS, policy={"objective": objective, **inputs})
    out.loss.backward()
    close(out.loss, want)
    close(gradients(model), grads)
    close(out.logprob, logprob.detach())
    close(out.entropy, entropy.detach())
    assert not out.logprob.requires_grad
    assert out.stats["tokens"] == ON.sum() - 1 == stats["tokens"]


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {
            tuple(t.shape) for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)
        }
        return out


def test_no_operation_returns_logits() -> None:
    """But what fits `max_scratch_mb`; nor are hidden states at positions without a target multiplied."""
    V = 4000
    model = make("Llama", {"vocab_size": V})
    weights = {(32, V), (V, 32)}
    with Shapes() as plain:
        model(input_ids=IDS)
    assert (2, 7, V) in plain.seen - weights
    fuse_head(model, max_scratch_mb=0.01)
    rows = list[int]()
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    with Shapes() as fused:
        out = model(input_ids=IDS, targets=TARGETS)
        policy = {"advantage": ON.float(), "token_weight": ON.float()}
        loss = model(input_ids=IDS, targets=TARGETS, policy=policy).loss
        (out.logprob.sum() + loss).backward()
    assert not [shape for shape in fused.seen - weights if V in shape and 0 not in shape]
    assert rows[1::2] == [int(ON.sum())] * 2
    assert "logits" not in out


def test_without_targets_a_fused_model_is_what_it_was() -> None:
    model = make("Gemma2", {"final_logit_softcapping": 1.5})
    ids, logits = IDS[:1], model(input_ids=IDS).logits
    kept = vars(model).keys(), vars(model.lm_head).keys()
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert fuse_head(model) is model
    assert torch.equal(model(input_ids=IDS).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
    names = list(signature(model.forward).parameters)
    assert {"input_ids", "labels", "targets", "policy"} <= set(names)
    assert model(input_ids=IDS, labels=IDS).loss.isfinite()
    unfuse_head(model)
    assert (vars(model).keys(), vars(model.lm_head).keys()) == kept
    unfuse_head(model)
    assert torch.equal(model(input_ids=IDS).logits, logits)


def test_fusing_again_replaces_the_options_and_a_copy_is_a_model_of_its_own() -> None:
    model = fuse_head(make("Llama", {}))
    close(fuse_head(model, temperature=TEMPERATURE)(input_ids=IDS, targets=TARGETS).logprob, expected(model)[0])
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    want = logprob_and_entropy(other(input_ids=IDS).logits)[0]
    close(other(input_ids=IDS, targets=TARGETS).logprob, want)
    close(model(input_ids=IDS, targets=TARGETS).logprob, expected(model)[0])


def test_a_pickled_model_computes_as_before() -> None:
    model = fuse_head(make("Cohere", {"logit_scale": 0.25}), temperature=TEMPERATURE)
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(input_ids=IDS, targets=TARGETS).logprob, model(input_ids=IDS, targets=TARGETS).logprob)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert other(input_ids=IDS, targets=TARGETS).entropy[ON].allclose(torch.tensor(53.0).double().log())
    unfuse_head(other)
    assert not {"forward", "_fusion"} & (vars(other).keys() | vars(other.lm_head).keys())


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_has_a_new_head(tied: bool) -> None:
    model = fuse_head(make("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": tied}), temperature=TEMPERATURE)
    model.resize_token_embeddings(61)
    logprob, entropy, grads = expected(model)
    out = model(input_ids=IDS, targets=TARGETS)
    loss_of(out.logprob, out.entropy).backward()
    close((out.logprob, out.entropy), (logprob, entropy))
    close(gradients(model), grads)


def test_hooks_of_the_head_see_hidden_states_and_one_that_waits_for_logits_is_refused() -> None:
    model, seen = fuse_head(make("Llama", {})), list[int]()

    def before(_: Any, args: Any) -> None:
        (hidden,) = args
        seen.append(hidden.shape[-1])

    model.lm_head.register_forward_pre_hook(before)
    model(input_ids=IDS, targets=TARGETS)
    assert seen == [32, 32]
    hook = model.lm_head.register_forward_hook(lambda _, args, logits: 2 * logits)
    with pytest.raises(
        ValueError, match=r"want no forward hook on the head of LlamaForCausalLM, which .*<lambda> of test_"
    ):
        model(input_ids=IDS, targets=TARGETS)
    assert model(input_ids=IDS).logits.shape == (2, 7, 53)
    hook.remove()
    assert model(input_ids=IDS, targets=TARGETS).logprob.any()


def test_the_auxiliary_loss_and_other_outputs_of_the_class_are_kept() -> None:
    model = make("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True})
    own = model(input_ids=IDS, output_hidden_states=True)
    out = fuse_head(model)(input_ids=IDS, targets=TARGETS, output_hidden_states=True)
    assert out.aux_loss > 0
    assert torch.equal(out.aux_loss, own.aux_loss)
    assert all(torch.equal(x, y) for x, y in zip(out.hidden_states, own.hidden_states, strict=True))
    assert torch.equal(model(input_ids=IDS, targets=TARGETS, return_dict=False).aux_loss, own.aux_loss)


def test_logits_to_keep_and_a_batch_without_targets() -> None:
    model = fuse_head(make("Cohere", {"logit_scale": 0.25}), temperature=TEMPERATURE)
    want = expected(model)[0]
    close(model(input_ids=IDS, targets=TARGETS[:, -4:], logits_to_keep=4).logprob, want[:, -4:])
    out = model(input_ids=IDS, targets=torch.full_like(TARGETS, -100))
    assert not out.logprob.any()
    assert not out.entropy.any()
    out.logprob.sum().backward()
    assert not any(g.any() for g in gradients(model).values())


# ---- dtypes


def test_the_product_has_the_dtype_of_autocast_or_the_one_that_was_asked_for() -> None:
    model = make("Llama", {}).float()
    hidden, weight = model.base_model(input_ids=IDS).last_hidden_state, model.lm_head.weight

    def at(dtype: torch.dtype, hidden: Tensor) -> Tensor:
        return linear_logprob(hidden[ON].to(dtype), weight, TARGETS[ON])[0]

    fuse_head(model)
    assert torch.equal(model(input_ids=IDS, targets=TARGETS).logprob[ON], at(torch.float32, hidden))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model.base_model(input_ids=IDS).last_hidden_state
        assert torch.equal(model(input_ids=IDS, targets=TARGETS).logprob[ON], at(torch.bfloat16, cast))
        fuse_head(model, dtype=torch.float32)
        got = model(input_ids=IDS, targets=TARGETS).logprob[ON]
        assert torch.equal(got, at(torch.float32, cast))
        assert not torch.equal(got, at(torch.bfloat16, cast))


# ---- wrappers


def check_wrapped(wrap: Callable[[Any], Any], **changes: Any) -> None:
    """Values and gradients of a wrapped, tied Gemma 2, in fp64."""
    model = make("Gemma2", {"final_logit_softcapping": 1.5, "tie_word_embeddings": True} | changes)
    logprob, entropy, grads = expected(model)
    out = wrap(fuse_head(model, temperature=TEMPERATURE))(input_ids=IDS, targets=TARGETS)
    loss_of(out.logprob, out.entropy).backward()
    close(out.logprob, logprob)
    close(out.entropy, entropy)
    close(gradients(model), grads)


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_in_ddp(process_group: None) -> None:
    check_wrapped(torch.nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("fused_after", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_in_fsdp(process_group: None, apart: bool, fused_after: bool) -> None:
    """Layers, model and, `apart`, the head are sharded; before or after the model is fused."""

    def wrap(model: Any) -> Any:
        if fused_after:
            unfuse_head(model)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for module in (*model.model.layers, *([model.lm_head] if apart else []), model):
            fully_shard(module, mesh=mesh)
        return fuse_head(model, temperature=TEMPERATURE) if fused_after else model

    check_wrapped(wrap, tie_word_embeddings=not apart)


def test_with_gradient_checkpointing() -> None:
    check_wrapped(checkpointed)


@pytest.mark.parametrize(
    ("tied", "policy"), quick.first(2, [(True, False), (False, True), (True, True), (False, False)])
)
def test_under_zero3(tied: bool, policy: bool) -> None:
    """The weights have no elements but while their module computes. In the second step DeepSpeed prefetches."""
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.utils import safe_get_full_grad

    from rlplus.common.agree import initialize_distributed

    changes = {"final_logit_softcapping": 1.5, "tie_word_embeddings": tied}
    plain = fuse_head(make("Gemma2", changes).float(), temperature=TEMPERATURE)
    model = fuse_head(make("Gemma2", changes).float(), temperature=TEMPERATURE)
    initialize_distributed()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    assert not model.get_output_embeddings().weight.numel()
    inputs = {"objective": Objective(), "advantage": ON.float(), "token_weight": ON.float()} if policy else None

    def loss(call: Any) -> Tensor:
        out = call(input_ids=IDS, targets=TARGETS, policy=inputs)
        return out.loss if policy else loss_of(out.logprob, out.entropy)

    for _ in range(2):
        want = loss(plain)
        want.backward()
        grads = gradients(plain)
        got = loss(engine)
        engine.backward(got)
        close(got, want)
        for name, p in model.named_parameters():
            close(safe_get_full_grad(p), grads[name])
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("policy", [False, True])
def test_compiled_without_a_break(policy: bool) -> None:
    """Into Dynamo's graph, which torch runs as it is: an inductor would take half a minute."""
    torch._dynamo.reset()
    model = fuse_head(make("Cohere", {"logit_scale": 0.25, "num_hidden_layers": 1}), temperature=TEMPERATURE)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = {"objective": Objective(), "advantage": ON.double(), "token_weight": ON.double()} if policy else None
    results = []
    for call in (model, compiled):
        out = call(input_ids=IDS, targets=TARGETS, policy=inputs)
        (out.loss if policy else loss_of(out.logprob, out.entropy)).backward()
        results.append((out.logprob, out.entropy, gradients(model)))
    close(results[1], results[0])
    assert results[0][2]


# ---- errors


def test_arithmetic_that_is_not_known_is_refused_and_changes_nothing() -> None:
    model = make("Cohere", {"logit_scale": 0.25})
    model.config.logit_scale = 0.5  # the class has read the other when it was made
    with pytest.raises(ValueError, match="CohereForCausalLM computes others"):
        fuse_head(model)
    assert "forward" not in vars(model)


def test_calls_that_make_no_sense_are_refused() -> None:
    model = fuse_head(make("Llama", {}))
    weight = ON.double()
    call = {"input_ids": IDS, "targets": TARGETS}
    with pytest.raises(ValueError, match="want targets with policy; got None"):
        model(input_ids=IDS, policy={})
    with pytest.raises(ValueError, match="want targets or labels: a cross-entropy needs the logits; got both"):
        model(**call, labels=IDS)
    with pytest.raises(ValueError, match=r"want targets a tensor, int64 \(2, 7\) on cpu; got int64 \(2, 6\) on cpu"):
        model(input_ids=IDS, targets=TARGETS[:, 1:])
    with pytest.raises(ValueError, match=r"want policy\['old_logprob'\] like targets, \(2, 7\); got float64 \(2, 1\)"):
        model(**call, policy={"advantage": weight, "token_weight": weight, "old_logprob": weight[:, :1]})
    with pytest.raises(ValueError, match="want token_weight 0 where there is no target; got another"):
        model(**call, policy={"advantage": weight, "token_weight": torch.ones_like(weight)})
    assert model(input_ids=IDS).logits.shape == (2, 7, 53), "a failure leaves no stand-in behind"
