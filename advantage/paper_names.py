"""Methods of the literature by name: those that are here under another one, and those that are not, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple


class PaperName(NamedTuple):
    """``names``: in the paper and in frameworks, and its arXiv number, separated by `` / ``.

    ``ours``: our name for it. ``line``: its launch line, quoted for a shell. ``page``: below docs/. ``note``: how it
    differs, or what else it needs. ``exact``: False if ours is only the closest method.
    """

    names: str
    ours: str
    line: str
    page: str
    note: str = ""
    exact: bool = True

    def equivalent(self, name: object) -> str:
        """``here, gtpo is turn_norm``, or the closest of ours."""
        return f"here, {name} is {self.ours}" if self.exact else f"{name} is not here, the closest is {self.ours}"


_VERLS_LOSS = "+turnkey=grpo_steps actor_rollout_ref.actor.policy_loss.loss_mode="
_VERLS_ESTIMATOR = "+turnkey=base algorithm.adv_estimator="
_VINE = "+turnkey=progress turnkey.credit.alpha=0 turnkey.credit.whiten=turns"
_ROWS = "takes each row for a rollout, so an episode counts as often as it has turns"

PAPER_NAMES = (
    # turns: the same states, returns, critics
    PaperName("GiGPO / 2505.10978", "gigpo", "+turnkey=gigpo", "methods/gigpo.md"),
    PaperName("HGPO / 2602.22817", "hgpo", "+turnkey=hgpo", "methods/hgpo.md"),
    PaperName("SALT / 2510.20022", "salt", "+turnkey=salt", "methods/salt.md", "no code of the authors is known"),
    PaperName("ProxMO / 2602.19225", "proxmo", "+turnkey=proxmo", "methods/proxmo.md"),
    PaperName("GraphGPO / 2605.26684", "graph", "+turnkey=graph", "methods/graph.md"),
    PaperName(
        "GRAFT / GraphGAE / 2609.28963", "graph with rule=graft", "+turnkey=graph turnkey.credit.rule=graft",
        "methods/graph.md", "without the further sum over lambda, which is 0 once the values have converged",
    ),
    PaperName(
        "G2PO / 2606.22995", "graph with rule=g2po",
        "+turnkey=graph turnkey.credit.rule=g2po turnkey.credit.gamma=0.95", "methods/graph.md",
        "the released code has turnkey.credit.scope=steps",
    ),
    PaperName("RTMC / 2604.11037", "rtmc", "+turnkey=rtmc", "methods/rtmc.md",
              "turnkey.credit.states=actions: sets of what was done, as in the paper; signatures of actions are yours"),
    PaperName(
        "GTPO / group turn policy optimization / 2511.14846", "turn_norm", "+turnkey=turn_norm",
        "methods/turn_norm.md", "statistics are of the group; turnkey.credit.over=batch: of the batch. Not the GTPO of "
        "arXiv:2508.04349, which weighs tokens by entropy",
    ),
    PaperName(
        "MT-GRPO / multi-turn GRPO / 2505.11821", "turn_norm with rule=mt_grpo",
        "+turnkey=turn_norm turnkey.credit.rule=mt_grpo", "methods/turn_norm.md",
        "the turn rewards are the column turn_score: a component of turnkey.rewards with column: turn_score",
    ),
    PaperName(
        "IGPO / probe_gold / information gain policy optimization / 2510.14967",
        "information_gain with the strategy probe_gold",
        "+turnkey=information_gain turnkey.rollout.strategy=probe_gold", "methods/information_gain.md",
        "the released script has turnkey.credit.gain=log_probability; tasks need a right answer",
    ),
    PaperName("MatchTIR / 2601.10712", "dual_level with the reward matchtir",
              "+turnkey=dual_level 'turnkey.rewards=[{name: matchtir}]'", "methods/dual_level.md"),
    PaperName(
        "iStar / OPRL / 2509.19199", "step_episode with turnkey.prm", "+turnkey=istar", "learned-signals.md",
        "with step scores of yours: +turnkey=step_episode",
    ),
    PaperName("ProRAG / 2601.21912", "dual_granularity", "+turnkey=dual_granularity", "methods/dual_granularity.md"),
    PaperName("SPAE / step potential advantage / 2601.03823", "step_potential", "+turnkey=step_potential",
              "methods/step_potential.md", "the potential of each state is yours: extra.potential"),
    PaperName("ReBN / GEM / return batch normalization / LLMREINFORCE / 2510.01051", "rebn", "+turnkey=rebn",
              "methods/rebn.md"),
    PaperName("SeeUPO / 2602.06554", "seeupo", "+turnkey=seeupo", "methods/seeupo.md"),
    PaperName("HiPER / HAE / 2602.16165", "hae", "+turnkey=hae", "methods/hae.md",
              "turnkey.rollout.action_format=hiper and critic.enable=true, whose critic then has its three heads"),
    PaperName("Turn-PPO / LLMPPO / StepPO / step-GAE / turn-level PPO / 2512.17008", "turn_gae",
              "+turnkey=turn_gae +turnkey/loss=turn_ratio turnkey.loss.ratio=product", "methods/turn_gae.md",
              "needs critic.model.path"),
    PaperName("GAE / PPO / no-concat GAE / 1506.02438 / 1707.06347", "turn_gae", "+turnkey=turn_gae",
              "methods/turn_gae.md", "over turns, not tokens; needs critic.model.path"),
    PaperName("bi-level GAE / StarPO / RAGEN / VAGEN", "turn_gae", "+turnkey=turn_gae", "methods/turn_gae.md",
              "over turns alone: without the second GAE over the tokens of a turn", exact=False),
    PaperName("StarPO-S / 2504.20073", "turnkey.groups.keep", "+turnkey=turn_gae turnkey.groups.keep=0.25",
              "tasks.md", "the filter; the critic is turn_gae, over turns alone"),
    PaperName("VC-PPO / 2503.01491", "vc_gae", "+turnkey=vc_gae trainer.critic_warmup=20", "methods/vc_gae.md",
              "turns instead of tokens; needs critic.model.path"),
    PaperName("VAPO / 2504.05118", "vc_gae with length_alpha", "+turnkey=vc_gae turnkey.credit.length_alpha=0.5",
              "methods/vc_gae.md", "0.05 in the paper, where tokens are counted; its other parts are verl's"),
    PaperName("MARSHAL / MARS / 2510.15414", "marshal", "+turnkey=marshal", "methods/marshal.md"),
    PaperName("RAE / SPIRAL / role-conditioned advantage estimation / 2506.24119", "rae", "+turnkey=rae",
              "methods/rae.md"),
    # values by further rollouts, trees
    PaperName("VinePPO / vine / 2410.01679", "progress with the strategy vine",
              f"{_VINE} turnkey.rollout.strategy=vine", "branching.md#vine", "steps are turns, not lines of a text"),
    PaperName("SPO / SPO-chain / segment policy optimization / 2505.23564",
              "progress with the strategy spo_chain and the loss segment_mask",
              f"{_VINE} +turnkey/loss=segment_mask turnkey.rollout.strategy=spo_chain", "branching.md#spo_chain",
              "it cuts between turns, not inside a text"),
    PaperName("SPO-tree", "tree with rule=spo",
              "+turnkey=tree turnkey.credit.rule=spo turnkey.credit.norm=mean +turnkey/loss=segment_mask "
              "turnkey.rollout.strategy=tree", "methods/tree.md", "turns instead of segments"),
    PaperName("PAV / rewarding progress / 2410.08146", "progress", "+turnkey=progress", "methods/progress.md",
              "the chances of success are yours: extra.turn_value"),
    PaperName("VSRM / probe / 2508.10293", "progress with the strategy probe",
              "+turnkey=progress turnkey.credit.alpha=0 turnkey.rollout.strategy=probe", "branching.md#probe",
              "the difference of mean correctness; its look-ahead is the reward {name: progress, kind: vsrm}"),
    PaperName("GUI-Shepherd / 2509.23738", "the reward judge",
              "+turnkey=grpo_steps 'turnkey.rewards=[{name: outcome}, {name: judge, per: step, "
              "url: \"http://host:8000/v1\", model: prm}]'", "prm.md",
              "the model is trained on your log; how step and outcome rewards combine is not public", exact=False),
    PaperName("ProgRM / 2505.18121", "the reward progress",
              "+turnkey=grpo_steps 'turnkey.rewards=[{name: outcome}, {name: progress}]'", "rewards.md#vsrm-and-progrm",
              "the estimates are yours: info[\"extra\"][\"progress\"], or a model's: `turnkey prm data`"),
    PaperName("TreeRL / 2506.11902", "tree with rule=treerl",
              "+turnkey=tree turnkey.credit.rule=treerl turnkey.rollout.strategy=tree", "methods/tree.md"),
    PaperName("Tree-GRPO / 2509.21240", "tree with rule=tree_grpo",
              "+turnkey=tree turnkey.credit.rule=tree_grpo "
              "'turnkey.rollout.strategy={name: tree, branches: 3, depth: 1, roots: own}'", "methods/tree.md",
              "it forks at fixed turns, where the paper draws them"),
    PaperName("ARPO / entropy_branch / 2507.19849", "tree with rule=arpo and the strategy entropy_branch",
              "+turnkey=tree turnkey.credit.rule=arpo turnkey.rollout.strategy=entropy_branch "
              "actor_rollout_ref.rollout.n=8", "branching.md#entropy_branch"),
    PaperName("TreeRPO / 2506.05183", "tree with rule=spo",
              "+turnkey=tree turnkey.credit.rule=spo turnkey.rollout.strategy=tree", "methods/tree.md",
              "the same means of children; what the paper divides by is not known"),
    PaperName("PORTool / 2510.26020", "tree", "+turnkey=tree turnkey.rollout.strategy=tree", "methods/tree.md",
              "the same two parts; its aggregation and weights are not published", exact=False),
    PaperName("AT2PO / 2601.04767", "tree", "+turnkey=tree turnkey.rollout.strategy=tree +turnkey/loss=turn_ratio",
              "methods/tree.md", "without its values weighted by entropy", exact=False),
    PaperName("SLATE / 2602.23440", "siblings with the strategy siblings",
              "+turnkey=siblings turnkey.rollout.strategy=siblings actor_rollout_ref.rollout.n=1",
              "methods/siblings.md", "the judge that scores the candidates is yours: turnkey.rewards"),
    # baselines and groups
    PaperName("GRPO / step-level GRPO / multi_step_grpo / 2402.03300", "grpo_steps", "+turnkey=grpo_steps",
              "methods/grpo_steps.md"),
    PaperName("Dr. GRPO / 2503.20783", "grpo_steps with norm=mean",
              "+turnkey=grpo_steps turnkey.credit.norm=mean "
              "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "methods/grpo_steps.md"),
    PaperName("DAPO / 2503.14476", "grpo_steps with verl's keys",
              "+turnkey=grpo_steps actor_rollout_ref.actor.clip_ratio_high=0.28 "
              "actor_rollout_ref.actor.loss_agg_mode=token-mean", "configuration.md#group-filtering",
              "its dynamic sampling is verl's algorithm.filter_groups"),
    PaperName("RLOO / 2402.14740", "rloo_steps", "+turnkey=rloo_steps", "methods/rloo_steps.md"),
    PaperName("LOOP / 2502.01600", "rloo_steps", "+turnkey=rloo_steps", "methods/rloo_steps.md",
              "its advantage; the loss clips the ratio to [1/1.1, 1.1] and drops rollouts with an advantage near 0"),
    PaperName("MaxRL / 2602.02710", "maxrl", "+turnkey=maxrl", "methods/maxrl.md"),
    PaperName("MC-GRPO / median-centered GRPO / 2601.22582", "mc_grpo", "+turnkey=mc_grpo", "methods/mc_grpo.md",
              "turnkey.credit.floor=0 gives the released code's numbers"),
    PaperName("NGRPO", "ngrpo", "+turnkey=ngrpo", "methods/ngrpo.md"),
    PaperName("A-GRAE / 2602.05548", "a_grae", "+turnkey=a_grae", "methods/a_grae.md"),
    PaperName("COPO / 2508.04138", "copo", "+turnkey=copo", "methods/copo.md"),
    PaperName("V_0.5 / 2603.10848", "shrinkage", "+turnkey=shrinkage", "methods/shrinkage.md",
              "the earlier outcomes of a task instead of the paper's value model"),
    PaperName("DynaMO / 2602.19208", "dynamo_modulation with allocation=variance",
              "+turnkey=dynamo_modulation turnkey.groups.allocation=variance", "methods/dynamo_modulation.md"),
    PaperName("Rewarding the Unlikely", "unlikeliness", "+turnkey=unlikeliness", "methods/unlikeliness.md"),
    PaperName("HDPO / Metis / Act Wisely / 2604.08545", "hdpo with its loss", "+turnkey=hdpo +turnkey/loss=hdpo",
              "methods/hdpo.md"),
    PaperName("hierarchical GRPO / proposer-solver GRPO", "rae", "+turnkey=rae", "methods/rae.md",
              "a baseline per role, without peers of an episode", exact=False),
    # modifiers
    PaperName("EMPG / 2509.09265", "the modifier empg", "+turnkey=gigpo 'turnkey.credit.modify=[empg]'",
              "modifiers.md#empg"),
    PaperName("VERL / 2509.23808", "the modifier rank_shaping", "+turnkey=grpo_steps +turnkey/modifier=rank_shaping",
              "modifiers.md#rank_shaping", "turns as responses; states of the trainer's forward pass", exact=False),
    PaperName("ConciseR / L-GRPO / length_gate / 2505.21178", "the modifier length_gate",
              "+turnkey=grpo_steps 'turnkey.credit.modify=[length_gate]'", "modifiers.md#length_gate"),
    PaperName("tool_gate", "the modifier tool_gate", "+turnkey=grpo_steps 'turnkey.credit.modify=[tool_gate]'",
              "modifiers.md#tool_gate", "HDPO's tool advantage on any method"),
    PaperName("AEPO / 2510.14545", "the modifier empg", "+turnkey=grpo_steps 'turnkey.credit.modify=[empg]'",
              "modifiers.md#empg", "another weighting by entropy; AEPO's rollout and clip are not here", exact=False),
    # a teacher's prompt
    PaperName("RLSD / SDAR code base", "the modifier rlsd", "+turnkey=grpo_steps +turnkey/modifier=rlsd",
              "modifiers.md#rlsd"),
    PaperName("AgentOPSD / 2608.05987", "the modifier agent_opsd", "+turnkey=grpo_steps +turnkey/modifier=agent_opsd",
              "modifiers.md#agent_opsd", "the prior is the success rate; prior: mean_score is the released code's"),
    PaperName("GRSD / 2607.28076", "the modifier grsd", "+turnkey=grpo_steps +turnkey/modifier=grsd",
              "modifiers.md#grsd", "the source reflection asks another model; the policy does not learn to reflect"),
    PaperName("OPID / 2606.26790", "the modifier opid", "+turnkey=grpo_steps +turnkey/modifier=opid",
              "modifiers.md#opid", "one text per row; the source reflection with about: episode has a model write it"),
    PaperName("TRIAL / 2608.07371", "the modifier trial", "+turnkey=grpo_steps +turnkey/modifier=trial",
              "modifiers.md#trial", "our reading: its loss and its clamp are not published", exact=False),
    PaperName("HCAPO / 2603.08754", "the modifier hcapo", "+turnkey=grpo_steps +turnkey/modifier=hcapo",
              "modifiers.md#hcapo", "no code of the authors is known"),
    PaperName("SDAR / 2605.15155", "the loss sdar", "+turnkey=grpo_steps +turnkey/loss=sdar", "losses.md#sdar"),
    PaperName("OPSD", "the loss sdar with pg_weight=0",
              "+turnkey=grpo_steps +turnkey/loss=sdar turnkey.loss.pg_weight=0", "losses.md#sdar"),
    PaperName("Skill-SD / 2604.10674", "the loss skill_sd", "+turnkey=grpo_steps +turnkey/loss=skill_sd",
              "losses.md#skill_sd"),
    PaperName("SDPO / 2601.20802", "the loss sdpo_sampled", "+turnkey=grpo_steps +turnkey/loss=sdpo_sampled",
              "losses.md#sdpo_sampled", "on the sampled token, by the old weights", exact=False),
    PaperName("SDFT / 2601.19897", "the loss sdpo_sampled",
              "+turnkey=grpo_steps +turnkey/loss=sdpo_sampled turnkey.teacher.source=gold_answer",
              "losses.md#sdpo_sampled", "on the sampled token, by the old weights", exact=False),
    PaperName("Skill-GRPO", "turnkey.rollout.skill", "+turnkey=grpo_steps turnkey.rollout.skill=skill",
              "self-distillation.md#the-baseline-to-beat", "skill: the column of your data"),
    PaperName("ADRS / 2608.03223", "the modifier rlsd", "+turnkey=grpo_steps +turnkey/modifier=rlsd",
              "self-distillation.md#left-out", "its gate cancels: about the advantage itself is left", exact=False),
    # losses
    PaperName("ST-PPO / SORL / SO-PPO / 2511.20718", "the loss st_ppo", "+turnkey=turn_gae +turnkey/loss=st_ppo",
              "losses.md#st_ppo-s_ppo", "needs critic.model.path"),
    PaperName("turn_ratio / turn-level ratio", "the loss turn_ratio", "+turnkey=grpo_steps +turnkey/loss=turn_ratio",
              "losses.md#turn_ratio"),
    PaperName("segment_mask / probability mask", "the loss segment_mask",
              "+turnkey=grpo_steps +turnkey/loss=segment_mask", "losses.md#segment_mask"),
    PaperName("SO-GRPO", "the loss st_ppo", "+turnkey=grpo_steps +turnkey/loss=st_ppo", "losses.md#st_ppo-s_ppo"),
    PaperName("S-PPO", "the loss s_ppo", "+turnkey=turn_gae +turnkey/loss=s_ppo", "losses.md#st_ppo-s_ppo",
              "needs critic.model.path"),
    PaperName("A-3PO / AReaL / decoupled PPO / 2512.06547", "the loss a3po", "+turnkey=grpo_steps +turnkey/loss=a3po",
              "losses.md#a3po", "for asynchronous trainers"),
    PaperName("DGPO", "the loss dgpo", "+turnkey=grpo_steps +turnkey/loss=dgpo", "losses.md#dgpo"),
    PaperName("PSFT / proximal SFT / 2508.17784", "the loss psft", "+turnkey=grpo_steps +turnkey/loss=psft",
              "losses.md#psft"),
    PaperName("REBEL / 2404.16767", "the loss rebel", "+turnkey=grpo_steps +turnkey/loss=rebel", "losses.md#rebel"),
    PaperName("GSPO / 2507.18071", "verl's loss gspo", f"{_VERLS_LOSS}gspo", "losses.md",
              "one ratio per row, which is a turn; per turn of a conversation: +turnkey/loss=turn_ratio"),
    PaperName("CISPO / MiniMax-M1", "verl's loss cispo", f"{_VERLS_LOSS}cispo", "losses.md"),
    PaperName("SAPO", "verl's loss sapo", f"{_VERLS_LOSS}sapo", "losses.md"),
    PaperName("GMPO / geo_mean", "verl's loss geo_mean", f"{_VERLS_LOSS}geo_mean", "losses.md"),
    PaperName("Clip-Cov", "verl's loss clip_cov", f"{_VERLS_LOSS}clip_cov", "losses.md"),
    PaperName("KL-Cov", "verl's loss kl_cov", f"{_VERLS_LOSS}kl_cov", "losses.md"),
    PaperName("DPPO", "verl's loss dppo_tv", f"{_VERLS_LOSS}dppo_tv", "losses.md"),
    # estimators of verl
    PaperName("REINFORCE++", "verl's own reinforce_plus_plus",
              f"{_VERLS_ESTIMATOR}reinforce_plus_plus", "methods.md", f"{_ROWS}; rebn compares turns"),
    PaperName("OPO", "verl's own opo", f"{_VERLS_ESTIMATOR}opo", "methods.md", _ROWS),
    PaperName("GPG", "verl's own gpg", f"{_VERLS_ESTIMATOR}gpg", "methods.md", _ROWS),
    # rewards and tasks
    PaperName("StepSearch / 2505.15107", "the reward stepsearch",
              "+turnkey=turn_gae 'turnkey.rewards=[{name: answer}, {name: stepsearch}]'", "rewards.md#stepsearch",
              "needs critic.model.path"),
    PaperName("R1-Router / Step-GRPO / 2505.22095", "the reward r1_router",
              "+turnkey=dual_level 'turnkey.rewards=[{name: r1_router}]'", "rewards.md#r1-router"),
    PaperName("SPA-RL / 2505.20732", "the rewards scorer and grounded",
              "+turnkey=rebn 'turnkey.rewards=[{name: scorer, url: \"http://host:8000/steps\", api: turns}, "
              "{name: grounded, weight: 0.5}]'", "rewards.md#spa-rl", "the model of contributions is yours"),
    PaperName("ArenaRL / 2601.06487", "the reward arena",
              "+turnkey=grpo_steps 'turnkey.rewards=[{name: arena, url: \"http://host:8000/v1\", model: judge}]'",
              "rewards.md#arenarl"),
    PaperName("SSL / sweet spot learning / 2601.22491", "the reward sweet_spot",
              "+turnkey=grpo_steps 'turnkey.rewards=[{name: outcome}, {name: sweet_spot, weight: 0.5}]'",
              "rewards.md#sweet-spot-learning-ssl"),
    PaperName("contrastive rewards / 2403.07708", "the reward contrastive",
              "+turnkey=grpo_steps 'turnkey.rewards=[{name: outcome}, {name: contrastive}]'",
              "rewards.md#contrastive-rewards", "the baseline is stored with the tasks, or a file"),
    PaperName("ADHint / 2512.13095", "turnkey.groups.hint_high", "+turnkey=grpo_steps turnkey.groups.hint_high=0.5",
              "tasks.md#hints", "the schedule of the share; tasks need a hint"),
    PaperName("R^3 / 2601.19620", "turnkey.groups.replay", "+turnkey=grpo_steps turnkey.groups.replay=2",
              "tasks.md#replay"),
    PaperName("Skywork R1V2 / SSB / selective sample buffer / 2504.16656", "turnkey.groups.buffer",
              "+turnkey=grpo_steps turnkey.groups.buffer=64", "tasks.md#buffer"),
    PaperName("SPEAR / 2509.22601", "turnkey.groups.replay", "+turnkey=gigpo turnkey.groups.replay=2",
              "tasks.md#replay", "another replay, of episodes with the other end", exact=False),
    PaperName("TRACE / 2607.13988", "the modifier trace with the strategy probe_gold",
              "+turnkey=grpo_steps +turnkey/modifier=trace turnkey.rollout.strategy=probe_gold",
              "modifiers.md#trace", "gains by the policy instead of a frozen reference"),
    PaperName("ECHO / 2605.24517", "turnkey.update.observation_coefficient",
              "+turnkey=grpo_steps turnkey.rollout.prompt=conversation turnkey.update.observation_coefficient=0.05",
              "losses.md#observations-as-a-loss", "the mean is over the tokens of a batch, as in prime-rl"),
)  # fmt: skip


def plain(name: object) -> str:
    """A name without case, spaces and signs, which papers and frameworks write differently."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower().removeprefix("arxiv:").replace("++", "plusplus"))


