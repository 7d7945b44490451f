"""The gradient of an update is that of the whole batch in float64, on ranks and in parts of sequences.

Every shipped loss, with weights of tokens, importance, a teacher's columns and learned observations, a critic of one
value and of several heads, and both kinds of process reward model; merged rows and a row per step; on one rank and on
two data-parallel ranks, packed and padded, on two Ulysses ranks, and with LoRA.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from naive.common import turns_of
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_turnkey.advantage import StepBatch
from verl_turnkey.advantage.methods.hae import HEADS
from verl_turnkey.losses import losses
from verl_turnkey.losses.objectives import ObjectiveParams, gradient, objective_spec
from verl_turnkey.losses.registry import TEACHER, scales_gradient, token_loss, weight_share
from verl_turnkey.plugins.cli.tables import shipped_losses
from verl_turnkey.plugins.config.scorers import COEFFICIENT, OUT
from verl_turnkey.plugins.credit.trainer_columns import VALUES, target_field, value_field

pytestmark = pytest.mark.timeout(2000)  # of MOST_SECONDS the first test may take all

HERE = Path(__file__).parent
Case = dict[str, Any]
ROWS, MINI_BATCHES, MOST_SECONDS = 8, 3, 1800.0
ENTROPY, OBSERVATION = 0.01, 0.5
LORA = 4
REFUSED = ("critic", "heads", "head")
"""scorers whose last layer an adapter would leave as it is: a run with LoRA refuses them, see test_rules.py"""
SETUPS: dict[str, tuple[int, int, bool, int, tuple[str, ...]]] = {
    "1 rank": (1, 1, True, 0, ()),
    "2 ranks": (2, 1, True, 0, ()),
    "2 ranks per sequence": (2, 2, True, 0, ()),
    "1 rank, padded": (1, 1, False, 0, ()),
    "2 ranks, padded": (2, 1, False, 0, ()),
    "2 ranks, LoRA": (2, 1, True, LORA, REFUSED),
}
"""ranks, over how many a sequence is spread, whether rows are packed, the rank of LoRA, and what it does not train"""
SWITCHED = ("vanilla", "turn_ratio", "st_ppo", "sdar")
SILENT = "a rank without a turn"
SWITCHES = (SILENT, "importance", "weights", "observations")
LOSSES = ("vanilla", *shipped_losses())
OBJECTIVES = {"implicit": "preference", "head": "sum_to_outcome"}
"""of each kind of process reward model"""
SCORERS = ("critic", "heads", *OBJECTIVES)
PRM = ObjectiveParams(beta=0.5)
CLIP = 0.3
"""of values"""
OLD = [value_field(HEADS, head) for head in HEADS]
FEW = 24
"""tokens of a micro-batch: one or two rows; 1000 takes all"""
PER_STEP = "a row per step"
OF_ROWS = "rebel"
"""the loss of whole rows, which is another one in rows of one step"""


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """(B, L) float64, zero behind the end of a row."""
    return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)


def forward(model: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) log-probabilities and entropies of the responses, each row by itself."""
    log_probs, entropies = [], []
    for prompt, response in zip(case["prompts"], case["responses"], strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1)
        log_probs.append(logp.gather(1, response[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return padded(log_probs), padded(entropies)


class WithHeads(torch.nn.Module):
    """The transformer of a language model with another last layer."""

    def __init__(self, model: Any, layer: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model = model.model
        self.score = torch.nn.Linear(layer["weight"].shape[1], len(layer["weight"])).double()
        self.score.load_state_dict(layer)


def scores(model: Any, case: Case) -> list[torch.Tensor]:
    """Each output of a scorer, (B, L): of a process reward model with a head at the token, of others before it."""
    if case["loss"] == "implicit":
        return [forward(model, case)[0]]
    rows, shift = [], int(case["loss"] != "head")
    for prompt, response in zip(case["prompts"], case["responses"], strict=True):
        end = len(prompt) + len(response) - shift
        hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state[0]
        rows.append(model.score(hidden[end - len(response) : end]))
    return list(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).unbind(-1))


def turn_numbers(model: Any, case: Case) -> torch.Tensor:
    """What an objective reads of each turn, in float64."""
    [output], old = scores(model, case), padded(case["old_log_probs"])
    turns = [(row, turn) for row, mask in enumerate(case["response_mask"]) for turn in turns_of(mask.tolist())]
    if case["loss"] == "head":
        return torch.stack([output[row, turn[-1]] for row, turn in turns])
    return torch.stack([(output[row, turn] - old[row, turn]).sum() for row, turn in turns])


def steps_of(case: Case) -> StepBatch:
    """The turns of the rows, of which every two are a group."""
    steps = [(row, t) for row, mask in enumerate(case["response_mask"]) for t in range(len(turns_of(mask.tolist())))]
    rows = [row for row, _ in steps]
    numbers = {"step": [t for _, t in steps], "reward": [float(row % 2) for row in rows]}
    return StepBatch(group=[row // 2 for row in rows], trajectory=[str(row) for row in rows], **numbers)


def fields_of_scorers(models: dict[str, Any], usual: Case, numbers: Any) -> dict[str, dict[str, list[torch.Tensor]]]:
    """By scorer the columns of the queue that its loss reads."""
    fields: dict[str, dict[str, list[torch.Tensor]]] = {"critic": {VALUES: numbers(), "returns": numbers()}}
    fields["heads"] = dict(zip(OLD, (numbers(), numbers(), numbers()), strict=True))
    for head, place in zip(HEADS, (-1, 0, 0), strict=True):
        columns = [torch.full((len(mask),), torch.nan) for mask in usual["response_mask"]]
        for column, target, mask in zip(columns, numbers(2.0), usual["response_mask"], strict=True):
            at = [turn[place] for turn in turns_of(mask.tolist())][:: 1 if head != HEADS[-1] else 2]
            column[at] = target[at]
        fields["heads"][target_field(head)] = columns
    for kind, objective in OBJECTIVES.items():
        case = {**usual, "loss": kind}
        with torch.no_grad():
            q = turn_numbers(models[kind], case)
        derivative = gradient(objective, q, steps_of(case), PRM)
        assert derivative is not None
        coefficients, of_rows = iter(derivative.coefficients.float()), []
        for mask in usual["response_mask"]:
            of_rows.append(torch.zeros(len(mask)))
            for turn in turns_of(mask.tolist()):
                of_rows[-1][turn[-1:] if kind == "head" else turn] = next(coefficients)
        fields[kind] = {COEFFICIENT: of_rows}
    return fields


def by_step(case: Case) -> Case:
    """The case with a row per turn, in whose prompt everything before is."""
    cuts = [
        (row, turn[0], turn[-1] + 1)
        for row, mask in enumerate(case["response_mask"])
        for turn in turns_of(mask.tolist())
    ]

    def cut(column: Any) -> Any:
        if isinstance(column, torch.Tensor):
            return column[[row for row, *_ in cuts]]
        if isinstance(column, dict):
            return {name: cut(values) for name, values in column.items()}
        return [column[row][begin:end] for row, begin, end in cuts]

    prompts = [torch.cat([case["prompts"][row], case["responses"][row][:begin]]) for row, begin, _ in cuts]
    columns = {name: cut(column) for name, column in case.items() if isinstance(column, list | dict) and column}
    return {**case, **columns, "prompts": prompts, "is_linear": True}


def silenced(case: Case) -> Case:
    """The case without the turns of every second row, which are those of the second rank."""
    mask = [mask * (row % 2 == 0) for row, mask in enumerate(case["response_mask"])]
    made = {**case, "response_mask": mask, "is_linear": True}
    if COEFFICIENT in (fields := case.get("fields", {})):
        fields = {COEFFICIENT: [c * m for c, m in zip(fields[COEFFICIENT], mask, strict=True)]}
    targets = {name: values for name, values in fields.items() if name in map(target_field, HEADS)}
    for name, values in targets.items():
        fields = {**fields, name: [v.masked_fill(m == 0, torch.nan) for v, m in zip(values, mask, strict=True)]}
    return {**made, "fields": fields} if fields else made


def make_cases(model: Any, models: dict[str, Any]) -> dict[str, Case]:
    draw = torch.Generator().manual_seed(1)
    usual: Case = {"prompts": [], "responses": [], "response_mask": [], "mean": "token-mean", "params": {}}
    for row in range(ROWS):  # one to three turns, some rows with an observation before the first
        mask = ([1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0], [1] * (2 + row))[row % 3]
        usual["prompts"].append(torch.randint(3, 200, (3 + row % 3,), generator=draw))
        usual["responses"].append(torch.randint(3, 200, (len(mask),), generator=draw))
        usual["response_mask"].append(torch.tensor(mask))
    sizes = [len(mask) for mask in usual["response_mask"]]

    def numbers(scale: float = 1.0) -> list[torch.Tensor]:
        return [scale * torch.randn(size, generator=draw) for size in sizes]

    with torch.no_grad():
        now = [row[:size].float() for row, size in zip(forward(model, usual)[0], sizes, strict=True)]
    usual |= {"old_log_probs": [a + b for a, b in zip(now, numbers(0.5), strict=True)], "advantages": numbers(3.0)}
    columns = {
        "staleness": torch.arange(ROWS).float() % 3,
        "tool_advantages": [row * (i % 2) for i, row in enumerate(numbers())],
        "rewards": torch.randn(ROWS, generator=draw),
        "group_log_ratio": 0.3 * torch.randn(ROWS, generator=draw),
        "group_reward": torch.randn(ROWS, generator=draw),
        **dict(
            zip(
                TEACHER, ([a + b for a, b in zip(now, numbers(), strict=True)], torch.tensor([1.0, 0] * 4)), strict=True
            )
        ),
    }
    uniform = [row.abs() for row in numbers()]
    fields = fields_of_scorers(models, usual, numbers)

    def case(loss: str, tokens: int = FEW, **more: Any) -> Case:
        made = {**usual, "loss": loss, "max_tokens": tokens, "packed": True, **more}
        if loss in SCORERS:
            return {**made, "clip": CLIP, "fields": fields[loss]}
        made["entropy"] = ENTROPY
        if loss in losses():
            spec = losses()[loss]
            made["mean"] = "seq-mean-token-mean" if spec.per_row else "token-mean"
            made["columns"] = {name: columns[name] for name in spec.needs}
        return made

    observed = [(1 - mask) / 20 for mask in usual["response_mask"]]
    switches: dict[str, dict[str, Any]] = {
        "1000": {"tokens": 1000},
        str(FEW): {},
        SILENT: {},
        "importance": {"rollout_is_weights": uniform},
        "weights": {"weights": [row / 100 for row in uniform]},
        "observations": {"observed": observed, "observation": OBSERVATION},
    }
    cases = {}
    for name in names():
        loss, switch, *layout = name.split(", ")
        cases[name] = case(loss, **switches[switch])
        if layout:
            cases[name] = by_step(cases[name])
        if switch == SILENT:
            cases[name] = silenced(cases[name])
        if loss in losses():
            spec = losses()[loss]
            if (share := weight_share(spec, spec.params(), *shared(cases[name]))) is not None:
                cases[name]["weight_share"] = float(share)
    return cases


def extra_of(case: Case) -> dict[str, torch.Tensor]:
    """The further inputs of the loss, (B, L) or (B,)."""
    columns = case.get("columns", {})
    return {name: column if isinstance(column, torch.Tensor) else padded(column) for name, column in columns.items()}


def shared(case: Case) -> tuple[Any, ...]:
    return (*(padded(case[name]) for name in ("old_log_probs", "advantages", "response_mask")), extra_of(case))


def of_scorer(model: Any, case: Case) -> torch.Tensor:
    """The loss of a scorer; of a process reward model the objective of the whole batch, or with its derivatives."""
    fields = {name: padded(column) for name, column in case["fields"].items()}
    if case["loss"] in OBJECTIVES and "is_linear" in case:
        return (fields[COEFFICIENT] * scores(model, case)[0]).sum()
    if case["loss"] in OBJECTIVES:
        result = objective_spec(OBJECTIVES[case["loss"]]).fn(turn_numbers(model, case), steps_of(case), PRM)
        assert result is not None
        return result[0]
    mask, total = padded(case["response_mask"]), torch.zeros((), dtype=torch.float64)
    pairs = [(VALUES, "returns")] if case["loss"] == "critic" else zip(OLD, map(target_field, HEADS), strict=True)
    for new, (before, name) in zip(scores(model, case), pairs, strict=True):
        at = (mask > 0) & ~fields[name].isnan()
        new, old, target = new[at], fields[before][at], fields[name][at]
        errors = torch.maximum((new - target) ** 2, (new.clamp(old - CLIP, old + CLIP) - target) ** 2)
        if case["loss"] == "heads":
            total = total + errors.mean()
        elif "weights" in case:
            total = total + (errors * padded(case["weights"])[at]).sum() * MINI_BATCHES / 2
        else:
            total = total + errors.mean() / 2
    return total


def twin(model: Any, case: Case) -> dict[str, torch.Tensor]:
    """The gradients of the whole batch at once, in float64."""
    if case["loss"] in SCORERS:
        return slopes(model, of_scorer(model, case))
    log_prob, entropy = forward(model, case)
    old, advantages, mask, extra = shared(case)
    scale, bias = None, None
    if case["loss"] == "vanilla":  # PPO with a dual clip at 3
        ratio = (log_prob - old).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)
    else:
        spec = losses()[case["loss"]]
        params = spec.params()
        term = token_loss(spec, params, log_prob, old, advantages, mask, extra)
        loss, bias = term.loss, term.bias
        scale = params.gradient_scale if scales_gradient(params) else None
    importance = padded(case["rollout_is_weights"]) if "rollout_is_weights" in case else 1.0
    share = mask / mask.sum()
    if case["mean"] == "seq-mean-token-mean":
        share = mask / mask.sum(1, keepdim=True) / len(mask)
    if "weights" in case:
        share = mask * padded(case["weights"]) * MINI_BATCHES
    total = (loss * importance * share).sum() - ENTROPY * (entropy * share).sum()
    if "observed" in case:
        total = total - OBSERVATION * MINI_BATCHES * (padded(case["observed"]) * log_prob).sum()
    result = slopes(model, total)
    if scale is not None:
        assert bias is not None
        lost = slopes(model, (bias * importance * share).sum())
        norm = torch.cat([g.flatten() for g in lost.values()]).norm().item()
        result = {name: g * scale(norm) for name, g in result.items()} if norm else result
    return result


def slopes(model: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(value, [*parameters.values()], retain_graph=True), strict=True))


class Results(NamedTuple):
    expected: dict[int, Any]
    """the float64 gradients of each case by the rank of LoRA"""
    done: dict[tuple[str, int], Any]
    """what each rank of a setup did"""
    outputs: dict[str, list[torch.Tensor]]
    """of scorers before the update, in float64"""
    cases: dict[str, Case]


def computed(folder: Path, tokenizer: Path, setups: dict[str, Any], device: str = "cpu") -> Results:
    """Run every case in ``setups``, which are as :data:`SETUPS`; ``tokenizer``: a folder with one."""
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=259, tie_word_embeddings=True, **shape))
    with torch.no_grad():  # fresh weights are so small that nothing would move
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast.from_pretrained(tokenizer).save_pretrained(folder / "model")
    model, draw = model.double(), torch.Generator().manual_seed(5)
    heads = {number: {"weight": torch.randn(number, 64, generator=draw) / 8, "bias": torch.ones(number)}
             for number in (1, len(HEADS))}  # fmt: skip
    torch.save(heads, folder / "heads.pt")
    models: dict[str, Any] = {kind: WithHeads(model, heads[len(HEADS) if kind == "heads" else 1]) for kind in REFUSED}
    models |= {"implicit": model}
    cases = make_cases(model, models)
    torch.save(cases, folder / "cases.pt")
    (folder / "setups.json").write_text(json.dumps(setups))
    command = [sys.executable, str(HERE / "parallel_ranks.py"), str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TURNKEY_DEVICE": device}
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=variables, **options) as process:
        try:
            output, _ = process.communicate(timeout=MOST_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            raise
    assert process.returncode == 0, output[-4000:]
    loaded = {
        (setup, rank): torch.load(folder / f"{setup} {rank}.pt")
        for setup, (world, *_) in setups.items()
        for rank in range(world)
    }
    expected = {0: {name: twin(models.get(case["loss"], model), case) for name, case in cases.items()}}
    outputs = {name: scores(models[case["loss"]], case) for name, case in cases.items() if case["loss"] in SCORERS}
    if not any(lora for *_, lora, _ in setups.values()):
        return Results(expected, loaded, outputs, cases)
    adapted = get_peft_model(model, LoraConfig(r=LORA, lora_alpha=2 * LORA, target_modules="all-linear"))
    values = torch.load(folder / "adapter 0.pt")
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.copy_(values.pop(name))
    assert not values
    # The derivatives of an objective are those at the scores of the model without an adapter.
    trained = {name: {**case, "is_linear": True} for name, case in cases.items() if case["loss"] not in REFUSED}
    expected[LORA] = {name: twin(adapted, case) for name, case in trained.items()}
    return Results(expected, loaded, outputs, cases)


def gradient_off(result: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """How far the gradient of a case is from the expected one, of its size."""
    errors = [(result["gradients"][name].double() - gradient).square().sum() for name, gradient in expected.items()]
    return (sum(errors) / sum(gradient.square().sum() for gradient in expected.values())).sqrt().item()


@pytest.fixture(scope="module")
def results(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return computed(tmp_path_factory.mktemp("parallel"), model_dir, SETUPS)


def names() -> list[str]:
    merged = [f"{name}, {tokens}" for name in (*LOSSES, *SCORERS) for tokens in (1000, FEW)]
    merged += [f"{loss}, {switch}" for loss in SWITCHED for switch in SWITCHES]
    merged += [*(f"{scorer}, {SILENT}" for scorer in SCORERS), "critic, weights"]
    # In rows of one step observations are in the prompts, which nothing learns.
    return merged + [f"{name}, {PER_STEP}" for name in merged if not name.endswith((", 1000", ", observations"))]


def runs() -> list[tuple[str, str]]:
    return [(name, setup) for name in names() for setup in SETUPS if name.split(", ")[0] not in SETUPS[setup][-1]]


@pytest.mark.parametrize(("name", "setup"), runs())
def test_the_gradient_is_that_of_the_whole_batch(results, name, setup):
    expected, done = results.expected[SETUPS[setup][3]][name], results.done[setup, 0][name]["gradients"]
    assert done.keys() == expected.keys()
    largest = max(slope.abs().max().item() for slope in expected.values())
    assert largest > 1e-4
    for parameter, slope in expected.items():
        torch.testing.assert_close(
            done[parameter].double(), slope, rtol=0, atol=5e-5 * largest
        )  # 3.5e-5 at most, of implicit


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if not SETUPS[setup][3]])
def test_the_outputs_of_scorers_are_those_of_each_row_by_itself(results, setup):
    world, spread, *_ = SETUPS[setup]
    for name, expected in results.outputs.items():
        case = results.cases[name]
        fields = {"critic": [VALUES], "heads": OLD}.get(case["loss"], [OUT])
        for rank in range(world // spread):
            rows = range(rank, len(case["responses"]), world // spread)
            for field, columns in zip(fields, expected, strict=True):
                for row, output in zip(rows, results.done[setup, rank][name]["outputs"][field], strict=True):
                    own = case["response_mask"][row].bool()  # on a CPU a padded row has log-probabilities of no other
                    size, end = len(own), len(output) - (case["loss"] != "head")
                    response = output[end - size : end].double()
                    torch.testing.assert_close(response[own], columns[row, :size][own], rtol=1e-4, atol=1e-4)


def test_a_row_per_step_is_the_same_update(results):
    """In float64; a loss of whole rows is another one."""
    for name in [name for name in names() if name.endswith(PER_STEP) and SILENT not in name]:
        merged, steps = (results.expected[0][of] for of in (name.removesuffix(f", {PER_STEP}"), name))
        largest = max(slope.abs().max().item() for slope in merged.values())
        apart = max((merged[p] - steps[p]).abs().max().item() for p in merged) / largest
        assert (apart > 1e-3) == name.startswith(OF_ROWS), (name, apart)
        assert name.startswith(OF_ROWS) or apart < 1e-6, (name, apart)


def test_the_cases_are_what_they_are_for(results):
    """Micro-batches cut the batch and its episodes, ranks have other rows, and each switch changes the gradient."""
    (expected, adapters), done = results.expected.values(), results.done
    assert expected.keys() == {*names()}
    assert adapters.keys() == {name for name, setup in runs() if SETUPS[setup][3]}
    assert not expected[names()[0]].keys() & adapters[names()[0]].keys()

    def micro_batches(name: str, setup: str, rank: int = 0) -> list[list[list[int]]]:
        """The tokens of each response in each."""
        return done[setup, rank][name]["responses"]

    assert len(micro_batches("vanilla, 1000", "1 rank")) == 1
    assert len(micro_batches(f"vanilla, {FEW}", "1 rank")) > 3
    both = [micro_batches("vanilla, 1000", "2 ranks", rank) for rank in range(2)]
    assert both[0] != both[1]
    assert sum(len(rows) for parts in both for rows in parts) == ROWS
    same = [micro_batches("vanilla, 1000", "2 ranks per sequence", rank) for rank in range(2)]
    assert same[0] == same[1] == micro_batches("vanilla, 1000", "1 rank")
    turns = [len(turns_of(mask.tolist())) for mask in results.cases["vanilla, 1000"]["response_mask"]]
    name = f"vanilla, {FEW}, {PER_STEP}"
    cut = [micro_batches(name, "2 ranks", rank) for rank in range(2)]
    assert sum(len(rows) for parts in cut for rows in parts) == sum(turns) > ROWS
    assert min(map(len, cut)) > 1
    assert turns[0] > 1
    for rank, response in enumerate(results.cases[name]["responses"][:2]):  # of one episode
        assert [response.tolist() in itertools.chain(*parts) for parts in cut] == [rank == 0, rank == 1]
    first = {name: next(iter(gradients.values())) for name, gradients in expected.items()}
    for loss in SWITCHED:
        for switch in SWITCHES:
            assert not torch.allclose(first[f"{loss}, {switch}"], first[f"{loss}, {FEW}"], rtol=1e-2)
