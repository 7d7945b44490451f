"""Checks of the agent loop turnkey_env: limits, prompts, routing, and the first task."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.rewards import check_columns
from verl_turnkey.plugins.checks.run import ACTOR, ROLLOUT, Run
from verl_turnkey.plugins.config.examples import load_examples
from verl_turnkey.plugins.config.schema import TurnkeyConfig


def check_agent_loop(run: Run, reward_columns: tuple[str, ...], strategy_columns: tuple[str, ...] = ()) -> None:
    """Check limits, prompt settings and the first task of the files, which the probe plays for a few steps.

    ``reward_columns``, ``strategy_columns``: the columns that reward components and the rollout strategy add.
    """
    check_routing(run.config, "turnkey_env")
    budget, limit = run.rollout.response_length, run.turnkey.rollout.max_tokens_per_turn
    if limit is not None and limit > budget:
        problem = f"turnkey.rollout.max_tokens_per_turn={limit} exceeds data.max_response_length={budget}"
        refuse("turn-longer-than-response", f"{problem}: lower the one or raise the other")
    _check_prompts(run)
    from verl_turnkey.plugins.checks.probe import probe

    if (parquet := [file for file in run.files if file.endswith(".parquet")]) and run.turnkey.env.probe:
        check_columns(run, probe(run.config, run.turnkey, parquet[0]), reward_columns, strategy_columns)


def _warn_of_silence(turnkey: TurnkeyConfig, template: str, instruction: str) -> None:
    """Warn if no part of the prompt explains an action format of the user's own."""
    options = turnkey.rollout
    action_format = f"turnkey.rollout.action_format={options.action_format}"
    if instruction and "{format}" not in template:
        problem = f"turnkey.rollout.template={options.template} has no field {{format}}"
        warn("instruction-not-shown", f"{problem}: the instruction of {action_format} is in no prompt")
    elif not instruction and options.system is None and "{format}" in template:
        problem = f"nothing tells the model the format of {action_format}"
        fix = "set the attribute `instruction` of that function, which {format} of the template shows"
        warn("format-not-told", f"{problem}: {fix}, or turnkey.rollout.examples")


def check_routing(config: DictConfig, loop: str) -> None:
    """Refuse replay of routed experts: the rows of our agent loops do not carry them."""
    replayed = {f"{ROLLOUT}.enable_rollout_routing_replay": "false"}
    replayed |= {f"{ACTOR}.{engine}.router_replay.mode": "R2" for engine in ("megatron", "veomni")}
    if active := [key for key in replayed if OmegaConf.select(config, key) in (True, "R3")]:
        instead = " and ".join(f"{key}={replayed[key]}" for key in active)
        more = " (R2 records routes in the trainer)" if "R2" in instead else ""
        refuse("routed-experts", f"the agent loop {loop} does not carry routed experts: set {instead}{more}")


def _check_prompts(run: Run) -> None:
    """Check the prompt template, and load the functions and parsers that the agent loop will call."""
    from verl_turnkey.envs.prompting.actions import CALLS, FORMATS, instruction_of, load_parser
    from verl_turnkey.envs.prompting.examples import check_examples
    from verl_turnkey.envs.prompting.prompts import load_template
    from verl_turnkey.envs.user_modules import load_function

    options = run.turnkey.rollout
    try:
        template = load_template(options.template)
    except (ValueError, OSError) as error:
        refuse("template-invalid", f"turnkey.rollout.template: {error}")
    for key in ("observation_role", "thinking", "when_full") if options.prompt == "template" else ():
        if (value := getattr(options, key)) != getattr(type(options)(), key):
            idle = f"turnkey.rollout.{key}={value} has no effect with turnkey.rollout.prompt=template"
            warn("prompt-keys-without-effect", idle)
    if options.action_format in CALLS:
        from verl_turnkey.plugins.rollout.tool_calls import check_tool_parser

        check_tool_parser(run.rollout.multi_turn.format)
    else:
        load_parser(options.action_format)
    try:
        examples = load_examples(options.examples)
        check_examples(examples, options.action_format)
    except ConfigError as error:
        refuse("examples-invalid", str(error))
    if options.action_format not in (*FORMATS, *CALLS) and not examples:
        _warn_of_silence(run.turnkey, template, instruction_of(options.action_format))
    if options.summary is not None:
        load_function(options.summary, "turnkey.rollout.summary")
        if "{summary}" not in template:
            problem = f"turnkey.rollout.summary={options.summary} needs a prompt template with the field {{summary}}"
            refuse("template-without-summary", f"{problem}, which turnkey.rollout.template={options.template} lacks")
