"""The nodes ``turnkey.teacher``, ``turnkey.mutual_information`` and ``turnkey.prm``, which score turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_turnkey.advantage.params import ConfigError, check
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.config.roles import Apart, Code, ModelFolder, TextOrFile, Trained

TEACHER_LOG_PROB = "teacher_log_prob"
"""field of verl's queue, (B, L) nested like ``old_log_probs``"""
HAS_TEXT = "has_teacher"
"""field of verl's queue, (B,) bool: whether the row's teacher had a text"""
SLOT = "{text}"


@dataclass(frozen=True)
class TeacherConfig:
    """Which text the teacher sees, and on which rows. The teacher is the policy itself, with the text in its prompt."""

    source: Trained[Code[str | dict[str, Any] | None]] = None
    """where the text comes from: the name of a source, a mapping with its name and options, or module:function; null:
    no teacher"""
    template: Trained[TextOrFile[str]] = "\n\nPrivileged information:\n{text}"
    """what is put at the end of the prompt's last message, with {text}; or the path of a file with it"""
    max_tokens: Trained[int] = 1024
    """tokens of the text in its template; of a longer text the end is cut"""
    weights: Trained[Literal["old", "ref"]] = "old"
    """old: the weights of old_log_probs; ref: those of the reference policy"""
    rows: Trained[Literal["all", "mixed_groups", "failed"]] = "all"
    """which rows get a text; mixed_groups: those of groups with a success and a failure; failed: those of episodes
    without success"""
    placebo: Trained[bool] = False
    """also score each row with a meaningless text of the same length, subtracted in teacher/contrast"""

    def __post_init__(self) -> None:
        check(self.max_tokens > 0, "max_tokens", "positive", self.max_tokens)
        check(SLOT in self.template or "\n" not in self.template, "template", "a text with {text}", self.template)

    def text_template(self) -> str:
        """The template itself.

        Raises:
            ConfigError: its file cannot be read, or has no ``{text}``.
        """
        if SLOT in self.template:
            return self.template
        try:
            text = read_text(Path(self.template).expanduser())
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"turnkey.teacher.template: expected a text with {SLOT}, or a file with one, got {self.template!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        if SLOT not in text:
            raise ConfigError(f"turnkey.teacher.template: {self.template} has no {SLOT}, where the text would stand")
        return text


MUTUAL_INFORMATION = "turnkey.mutual_information.every"


@dataclass(frozen=True)
class MutualInformationConfig:
    """When and on how many prompts the metrics ``mutual_information/*`` are computed; RAGEN-2: every 5, 64 prompts."""

    every: Apart[int] = 0
    """at the first training step and at each multiple of it; 0: never"""
    prompts: Apart[int] = 16
    """tasks whose first prompts are compared, in that many squared short rows"""
    tokens: Apart[Literal["response", "thoughts"]] = "response"
    """tokens of the first turn that are scored: all, or its thoughts, as RAGEN-2"""

    def __post_init__(self) -> None:
        check(self.every >= 0, "every", "0 or more", self.every)
        check(self.prompts >= 2, "prompts", "2 or more", self.prompts)


OUT, COEFFICIENT, SCORE = "turnkey_prm_out", "turnkey_prm_coef", "turnkey_prm_score"
"""fields of verl's queue, nested: the model's output (B, prompt + response), the derivative of the objective by each
output (B, L), and the score, the sum of which over a turn is that of the turn (B, L)"""
PRM_FOLDER = "turnkey_prm"
"""in verl's folder of a checkpoint; also the role of its worker"""
HEAD_BIAS = "turnkey_head_bias"
"""in the configuration of the model, False: the head has no bias"""
TURN_SCORE = "extra.turn_score"
"""the column of its scores"""


