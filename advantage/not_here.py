"""Methods of the literature that this package does not have, and why: docs/coverage.md, `turnkey list methods NAME`."""

from __future__ import annotations

from typing import NamedTuple


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
    from verl_turnkey.advantage.paper_names import plain

    return next((entry for entry in ABSENT for known in entry.names.split(" / ") if plain(known) == plain(name)), None)
