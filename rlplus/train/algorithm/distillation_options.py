"""Options of recipes that distil: a teacher beside the policy, or the policy itself with a demonstration."""

from collections.abc import Iterator, Sequence
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlplus.common.section import Fraction, PathText
from rlplus.common.teacher_states import TeacherStates, digest
from rlplus.train.algorithm.recipe_base import RecipeOptions, RunSettings


def demonstration_template(template: str) -> str:
    """The str.format template of a prompt that shows a demonstration; ValueError if it is none."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        template.format(prompt="", demonstration="")
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"want a str.format template, braces doubled; got {template!r} ({error!r})") from error
    if names != {"prompt", "demonstration"}:
        raise ValueError(f"want the fields {{prompt}} and {{demonstration}}, other braces doubled; got {template!r}")
    return template


class Distillation(RecipeOptions):
    """The policy's own responses, with a loss that says how far it is from a teacher.

    Rewards are measured, and not trained on. Both models are taken at rollout.temperature.
    """

    own_advantages: ClassVar[bool] = True

    loss: Literal["reverse_kl", "forward_kl", "jsd", "sampled"] = "reverse_kl"
    """Loss of a token: a divergence of the policy from the teacher over the whole vocabulary (see
    rlplus.linear_divergence), or "sampled": the objective's, with the advantage log p_teacher - log p of the token. On
    new samples the expected gradient of "sampled" is the gradient of "reverse_kl"."""
    beta: Fraction = 0.5
    """Weight of the teacher in the mixture of "jsd"."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loss != "jsd" and self.beta != Distillation.model_fields["beta"].default:
            raise ValueError(f"beta belongs to loss jsd; got {self.loss}")
        return self

    @property
    def teaches_demonstrations(self) -> bool:
        """Whether its loss is also for tokens that the policy did not sample."""
        return False

    @property
    def own_loss(self) -> str:
        return "" if self.loss == "sampled" else self.loss

    def problems(self, config: RunSettings) -> Iterator[str]:
        algorithm, train, rollout = config.algorithm.resolve(), config.train, config.rollout
        if config.algorithm.preset == "sft" and not self.teaches_demonstrations:
            yield f"want recipe distill and a divergence with preset sft; got {self.name} and loss {self.loss}"
        elif config.algorithm.preset != "sft" and algorithm.demonstrates:
            yield f"want sft, or a preset without demonstrations; got {config.algorithm.preset}"
        if algorithm.demonstrates and config.algorithm.objective:
            yield f"a divergence reads nothing of algorithm.objective; got {', '.join(config.algorithm.objective)}"
        if train.sequence_parallel > 1:
            yield f"it does not support train.sequence_parallel > 1; got {train.sequence_parallel}"
        if rollout.top_k:
            yield f"both models have the whole vocabulary: want rollout.top_k 0; got {rollout.top_k}"
        unread = {"algorithm.shaping": algorithm.shaping, "algorithm.reward_kl_coef": algorithm.reward_kl_coef}
        if self.own_loss:
            fields = ("kl_coef", "entropy_coef", "mismatch_cap")
            unread |= {f"algorithm.objective.{name}": getattr(algorithm.objective, name) for name in fields}
            unread |= {"algorithm.top_entropy": algorithm.top_entropy < 1}
            unread |= {"algorithm.external_top_entropy": algorithm.external_top_entropy < 1}
            unread |= {"algorithm.external_schedule": algorithm.external_schedule is not None}
            unread |= {"train.shard_head": train.shard_head, "train.backend cpp": train.backend == "cpp"}
        for key, value in unread.items():
            if value:
                yield f"its loss {self.loss} does not support {key}"


