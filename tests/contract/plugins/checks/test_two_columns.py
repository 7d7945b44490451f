"""A file of the user's own needs two columns: verl's data loader reads it, and the rows reach the agent loop whole."""

from __future__ import annotations

import json

from verl_turnkey.envs.tasks import Task


def test_a_jsonl_file_with_a_prompt_and_a_task_is_enough(compose, tokenizer, tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    tasks = [Task("turnkey/MiniGrid-v0", seed) for seed in range(4)]
    rows = [{"prompt": [{"role": "user", "content": "-"}], "turnkey_task": task.to_json()} for task in tasks]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = compose("+turnkey=gigpo")
    dataset = RLHFDataset(data_files=str(file), tokenizer=tokenizer, config=config.data)
    assert [Task.from_json(dataset[n]["turnkey_task"]) for n in range(4)] == tasks
