"""A run's configuration as a whole, with all checks across its sections that need nothing else."""

from collections.abc import Iterator
from typing import Self

import yaml
from pydantic import model_validator

from rlplus.common.section import MANY
from rlplus.loss.objective.surrogates import EXTERNAL
from rlplus.train.config.ignored import ignored_keys
from rlplus.train.config.rollout_section import ROW
from rlplus.train.config.sections import EvaluationConfig, Sections


class Config(Sections):
    """One run."""

    @property
    def needs_engine(self) -> bool:
        """Whether a training samples: for its steps, or for an evaluation or validation between them."""
        return self.algorithm.resolve().generates or self.evaluation.every > 0 or self.validation.every > 0

    @property
    def stale(self) -> bool:
        """Whether a step trains on tokens of policies before its own, whose logprobs are the engine's."""
        return self.train.overlap > 0 or self.rollout.segment is not None

    @property
    def evaluations_read(self) -> dict[str, EvaluationConfig]:
        """The sections whose problems a training reads, by key."""
        sections = {"evaluation": self.evaluation, "validation": self.validation}
        return {key: section for key, section in sections.items() if section.every}

    @property
    def knows_behavior(self) -> bool:
        """Whether the logprobs of demonstrated tokens under their author are known, all or none."""
        return self.data.behavior_logprob is not None or self.algorithm.resolve().recipe.replays

    @property
    def max_demonstration_length(self) -> int:
        """Longest demonstration, including its end token."""
        return self.data.max_demonstration_length or self.rollout.max_response_length

    @property
    def max_training_prompt(self) -> int:
        """Longest prompt; if a teacher sees more in it, the teacher's, with a token per byte of the template."""
        recipe = self.algorithm.resolve().recipe
        longest = self.data.max_prompt_length
        if not (template := recipe.demonstration_prompt):
            return longest
        longest += len(template.encode())
        if recipe.shows_responses:
            return longest + len((self.data.response_prefix or "").encode()) + self.rollout.max_response_length
        return longest + self.max_demonstration_length

    @property
    def teachers(self) -> str:
        """Where the longest prompt in training is a teacher's, its length, for messages; else empty."""
        longest = self.max_training_prompt
        return f" of the teacher ({longest} tokens)" if longest > self.data.max_prompt_length else ""

    @property
    def max_sample_length(self) -> int:
        """Longest prompt and response, or prompt and demonstration, in training."""
        demonstrated = self.max_demonstration_length if self.algorithm.resolve().needs_demonstrations else 0
        longest = max(self.rollout.max_response_length, demonstrated)
        return self.max_training_prompt + longest

    @property
    def max_generation_length(self) -> int:
        """Longest prompt and response that the rollout engine can meet, evaluation and validation included."""
        parts = (self.data, self.evaluation.data, self.validation.data)
        return max(part.max_prompt_length for part in parts if part is not None) + self.rollout.max_response_length

    @property
    def max_evaluation_length(self) -> int:
        """Longest prompt and response of an evaluation that runs by itself."""
        return (self.evaluation.data or self.data).max_prompt_length + self.rollout.max_response_length

    def with_steps(self, prompts: int) -> Self:
        """The same run with `train.steps`, computed from epochs if needed, for data with that many prompts."""
        train = self.train.model_copy(update={"steps": self.train.steps_of(prompts)})
        return self.model_copy(update={"train": train})

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        algorithm = self.algorithm.resolve()
        if algorithm.needs_demonstrations and self.data.demonstration is None:
            problems.append(f"algorithm.preset {self.algorithm.preset} uses demonstrations: want data.demonstration")
        if algorithm.generates and algorithm.demonstrates_in_place and self.rollout.group_size < 2:
            problems.append(
                f"algorithm.preset {self.algorithm.preset} gives one place of each group to a demonstration: "
                f"want rollout.group_size >= 2; got {self.rollout.group_size}"
            )
        members = self.rollout.group_size - (algorithm.demonstrations_apart and algorithm.recipe.in_place)
        if algorithm.advantage == "pass@k" and algorithm.advantage_k > members:
            problems.append(
                f"algorithm.advantage pass@k: want algorithm.advantage_k at most the {members} members of a group; "
                f"got {algorithm.advantage_k}"
            )
        recipe = algorithm.recipe
        problems += self._recipe_problems()
        problems += (f"algorithm.recipe {recipe.name}: {problem}" for problem in recipe.problems(self))
        if self.train.overlap and self.rollout.mode == "colocated":
            problems.append(
                "train.overlap generates while the policy trains: want rollout.mode process or server; got colocated"
            )
        problems += self._evaluation_problems()
        if self.stale and algorithm.objective.mismatch_cap is not None:
            key = "train.overlap" if self.train.overlap else "rollout.segment"
            problems.append(f"algorithm.objective.mismatch_cap: no use with {key}, whose old policy is the engine's")
        if algorithm.ratio_level == "sequence" and algorithm.objective.internal not in ("clip", "ratio"):
            problems.append(
                "algorithm.ratio_level sequence: want algorithm.objective.internal clip or ratio, which are functions "
                f"of the ratio alone; got {algorithm.objective.internal}"
            )
        if self.train.overlap and self.train.sequence_parallel > 1:
            problems.append(
                f"train.overlap does not support train.sequence_parallel > 1; got {self.train.sequence_parallel}"
            )
        if self.train.sequence_parallel > 1 and self.model.attention == "eager":
            problems.append("train.sequence_parallel wants model.attention sdpa or flash_attention_2; got eager")
        problems += self._quantization_problems()
        problems += self._adapter_problems()
        if self.rollout.share_weights and self.train.zero_stage == 3:
            problems.append(
                "rollout.share_weights: ZeRO-3 leaves no rank the whole weights: want train.zero_stage 1 or 2; got 3"
            )
        if self.train.shard_head and self.rollout.top_k:
            problems.append(f"train.shard_head has the whole vocabulary only; got rollout.top_k {self.rollout.top_k}")
        if self.train.compile and self.rollout.routing_replay:
            problems.append("rollout.routing_replay: hooks on routers were not compiled: want train.compile false")
        problems += self._refill_problems()
        problems += self._option_problems()
        problems += self._learner_problems()
        problems += self._environment_problems()
        problems += self._size_problems()
        problems += ignored_keys(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _quantization_problems(self) -> Iterator[str]:
        if self.model.lora is None or self.model.lora.quantization is None:
            return
        if self.train.zero_stage == 3:
            yield (
                "model.lora.quantization: ZeRO-3 shards the weights while they load, before they can be quantized: "
                "want train.zero_stage 1 or 2; got 3"
            )
        if self.train.compile:
            yield "model.lora.quantization: train.compile does not know its layers: want train.compile false"

    def _adapter_problems(self) -> Iterator[str]:
        """Problems of an engine that applies adapters to weights of its own."""
        lora = self.model.lora
        if self.rollout.lora == "merged":
            return
        if lora is None:
            yield "rollout.lora adapters wants model.lora, which has them; got null"
        elif lora.quantization is not None:
            yield (
                "rollout.lora adapters: the engine would generate with weights that are rounded for the trainer only, "
                f"since vLLM 0.32 has no {lora.quantization}: want rollout.lora merged; got model.lora.quantization "
                f"{lora.quantization}"
            )

    def _evaluation_problems(self) -> Iterator[str]:
        """Contradictions of evaluation and validation with the rest."""
        parallel = self.rollout.tensor_parallel_size
        for name, part in (("evaluation", self.evaluation), ("validation", self.validation)):
            if self.rollout.mode == "colocated" and parallel > 1 and part.every:
                yield (
                    f"{name}.every: ranks evaluate at their own pace, but a colocated engine with "
                    f"rollout.tensor_parallel_size {parallel} needs several at once; evaluate "
                    "afterwards, or want rollout.mode process"
                )
            if self.rollout.top_k and self.rollout.engine != "transformers" and part.every:
                yield (
                    f"{name}.every: evaluations sample from the whole vocabulary, which vLLM refuses while it returns "
                    f"the tokens that it kept (rollout.top_k {self.rollout.top_k}): want rollout.engine transformers, "
                    "or evaluate afterwards"
                )
            if part.data is not None and part.data.response_prefix != self.data.response_prefix:
                yield (
                    f"{name}.data.response_prefix: want data.response_prefix, with which every response is graded, "
                    f"{self.data.response_prefix!r}; got {part.data.response_prefix!r}"
                )
        if self.validation.data is not None and (both := {*self.validation.data.paths} & {*self.data.paths}):
            yield f"validation.data.path: want problems that are not trained on; got {min(both)}, as in data.path"

    def _recipe_problems(self) -> Iterator[str]:
        """Problems of recipes whose demonstrations do not replace a rollout."""
        algorithm = self.algorithm.resolve()
        name = algorithm.recipe.name
        if algorithm.recipe.in_place:
            return
        if not (algorithm.generates and algorithm.demonstrates):
            preset = self.algorithm.preset
            yield f"algorithm.recipe {name}: want a preset with rollouts and demonstrations; got {preset}"
        if self.train.overlap:
            yield f"train.overlap does not support algorithm.recipe {name}"

    def _refill_problems(self) -> Iterator[str]:
        algorithm = self.algorithm.resolve()
        size = self.rollout.group_size
        if algorithm.refill is None or not algorithm.generates:
            return
        if size < (wanted := 2 + algorithm.demonstrates_in_place):
            yield f"algorithm.refill compares a group's rollouts: want rollout.group_size >= {wanted}; got {size}"
        if algorithm.recipe.unsolved_only:
            yield (
                "algorithm.refill drops the prompts that no rollout solved, whose demonstrations algorithm.recipe "
                f"{algorithm.recipe.name} takes: want algorithm.refill null"
            )
        if self.train.overlap:
            yield "algorithm.refill takes several draws, and train.overlap one ahead: want algorithm.refill null"

    def _option_problems(self) -> Iterator[str]:
        """Options of the algorithm that contradict another one, or the run."""
        algorithm = self.algorithm.resolve()
        zero = self.train.deepspeed.get("zero_optimization", {})
        changed = algorithm.shaping is not None or algorithm.reward_kl_coef > 0
        if algorithm.advantage in ("mean", "pass@k") and changed:
            yield (
                f"algorithm.advantage {algorithm.advantage} is for rewards from 0 on, 1 for a right answer: "
                "want algorithm.shaping null and algorithm.reward_kl_coef 0"
            )
        external = EXTERNAL[algorithm.objective.external]
        selects = algorithm.demonstrates and algorithm.external_top_entropy < 1
        if selects and (external.terms is None or not external.weighted):
            yield (
                "algorithm.external_top_entropy takes the advantage off tokens: want an algorithm.objective.external "
                f"that has one; got {algorithm.objective.external}"
            )
        if algorithm.reward_kl_coef and algorithm.generates:
            refusal = "algorithm.reward_kl_coef does not support"
            if algorithm.demonstrates:
                yield f"{refusal} demonstrations: want a preset without; got {self.algorithm.preset}"
            if self.train.sequence_parallel > 1:
                yield f"{refusal} train.sequence_parallel > 1; got {self.train.sequence_parallel}"
            if self.train.overlap:
                yield f"{refusal} train.overlap"
        if algorithm.skip_grad_norm and not zero.get("compute_grad_norm", True):
            yield (
                "algorithm.skip_grad_norm needs the gradient's norm: want "
                f"train.deepspeed.zero_optimization.compute_grad_norm true; got {zero['compute_grad_norm']}"
            )

    def _learner_problems(self) -> Iterator[str]:
        """Problems of recipes that train models alongside the policy."""
        algorithm = self.algorithm.resolve()
        train = self.train
        recipe = f"algorithm.recipe {algorithm.recipe.name}"
        if not algorithm.recipe.learners:
            return
        if train.sequence_parallel > 1:
            yield f"{recipe} does not support train.sequence_parallel > 1; got {train.sequence_parallel}"
        if self.model.lora is not None:
            yield f"{recipe} does not support model.lora: its models train all weights"
        if train.overlap:
            yield f"{recipe} does not support train.overlap"
        for key in ("function", "environment"):
            if getattr(self.rollout, key) is not None:
                yield f"{recipe} does not support rollout.{key}"
        if algorithm.demonstrates:
            yield f"{recipe} does not support demonstrations: want a preset without; got {self.algorithm.preset}"

    def _environment_problems(self) -> Iterator[str]:
        """Data whose prompts an environment's messages would not begin with, or that lack its rows."""
        if self.rollout.environment is None:
            return
        data = {"data": self.data, "evaluation.data": self.evaluation.data, "validation.data": self.validation.data}
        for name, part in data.items():
            if part is None:
                continue
            if ROW not in part.columns:
                yield f"rollout.environment: want {ROW} in {name}.columns, as `rlplus problems` writes it"
            set_ = [key for key in ("system_prompt", "response_prefix") if getattr(part, key) is not None]
            if set_ or part.template != "own":
                key = set_[0] if set_ else "template"
                yield f"{name}.{key}: prompts are the environment's own with rollout.environment; leave it out"

    def _size_problems(self) -> Iterator[str]:
        """Samples that are too long for a micro-batch or the model, or too many for a step."""
        parallel = self.train.sequence_parallel
        budget = self.train.tokens_per_micro_batch
        if self.max_sample_length > budget * parallel:
            ranks = f" on each of {parallel} ranks" if parallel > 1 else ""
            yield (
                f"the longest prompt{self.teachers} and response have {self.max_sample_length} tokens together: "
                f"want train.tokens_per_micro_batch at least that; got {budget}{ranks}"
            )
        longest = max(self.max_sample_length, self.max_generation_length)
        whose = self.teachers if longest == self.max_sample_length else ""
        scratch = self.model.scratch
        if scratch is not None and longest > scratch.max_position_embeddings:
            yield (
                f"the longest prompt{whose} and response have {longest} tokens together: "
                f"want model.scratch.max_position_embeddings at least that; got {scratch.max_position_embeddings}"
            )
        prompts = self.train.prompts_per_step
        group = self.rollout.group_size
        if prompts * group > MANY:
            yield f"want train.prompts_per_step times rollout.group_size at most {MANY}; got {prompts} times {group}"
        elif (responses := (1 + self.rollout.waiting) * prompts * group) > MANY:
            yield (
                f"rollout.segment {self.rollout.segment} has {1 + self.rollout.waiting} batches under way at a time: "
                f"want at most {MANY} responses in them; got {responses}"
            )

    def to_yaml(self) -> str:
        """Every value, defaults included; `load_config` reads it back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