class Distill(Distillation):
    """On-policy distillation: the policy's own responses, with a loss that says how far it is from a frozen teacher.

    With preset sft the data's demonstrations take the place of responses. Rewards are measured, and not trained on.
    Both models are taken at rollout.temperature.
    """

    name: Literal["distill"] = "distill"
    teacher: PathText | None = None
    """Hugging Face folder or hub name of the teacher, with the policy's tokenizer. Every rank holds a whole copy."""
    teacher_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """In place of teacher: a vLLM server of it on any machine, such as http://localhost:8001, started with
    vllm serve MODEL. It is asked about each step's responses once; the key in TEACHER_API_KEY is sent along."""
    teacher_states: PathText | None = None
    """In place of teacher: a folder with its head and its hidden states for the demonstrations, which
    examples/score_demonstrations.py --states writes; for preset sft."""
    teacher_topk: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of the likeliest tokens at each place that a divergence has of the server's model or of data.teacher_topk:
    a token is then one of these, or any other. More than 16 want vllm serve --max-logprobs of 1.25 times as many."""

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        topk = Distill.model_fields["teacher_topk"].default
        if self.teacher_topk != topk and (self.teacher or self.teacher_states or not self.own_loss):
            raise ValueError("teacher_topk belongs to teacher_url or data.teacher_topk, with a divergence")
        return self

    @property
    def teaches_demonstrations(self) -> bool:
        return bool(self.own_loss)

    @property
    def teacher_model(self) -> str | None:
        return self.teacher

    @property
    def teacher_server(self) -> str | None:
        return self.teacher_url

    @property
    def topk(self) -> int:
        return 0 if self.teacher or self.teacher_states or not self.own_loss else self.teacher_topk

    @property
    def stored_teacher(self) -> str | None:
        return self.teacher_states

    def refusals(self, examples: Sequence[Any]) -> Iterator[str]:
        if self.teacher_states is None:
            return
        known, shown = TeacherStates(self.teacher_states), [e for e in examples if e.demonstration is not None]
        if lacking := sum(digest(e.prompt, e.demonstration) not in known for e in shown):
            yield (
                f"want the teacher's states of all {len(shown)} demonstrations, in these tokens; {self.teacher_states} "
                f"lacks {lacking}: run examples/score_demonstrations.py --states with this configuration again"
            )

    def problems(self, config: RunSettings) -> Iterator[str]:
        given = {
            "teacher": self.teacher,
            "teacher_url": self.teacher_url,
            "teacher_states": self.teacher_states,
            "data.teacher_topk": config.data.teacher_topk,
        }
        told = [name for name, value in given.items() if value is not None]
        if len(told) != 1:
            one = "a Hugging Face folder or hub name, or teacher_url, the address of a server, or teacher_states, or"
            yield f"want algorithm.recipe.teacher, {one} data.teacher_topk; got {' and '.join(told) or 'none'}"
        if len(told) == 1 and not (self.teacher or self.teacher_states) and config.rollout.temperature != 1:
            at = f"want rollout.temperature 1 with {told[0]}; got {config.rollout.temperature:g}"
            yield f"a teacher's logprobs from elsewhere are at temperature 1: {at}"
        for name in ("teacher_states", "data.teacher_topk"):
            if given[name] is not None and config.algorithm.preset != "sft":
                yield f"{name} is for demonstrations: want preset sft; got {config.algorithm.preset}"
        yield from super().problems(config)


class SelfDistill(Distillation):
    """On-policy self-distillation: the teacher is the policy itself, whose prompt shows a demonstration (OPSD, SDFT) or
    a correct response of the group (SDPO).

    Without shows response, prompts without a demonstration are left out, and demonstrations are not graded. Rewards
    choose the response that is shown; otherwise they are measured, and not trained on.
    """

    name: Literal["self-distill"] = "self-distill"
    teacher: Literal["policy", "initial", "average"] = "policy"
    """Weights of the teacher: "policy", as they are in the update; "initial", as the run began: with model.lora the
    model without its adapters, else a copy on every rank; "average", the policy's moving average: such a copy, and
    beside it the average in fp32, which the ranks divide; with model.lora of the adapters alone."""
    teacher_update_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of the policy in the average, after each of its updates: average + rate * (policy - average)."""
    template: Annotated[str, AfterValidator(demonstration_template)] = (
        "{prompt}\n\nHere is a solution, for your eyes only:\n\n{demonstration}\n\n"
        "Understand it first. Then answer in your own words, as if you had found it yourself."
    )
    """Text or last message of the teacher's prompt: str.format with {prompt}, the data's own, and {demonstration}."""
    shows: Literal["demonstration", "response"] = "demonstration"
    """Meaning of {demonstration}: the data's demonstration; or "response", the first other one of the group whose
    reward is at least shown_reward, as tokens (SDPO). Responses without such another one are not trained on."""
    shown_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least reward of a response that is shown."""

    @model_validator(mode="after")
    def _check_unread(self) -> Self:
        rate = SelfDistill.model_fields["teacher_update_rate"].default
        if self.teacher_update_rate != rate and not self.averaged_teacher:
            raise ValueError(f"teacher_update_rate belongs to teacher average; got {self.teacher}")
        if self.shown_reward != SelfDistill.model_fields["shown_reward"].default and not self.shows_responses:
            raise ValueError(f"shown_reward belongs to shows response; got {self.shows}")
        places = [name for _, name, _, _ in Formatter().parse(self.template)].count("demonstration")
        if self.shows_responses and places > 1:
            raise ValueError(f"template: want {{demonstration}} once, with shows response; got it {places} times")
        return self

    @property
    def copied_teacher(self) -> bool:
        return self.teacher != "policy"

    @property
    def averaged_teacher(self) -> bool:
        return self.teacher == "average"

    @property
    def demonstration_prompt(self) -> str:
        return self.template

    @property
    def shows_responses(self) -> bool:
        return self.shows == "response"

    @property
    def no_update(self) -> str:
        if not self.shows_responses:
            return super().no_update
        return f"no response has another of its group beside it whose reward is at least {self.shown_reward:g}"

    def problems(self, config: RunSettings) -> Iterator[str]:
        if self.shows_responses:
            if (own := config.rollout.function or config.rollout.environment) is not None:
                yield f"it shows responses of one turn: want no rollout.function and environment; got {own}"
            if config.rollout.group_size < 2:
                yield f"it shows other responses: want rollout.group_size >= 2; got {config.rollout.group_size}"
        elif config.data.demonstration is None:
            yield "want data.demonstration, which the teacher sees; got none"
        if self.averaged_teacher:
            if config.algorithm.resolve().objective.kl_coef and not self.own_loss and config.model.lora is None:
                yield "its teacher average is in the place of the reference of algorithm.objective.kl_coef: want 0"
            if config.model.lora is not None and config.train.zero_stage == 3:
                yield "its teacher average does not support model.lora with train.zero_stage 3"
        yield from super().problems(config)
