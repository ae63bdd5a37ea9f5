"""A run's model on the meta device, and what its largest micro-batch keeps."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlplus.tools.plan.activations import Activations, count_activations, count_inference, meta_model
from rlplus.train.algorithm import HeadKind
from rlplus.train.config import Config
from rlplus.train.learner.adapters import BITS, add_adapters
from rlplus.train.learner.pretrained import add_value_head


class Model:
    """A run's model without its weights, and the sizes that the formulas need.

    parameters: exact, tied ones once. trainable: how many of these, or the adapters'; largest: the largest one's.
    cache_bytes: keys and values of a token in all layers. heads, key_heads: heads of queries, of keys and values.
    attention_width: query heads times their size. head: a recipe's learner's; None = the policy's.
    learners: the policy, and its recipe's. teacher: a frozen model beside them, of that configuration.
    weight_bytes: without adapters. quantized: how many of the weights; dequantized: bytes of a layer's at most.
    """

    def __init__(
        self,
        config: Config,
        model_config: PretrainedConfig,
        head: HeadKind | None = None,
        *,
        teacher: PretrainedConfig | None = None,
    ) -> None:
        self.head = head
        self.teacher = None if teacher is None else Model(config, teacher, "language")
        self.lm = _meta_model(config, model_config, head)
        text: Any = model_config.get_text_config(decoder=True)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.heads = text.num_attention_heads
        self.key_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.itemsize = self.lm.dtype.itemsize
        self.parameters = sum(p.numel() for p in self.lm.parameters())
        self.vocabulary, self.hidden = self.lm.get_output_embeddings().weight.shape
        self.layers = text.num_hidden_layers
        self.cache_bytes = 2 * self.layers * self.key_heads * width * self.itemsize
        self.attention_width = self.heads * width
        sizes = [p.numel() for p in self.lm.parameters() if p.requires_grad]
        self.trainable = sum(sizes)
        self.largest = max(sizes)
        heads = [] if head else config.algorithm.resolve().recipe.learners.values()
        self.learners: tuple[Model, ...] = (self, *(Model(config, model_config, head) for head in heads))
        if config.model.lora is not None:
            self.parameters -= self.trainable
        quantized = _quantized_sizes(config, self.lm)
        self.weight_bytes = self.parameters * self.itemsize - int(sum(quantized) * (self.itemsize - BITS / 8))
        self.quantized = sum(quantized)
        self.dequantized = max(quantized, default=0) * self.itemsize
        # Identical layers need the same memory, which follows from counts for two and three of them.
        self._few: list[PreTrainedModel] = []
        if self.layers > 3 and _layers_alike(self.lm):
            self._few = [_meta_model(config, _with_layers(model_config, n), head) for n in (2, 3)]
        self._counted: dict[tuple[Any, ...], Activations] = {}
        self._inferences: dict[tuple[Any, ...], int] = {}

    def in_shards(self, config: Config) -> bool:
        """Whether its head is not gathered, which is so of the policy's with train.shard_head."""
        return config.train.shard_head and self.head is None

    def cache_share(self, gpus: int) -> int:
        """`cache_bytes` on each of the GPUs that share an engine; key heads are replicated if they are fewer."""
        return self.cache_bytes // min(gpus, self.key_heads)

    def activations(self, config: Config) -> Activations:
        """Activations of the largest micro-batch; counted once per shape."""
        rows, length = packed_shape(config)
        part = config.model
        ranks = config.train.sequence_parallel
        compiled = config.train.compile
        key = (rows, length, part.attention, part.gradient_checkpointing, ranks, self.in_shards(config), compiled)
        if key not in self._counted:
            counts = [
                count_activations(
                    lm,
                    rows=rows,
                    length=length,
                    attention=part.attention,
                    checkpointing=part.gradient_checkpointing,
                    ranks=ranks,
                    head_in_shards=self.in_shards(config),
                    compiled=compiled,
                )
                for lm in self._few or [self.lm]
            ]
            more = (self.layers - 2) if self._few else 0
            first = counts[0]
            last = counts[-1]
            self._counted[key] = Activations(
                head=first.head + more * (last.head - first.head),
                backward=first.backward + more * (last.backward - first.backward),
            )
        return self._counted[key]

    def pushed(self, config: Config) -> int:
        """Bytes of a push to the engine."""
        return self.itemsize * (self.trainable if config.rollout.lora == "adapters" else self.parameters)

    def inference(self, config: Config, rows: int, length: int) -> int:
        """Bytes that a pass over rows x length tokens takes at most without gradients; counted once per shape."""
        key = (rows, length, config.model.attention)
        if key not in self._inferences:
            lm = self._few[0] if self._few else self.lm
            self._inferences[key] = count_inference(lm, rows=rows, length=length, attention=config.model.attention)
        return self._inferences[key]


def _meta_model(config: Config, model_config: PretrainedConfig, head: HeadKind | None) -> PreTrainedModel:
    part = config.model
    lm = meta_model(model_config, part.dtype, trust_remote_code=part.trust_remote_code)
    if head == "value":
        add_value_head(lm, seed=0)
    if part.lora is not None:
        with torch.device("meta"):
            add_adapters(lm, part.lora, seed=0)
    return lm


def _quantized_sizes(config: Config, lm: PreTrainedModel) -> list[int]:
    """Weights of each linear layer that `quantize` would replace."""
    if config.model.lora is None or config.model.lora.quantization is None:
        return []
    layers = lm.named_modules()
    head = lm.get_output_embeddings()
    return [m.weight.numel() for n, m in layers if type(m) is nn.Linear and m is not head and ".lora_" not in n]


def _layers_alike(lm: PreTrainedModel) -> bool:
    layers = getattr(lm.base_model, "layers", [])
    shapes = {tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers}
    return len(shapes) == 1 and len(set(getattr(lm.config, "layer_types", None) or ())) <= 1


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    fewer = copy.deepcopy(config)
    fewer.num_hidden_layers = layers
    if getattr(fewer, "layer_types", None):
        fewer.layer_types = fewer.layer_types[:layers]
    return fewer


def packed_shape(config: Config) -> tuple[int, int]:
    """(rows, length) of the largest micro-batch of a rank, or of the ranks that share it.

    It has as many tokens as the budget allows and an update's samples can have, in rows as long as the longest sample
    or a little longer; with FlashAttention all of them are one row.
    """
    train = config.train
    samples = _largest_update(config)
    tokens = min(train.tokens_per_micro_batch * train.sequence_parallel, samples * config.max_sample_length)
    rows = 1 if config.model.attention == "flash_attention_2" else max(1, tokens // config.max_sample_length)
    return rows, tokens // rows


def _largest_update(config: Config) -> int:
    """The largest number of samples in an update of the policy or of a recipe's model."""
    train = config.train
    group = config.rollout.group_size
    cost = config.algorithm.resolve().recipe.cost
    learners = -(-train.prompts_per_step * group // cost.learner_updates) if cost.learner_updates else 0
    return max((train.prompts_per_update or train.prompts_per_step) * (group + 1), cost.batch, learners)
