"""The recipe files, written from the dataclasses: ``turnkey recipe NAME`` prints one, a test compares them all."""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage import EstimatorSpec, estimators
from verl_turnkey.plugins.config.schema import TurnkeyConfig, UpdateConfig, closest
from verl_turnkey.plugins.verl_api.ledger import loss_names

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec

HEADER = """\
# @package _global_
# {title}
# Written by `turnkey recipe {name}`: every parameter with its default, so that any can be overridden without a plus.
"""

VERL_KEYS: dict[str, Any] = {
    "trainer": {"v1": {"trainer_mode": "turnkey_sync"}},
    "actor_rollout_ref": {
        "actor": {"use_dynamic_bsz": True},
        # The rollout's and the reference's log_prob_use_dynamic_bsz follow it.
        "rollout": {
            "calculate_log_probs": True,
            "agent": {"default_agent_loop": "turnkey_env"},
        },
    },
    # A row per step: verl's 100,000 rows are a batch of long episodes and what is generated meanwhile.
    "transfer_queue": {"backend": {"SimpleStorage": {"total_storage_size": None}}},
}


# What a method or a loss asks of verl, and of the node ``turnkey:``, beside its own parameters.
FURTHER_KEYS: dict[str, dict[str, Any]] = {
    "seeupo": {
        "actor_rollout_ref": {
            "actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"},
        }
    },
    "loss/a3po": {
        "algorithm": {"rollout_correction": {"bypass_mode": True}},
        "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}},
    },
    "loss/rebel": {"actor_rollout_ref": {"actor": {"loss_agg_mode": "seq-mean-token-mean"}}},
}
UPDATES = {"seeupo": UpdateConfig(order="reverse_turns")}


def shipped() -> dict[str, EstimatorSpec]:
    """The estimators of this package, without those that a user's module registered."""
    return {name: spec for name, spec in estimators().items() if spec.fn.__module__.startswith("verl_turnkey.")}


def shipped_losses() -> dict[str, LossSpec]:
    """The policy losses of this package that can be chosen under verl."""
    from verl_turnkey.losses import losses

    known = {name: losses()[name] for name in loss_names()}
    return {name: spec for name, spec in known.items() if spec.fn.__module__.startswith("verl_turnkey.")}


def names() -> list[str]:
    """Recipes of the group ``turnkey``: one per estimator, and ``base`` for an estimator of your own."""
    return ["base", *sorted(shipped())]


def loss_recipes() -> list[str]:
    """Recipes of the group ``turnkey/loss``, but for the one of verl's own loss."""
    return [f"loss/{name}" for name in shipped_losses()]


def render(name: str) -> str:
    """The YAML text of recipe ``name``, ``loss/<name>`` for a policy loss.

    Raises:
        ValueError: there is no such recipe; names the closest.
    """
    if name.startswith("loss/") and name in loss_recipes():
        return _render_loss(name)
    if name not in names():
        raise ValueError(f"there is no recipe {name!r}{closest(name, [*names(), *loss_recipes()])}")
    spec = estimators().get(name)
    algorithm: dict[str, Any] = {"algorithm": {"adv_estimator": None}}  # verl's default would train another method
    if spec is None:
        title = "Step rows and everything around them, for an estimator of your own or one of verl's."
    else:
        title = f"{spec.summary} ({spec.paper})"
        algorithm = {"algorithm": {"adv_estimator": name}}
        if "value" in spec.needs:
            algorithm["critic"] = {"enable": True}
    lines = list(_yaml(_merged(_merged(algorithm, VERL_KEYS), FURTHER_KEYS.get(name, {})), 0))
    node = TurnkeyConfig(update=UPDATES.get(name, UpdateConfig()))
    lines += ["turnkey:", *_node(node, spec.params() if spec else None)]
    return HEADER.format(title=title, name=name) + "\n".join(lines) + "\n"


def _render_loss(recipe: str) -> str:
    name = recipe.removeprefix("loss/")
    spec = shipped_losses()[name]
    keys = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": name}}}}
    lines = list(_yaml(_merged(keys, FURTHER_KEYS.get(recipe, {})), 0))
    lines += ["turnkey:", "  loss:", *_dataclass(spec.params(), 4)]
    return HEADER.format(title=f"{spec.summary} ({spec.paper})", name=recipe) + "\n".join(lines) + "\n"


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    nodes = {key: _merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], dict)}
    return {**one, **other, **nodes}


def _node(node: TurnkeyConfig, params: Any) -> Iterator[str]:
    for entry in fields(node):
        value = getattr(node, entry.name)
        if entry.name == "credit" and params is not None:
            value = params
        if is_dataclass(value):
            yield f"  {entry.name}:"
            yield from _dataclass(value, 4)
        else:
            yield from _comment(attribute_docs(type(node)).get(entry.name), 2)
            yield f"  {entry.name}: {scalar(value)}"


def _dataclass(value: Any, indent: int) -> Iterator[str]:
    docs = attribute_docs(type(value))
    for entry in fields(value):
        yield from _comment(docs.get(entry.name), indent)
        yield f"{' ' * indent}{entry.name}: {scalar(getattr(value, entry.name))}"


def _yaml(tree: dict[str, Any], indent: int) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{' ' * indent}{key}:"
            yield from _yaml(value, indent + 2)
        else:
            yield f"{' ' * indent}{key}: {scalar(value)}"


def scalar(value: Any) -> str:
    """JSON is YAML, but for words that need no quotes and for floats, which YAML wants with a point."""
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    return value if isinstance(value, str) and value.replace("_", "a").isalnum() else json.dumps(value)


def _comment(text: str | None, indent: int) -> Iterator[str]:
    for line in textwrap.wrap(text or "", 110 - indent):
        yield f"{' ' * indent}# {line}"


def attribute_docs(cls: type) -> dict[str, str]:
    """What stands beside the fields of a dataclass: the string under a field, or the comment behind it."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: token.string.lstrip("# ") for token in _tokens(source) if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for before, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr):
            docs[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
        elif before.lineno in comments:
            docs[before.target.id] = comments[before.lineno]
    return docs


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)