@cache
def _by_name() -> Mapping[str, PaperName]:
    return {plain(name): entry for entry in PAPER_NAMES for name in entry.names.split(" / ")}


def paper_name(name: object) -> PaperName | None:
    """The entry of a name in a paper or a framework; None if the name is unknown."""
    return _by_name().get(plain(name))


def known_as(name: object, of: str = "") -> str:
    """``; here, gtpo is turn_norm: +turnkey=turn_norm ...``, to end an error with.

    Empty for a name of no paper, for our own in another spelling, and where its line does not hold ``of``.
    """
    entry = paper_name(name)
    if entry is None or of not in entry.line:
        return ""
    if plain(entry.ours.split()[-1] if of == "loss" else entry.ours) == plain(name):
        return ""
    return f"; {entry.equivalent(name)}: {entry.line} (`turnkey list methods {name}` explains)."


class NotHere(NamedTuple):
    """``names``: of methods, and their arXiv numbers, separated by `` / ``; ``why``: the reason, part of a sentence."""

    names: str
    why: str


ABSENT = (
    # nothing to implement
    NotHere("Hi-Agent / 2510.14388", "the formula of its foresight advantage is not published"),
    NotHere("MasHost / HRPO / 2506.08507", "neither the formula of its advantage nor code is published"),
    NotHere("TurnSight / 2608.04007", "the abstract alone is known, without formulas"),
    NotHere("HERO", "the abstract alone is known, without formulas"),
    NotHere("DRACO / 2609.04094", "the abstract alone is known, without formulas"),
    NotHere(
        "P3O / 2310.00212", "its two clipped objectives are not published; without clipping it is RLOO of two rollouts"
    ),
    NotHere("TIGPO / 2609.03383", "no source with its formulas; it is graph with a graph that is kept per task"),
    # preferences of pairs
    NotHere(
        "TDPO / token-level DPO / 2404.11999",
        "offline pairs, and a divergence over the whole vocabulary, which a policy loss does not see",
    ),
    NotHere("SimPO", "offline pairs; online, its length normalization is an advantage divided by the length"),
    NotHere(
        "DPO / StepORLM / CPL / Step-APO",
        "offline pairs, and verl has no trainer for them; `turnkey prm data --kind pairs` writes them",
    ),
    NotHere("accelerated preference optimization / directional preference alignment", "offline preferences"),
    NotHere("Nash mirror prox", "theory of preference games, without a formula for agents"),
    # a second model or other signals
    NotHere("V_0 / 2602.03584", "needs its authors' pretrained value model; V_0.5 is here"),
    NotHere(
        "HiLL / 2604.00698", "trains a second policy that writes hints; hints of the data are turnkey.groups.hint_high"
    ),
    NotHere("UCOB / 2606.29502", "needs the largest logits of two prompts inside the actor"),
    NotHere("GFlowVLM", "another objective: flows, not returns"),
    NotHere("GTPO of token entropy / 2508.04349", "weighs single tokens by their entropy; EMPG weighs turns"),
    NotHere(
        "progress advantage / 2606.26080", "its authors score finished answers with it; as a reward it pays for drift"
    ),
    # not methods of training
    NotHere(
        "learning stagnation / 2603.06009", "a diagnosis: lower the learning rate, then train more prompts per step"
    ),
    NotHere("RAGEN-2 / 2604.06268", "a diagnosis, not a method: metrics.md#responses-that-fit-every-prompt has it"),
    NotHere("decision density / 2606.22164", "a diagnosis, not a method"),
    NotHere("meow-tea-taro / practitioner's guide / 2510.01132", "advice on settings"),
    NotHere("PPO-max / Secrets of RLHF / MAPPO", "advice on settings of PPO, which are verl's keys"),
    NotHere("step reward models analysis / What are SRMs rewarding", "an analysis"),
    NotHere("phi-Decoding / Let's reward step by step", "search at inference, without training"),
    NotHere("SteP / stacked policies / ProTIP", "prompts and retrieval of tools, without training"),
    NotHere(
        "Math-Shepherd", "labels from rollouts of each step of a text; `turnkey prm data` takes those that the run has"
    ),
    NotHere("WebSTAR", "supervised training on filtered steps"),
    NotHere("ACECode", "a reward of the run time of single answers of code"),
)


def absent(name: str) -> NotHere | None:
    """The entry of a method that is not here; None if the name is unknown."""
    return next((entry for entry in ABSENT for known in entry.names.split(" / ") if plain(known) == plain(name)), None)