@dataclass(frozen=True)
class PrmOptimConfig:
    """The optimizer of the process reward model; its class is the actor's, its learning rate constant."""

    lr: Trained[float] = 1e-6
    """learning rate"""
    weight_decay: Trained[float] = 0.0
    """weight decay"""
    clip_grad: Trained[float] = 10.0
    """largest norm of a gradient"""
    betas: Trained[list[float]] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's"""
    lr_warmup_steps: Trained[int] = 0
    """updates in which the learning rate rises to lr"""

    def __post_init__(self) -> None:
        check(self.lr > 0, "lr", "a number > 0", self.lr)
        check(self.weight_decay >= 0, "weight_decay", "zero or more", self.weight_decay)
        check(self.clip_grad > 0, "clip_grad", "a number > 0", self.clip_grad)
        check(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", "two numbers in [0, 1)", self.betas
        )
        check(self.lr_warmup_steps >= 0, "lr_warmup_steps", "zero or more", self.lr_warmup_steps)


@dataclass(frozen=True)
class PrmConfig:
    """Which model scores the turns, what it learns, and what its scores are for."""

    kind: Trained[Literal["implicit", "head"] | None] = None
    """implicit: a language model, scores are beta times the sum of a turn's log-ratios to reference; head: a token
    classifier, read at the turn's last token; null: no model"""
    objective: Trained[Code[str]] = "preference"
    """what it learns: preference (a group's successes over its failures), outcome_ce (each episode's success),
    sum_to_outcome (a head's scores add up to the outcome), or module:function"""
    head_bias: Trained[bool] = True
    """head: whether its linear map has a bias, as verl's value heads do; without one the number of turns alone explains
    no outcome
    """
    path: Trained[ModelFolder[str | None]] = None
    """the weights that it starts from; null: the actor's"""
    lora_rank: Trained[int] = 0
    """implicit: rank of an adapter, which is then trained alone; 0: all weights"""
    lora_alpha: Trained[int | None] = None
    """null: twice the rank"""
    model_dtype: Trained[Literal["fp32", "bf16"]] = "fp32"
    """of the weights; bf16 for a base that only its adapter changes"""
    reference: Trained[Literal["old", "rollout", "ref", "base"]] = "old"
    """implicit: what the log-ratios are to; old: the policy before this update; rollout: as the inference engine had
    it; ref: the reference policy; base: the model without its adapter"""
    beta: Trained[float] = 0.05
    """implicit: factor of the log-ratios"""
    over: Trained[Literal["sum", "mean"]] = "sum"
    """what an episode's value is over its turns"""
    weigh: Trained[Literal["pair", "group"]] = "pair"
    """preference: unit of equal weight"""
    positive: Trained[Literal["success"] | float] = "success"
    """which episodes are good: those with the success flag, or without flags a score above 0; or a number: a score
    above it"""
    scores: Trained[Literal["after", "before"]] = "after"
    """scores of the model after or before it has learnt from the batch"""
    normalise: Trained[Literal["none", "max"]] = "none"
    """max: divide by the batch's largest absolute score"""
    use: Trained[Literal["column", "reward", "redistribute"]] = "column"
    """column: extra.turn_score, for methods that read it; reward: added to the turn's reward; redistribute: in its
    place"""
    every: Trained[int] = 1
    """batches per update of the model; 0: it stays as it is"""
    optim: PrmOptimConfig = field(default_factory=PrmOptimConfig)
    max_token_len_per_gpu: Trained[int | None] = None
    """tokens of a micro-batch; null: the actor's"""
    offload: Trained[bool] = True
    """keep weights and optimizer in the host's memory between calls"""

    def __post_init__(self) -> None:
        check(self.lora_rank >= 0, "lora_rank", "zero or more", self.lora_rank)
        alpha = self.lora_alpha if self.lora_rank else None  # which alone reads it
        check(alpha is None or alpha > 0, "lora_alpha", "null or positive", alpha)
        check(self.beta > 0, "beta", "a number > 0", self.beta)
        check(self.every >= 0, "every", "zero or more", self.every)
        tokens = self.max_token_len_per_gpu
        check(tokens is None or tokens > 0, "max_token_len_per_gpu", "null or positive", tokens)

    def starts_as_reference(self, path: str, adapter: str | None) -> bool:
        """Whether its log-ratios are 0 until policy or model change; ``path``, ``adapter``: weights of the policy."""
        if self.kind != "implicit" or self.reference == "base":
            return self.kind == "implicit"
        return self.path in (None, path) and (self.reference == "ref" or adapter is None)

    @property
    def trains(self) -> bool:
        """Whether a model is there that changes, and belongs into checkpoints."""
        return self.kind is not None and self.every > 0
