"""Whole runs of a small model in this process: records, resuming, seeds, LoRA, reward functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stretto
from engine_helpers import EagerBackend
from raising import raises
from run_helpers import (
    Kill,
    Notes,
    assert_same_run,
    killed_by_ctrl_c,
    lines,
    run,
    settings,
    untimed,
    weights,
    worker_of,
)
from scorer_helpers import reward_model
from stretto import evaluation, runs, tasks
from stretto.assembly.parts import warmup_examples
from stretto.config import ModelConfig, RolloutConfig, TaskConfig, recipes
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import ConfigError, RewardError, StateError, TaskError
from stretto.evaluation.generation import generate
from stretto.evaluation.measures import SEED
from stretto.models.load import load_tokenizer
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.runtime.run import start
from stretto.scoring.functions import FunctionScorer
from stretto.tasks import TaskRow
from stretto.tasks.prompts import PromptSource
from stretto.types import Score, short_name

# -- the run directory ---------------------------------------------------------------------------

METRICS = [
    "step",
    "objective/scores_std",
    "reward_std/task",
    "lr",
    "critic/lr",
    "critic/advantages/mean",
    "critic/advantages/std",
    "critic/returns/mean",
    "critic/values/mean",
    "critic/grad_norm",
    "policy/grad_norm",
    "loss/policy_avg",
    "loss/value_avg",
    "objective/kl",
    "objective/kl_coef",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/entropy_avg",
    "val/clipfrac_avg",
    "val/ratio",
    "val/ratio_max",
    "val/ratio_min",
    "sampling/logp_difference_max",
    "sampling/logp_difference_mean",
    "sampling/logp_difference_rms",
    "response/ended",
    "response/length_max",
    "response/length_mean",
    "reward/task",
    "rejected",
    "staleness/ess",
    "staleness/max",
    "staleness/mean",
    "staleness/off_policy_tokens",
    "schedule/carried",
    "schedule/chunk_tokens",
    "schedule/overcommit",
    "time_s",
    *(f"timing_s/driver/{w}" for w in ("adapt", "batch", "books", "chunks", "fill", "records")),
    "timing_s/driver_cpu",
    "timing_s/gen",
    "timing_s/load",
    "timing_s/publish",
    "timing_s/score/critic",
    "timing_s/score/reference",
    "timing_s/score/task",
    "timing_s/step",
    "timing_s/update",
    "perf/samples_per_s",
    "perf/throughput",
    "critic/explained_variance",
]
ROLES = ("generator", "task", "reference", "critic", "learner")


def test_a_run_leaves_its_records_and_a_model_behind(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = settings(tiny_folder, steps=3, reward={"missing_eos": "off"})
    run_dir, result = run(config, tmp_path)
    names = {p.name for p in run_dir.path.iterdir()}
    records = {"metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "trace.json", "flight.log"}
    assert names == records | {"config.toml", "checkpoints", "model"}
    assert recipes.load(run_dir.path) == config

    metrics, samples = lines(run_dir.metrics_file), lines(run_dir.samples_file)
    assert [m["step"] for m in metrics] == [1, 2, 3]
    where = ("utilisation/", "idle_s/")
    assert {k for k in metrics[-1] if not k.startswith(where)} == set(METRICS)
    assert result.steps == 3
    assert {k: metrics[-1][k] for k in result.stats} == dict(result.stats)
    assert 0.5 < sum(metrics[-1][f"utilisation/{r}"] for r in ROLES) <= 1.0 + 1e-6  # in turn
    for m in metrics:
        own = [s for s in samples if s["step"] == m["step"]]
        assert len(own) == 4
        assert m["objective/scores"] == pytest.approx(fmean(s["reward"] for s in own))
        assert m["response/length_mean"] == fmean(s["tokens"] for s in own)
        assert m["response/ended"] == fmean(s["finish"] == "stop" for s in own)
        assert abs(m["val/ratio_max"] - 1) < 1e-5 > abs(m["val/ratio_min"] - 1)
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert metrics[0]["critic/values/mean"] == 0
    assert metrics[2]["objective/kl"] != pytest.approx(0, abs=1e-5)

    model = AutoModelForCausalLM.from_pretrained(run_dir.model)
    tokenizer = AutoTokenizer.from_pretrained(run_dir.model)
    before = load_file(tiny_folder / "model.safetensors")
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    ids = tokenizer("1 + 1 =", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    (text,) = stretto.generate(run_dir.model, ["1 + 1 ="], temperature=0, max_new_tokens=4)
    assert text == tokenizer.decode(answer, skip_special_tokens=True)


# -- the same again ------------------------------------------------------------------------------

BUSY: dict[str, Any] = {
    "steps": 4,
    "warmup_examples": 8,
    "rollout": {"samples_per_prompt": 2},
    "algorithm": {"kl_target": 0.01, "kl_horizon": 20},
    "training": {"minibatches": 2, "epochs": 2, "lr_schedule": "cosine", "warmup_steps": 1},
    "observe": {"checkpoint_every": 2},
}
"""A run in which everything that has a state moves."""


@pytest.mark.parametrize("lora", [False, True])
def test_a_killed_run_resumes_as_if_nothing_had_happened(
    lora: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(tiny_folder, **BUSY, model={"lora_rank": 2 * lora})
    whole, _ = run(config, tmp_path)
    killed = RunDirectory.create(tmp_path, "run", config)
    with killed_by_ctrl_c():
        runs.train(config, run_dir=killed, progress=Kill(3))
    assert [m["step"] for m in lines(killed.metrics_file)] == [1, 2, 3]
    assert [p.name for p in killed.checkpoints.iterdir()] == ["step-000002"]
    # What a crash leaves of a line; what follows must not be glued to it.
    for file in (killed.metrics_file, killed.samples_file, killed.rollouts_file):
        with file.open("ab") as torn:
            torn.write(b'{"step": 4, "re')
    assert [m["step"] for m in killed.read_metrics()] == [1, 2, 3]
    again = RunDirectory.open(killed.path)
    notes = Notes()
    result = runs.train(config, run_dir=again, resume=True, progress=notes)
    assert result.steps == 4
    assert_same_run(again, whole)
    assert [p.name for p in again.checkpoints.iterdir()] == ["step-000004"]
    names = "metrics.jsonl, samples.jsonl, rollouts.jsonl"
    assert f"dropped a last line that was never finished, of {names}" in notes.notes


def test_a_run_without_checkpoints_cannot_be_resumed(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder)
    run_dir = RunDirectory.create(tmp_path, "run", config)
    with pytest.raises(StateError, match=r"holds no checkpoint .* observe.checkpoint_minutes \(10"):
        runs.train(config, run_dir=run_dir, resume=True, progress=Progress())


def test_a_seed_makes_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    first, _ = run(settings(tiny_folder), tmp_path)
    second, _ = run(settings(tiny_folder), tmp_path)
    assert_same_run(first, second)
    other, _ = run(settings(tiny_folder, seed=1), tmp_path)
    assert not {s["prompt"] + s["response"] for s in lines(first.samples_file)} & {
        s["prompt"] + s["response"] for s in lines(other.samples_file)
    }


def test_how_work_is_split_changes_nothing_but_rounding(tiny_folder: Path, tmp_path: Path) -> None:
    """Slots and token budgets are about memory and speed only."""
    plain, _ = run(settings(tiny_folder), tmp_path)
    split, _ = run(
        settings(
            tiny_folder,
            rollout={"slots": 1, "prefill_tokens": 16},
            training={"microbatch_tokens": 1},
            model={"gradient_checkpointing": True},
        ),
        tmp_path,
    )
    assert lines(plain.samples_file) == lines(split.samples_file)
    for a, b in zip(
        untimed(lines(plain.metrics_file)), untimed(lines(split.metrics_file)), strict=True
    ):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_in_one_process_there_is_one_copy_of_the_weights(lora_rank: int, tiny_folder: Path) -> None:
    """Engine, learner and critic's scorer read the very same; under LoRA all roles share a body."""
    config = settings(tiny_folder, model={"lora_rank": lora_rank, "dtype": "float32"})
    with ExitStack() as stack:
        started = start(config, stack, lambda _: None)
        of = started.workers.executors
        trained = {n: m.model for n, m in worker_of(started, "learner").trained.items()}
        actor, critic = ({p.data_ptr(): p.nbytes for p in trained[n].parameters()} for n in trained)
        reads = {name: worker_of(started, name).model for name in of if name != "learner"}
        read = {n: {p.data_ptr() for p in model.parameters()} for n, model in reads.items()}
        assert read["generator"] == actor.keys()
        assert read["critic"] == critic.keys()
        (base,) = (p.stat().st_size for p in tiny_folder.glob("*.safetensors"))
        if lora_rank:
            assert read["reference"] <= actor.keys()
            adapters = [p for m in trained.values() for p in m.parameters() if p.requires_grad]
            held = sum((actor | critic).values())
            assert held <= base + sum(p.nbytes for p in adapters) + 4 * 64  # a head's first weights
        else:
            assert not read["reference"] & actor.keys()
            assert not critic.keys() & actor.keys()


def test_a_frozen_actor_starts_its_schedule_when_it_thaws(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(
        tiny_folder,
        steps=3,
        critic={"freeze_steps": 1},
        training={"lr": 1.0e-3, "critic_lr": 3e-3, "lr_schedule": "linear"},
    )
    metrics = lines(run(config, tmp_path)[0].metrics_file)
    assert [m["lr"] for m in metrics] == pytest.approx([1e-3, 1e-3, 5e-4])
    assert [m["critic/lr"] for m in metrics] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert ["policy/approxkl_avg" in m for m in metrics] == [False, True, True]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_bf16_run_agrees_with_its_engine_and_moves(
    rank: int, tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(tiny_folder, model={"dtype": "bfloat16", "lora_rank": rank})
    run_dir, _ = run(config, tmp_path)
    for m in lines(run_dir.metrics_file):
        assert abs(m["val/ratio"] - 1) < 0.02
        assert m["policy/grad_norm"] > 0
    before, after = load_file(tiny_folder / "model.safetensors"), weights(run_dir)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert after[name].dtype == torch.bfloat16
    assert not torch.equal(after[name], before[name].bfloat16())


# -- LoRA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_coef", [0.05, 0.0])
def test_a_lora_run_saves_a_merged_model_and_its_adapter(
    kl_coef: float, tiny_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = settings(
        tiny_folder,
        steps=3,
        model={"lora_rank": 4},
        training={"lr": 1e-2},
        algorithm={"kl_coef": kl_coef},
    )
    run_dir, result = run(config, tmp_path)
    assert ("objective/kl" in result.stats) == (kl_coef > 0)
    metrics = lines(run_dir.metrics_file)
    if kl_coef:
        assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
        assert abs(metrics[2]["objective/kl"]) > 1e-4
    assert all(abs(m["val/ratio_max"] - 1) < 1e-4 for m in metrics)

    auto: Any = AutoModelForCausalLM
    merged, base = auto.from_pretrained(run_dir.model), auto.from_pretrained(tiny_folder)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        original = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(run_dir.model / "adapter"))(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-5)
        assert (adapted - original).abs().max() > 1e-3


# -- reward sources ------------------------------------------------------------------------------

FUNCTIONS = """
def trl(prompts, completions, question, **kwargs):
    assert prompts == question
    return [0.25 * len(c) for c in completions]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 2.0 if ground_truth in solution_str else -float(len(solution_str))}

def letters(completions, **kwargs):
    return [c.count("a") / 8 for c in completions]

def spread(completions, **kwargs):
    return [sum(map(ord, c)) % 7 / 7 for c in completions]

def fails(completions, **kwargs):
    return [float("nan") if i == 1 else 1.0 for i, c in enumerate(completions)]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    return file


def test_a_trl_style_function_as_reward(tiny_folder: Path, functions: Path, tmp_path: Path) -> None:
    reward = {"sources": (f"{functions}:trl",), "missing_eos": "off"}
    run_dir, result = run(settings(tiny_folder, reward=reward), tmp_path)
    samples = lines(run_dir.samples_file)
    assert [s["reward"] for s in samples] == [0.25 * len(s["response"]) for s in samples]
    last = fmean(0.25 * len(s["response"]) for s in samples if s["step"] == 2)
    assert result.stats[f"reward/{functions.name}:trl"] == pytest.approx(last)


def test_a_verl_style_function_as_reward(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    rows = [{"data_source": "x", "prompt": f"say {n}", "ground_truth": str(n)} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = settings(
        tiny_folder,
        task={"kind": "dataset", "name": str(file), "settings": {}},
        reward={"sources": (f"{functions}:verl",), "missing_eos": "off"},
    )
    run_dir, _ = run(config, tmp_path)
    samples = lines(run_dir.samples_file)
    assert {s["prompt"] for s in samples} == {f"say {n}" for n in range(8)}
    for s in samples:
        hit = s["prompt"].removeprefix("say ") in s["response"]
        assert s["reward"] == (2.0 if hit else -len(s["response"]))


def test_a_reward_model_and_a_function_are_summed_with_weights(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reward"
    reward_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    sources = (f"{functions}:trl", f"model:{folder}")
    config = settings(
        tiny_folder,
        reward={"sources": sources, "weights": (2.0, -0.5), "missing_eos": "off"},
        critic={"init": "reward"},
        task={"max_prompt_tokens": 200},  # the reward model has positions for 512
    )
    run_dir, _ = run(config, tmp_path)
    for m in lines(run_dir.metrics_file):
        by_function, by_model = (m[f"reward/{source.rpartition('/')[2]}"] for source in sources)
        assert m["objective/scores"] == pytest.approx(2 * by_function - 0.5 * by_model, rel=1e-5)
        assert by_model != 0
    assert f"timing_s/score/{short_name(sources[1])}" in m


def test_a_function_may_apply_to_some_prompts_alone(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    """As TRL has it: None is left out of the sum, and fails where every function says it."""
    functions.write_text(
        "def odd(prompts, completions, n, **_):\n"
        "    return [len(c) / 8 if k % 2 else None for c, k in zip(completions, n)]\n"
        "def even(prompts, completions, n, **_):\n"
        "    return [-1.0 if k % 2 == 0 and k < 6 else None for k in n]\n"
        "def never(completions, **_): return [None] * len(completions)\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"say {n}", "n": n}) for n in range(8)))
    sources = tuple(f"{functions}:{name}" for name in ("odd", "even", "never"))
    reward = {"sources": sources, "weights": (2.0, 3.0, 5.0), "missing_eos": "off"}
    task = {"kind": "dataset", "name": str(rows), "settings": {}}
    with raises(RewardError, "responses-without-reward", "no reward source applies", "say 6"):
        run(settings(tiny_folder, task=task, reward=reward), tmp_path)
    reward["on_failure"] = "drop"
    run_dir, _ = run(settings(tiny_folder, task=task, reward=reward), tmp_path)
    samples = lines(run_dir.samples_file)
    assert len(samples) == 7
    for s in samples:
        odd = int(s["prompt"][-1]) % 2
        assert s["reward"] == (2 * len(s["response"]) / 8 if odd else -3.0)
    (left_out,) = [r for r in lines(run_dir.rollouts_file) if r["state"] == "rejected"]
    assert left_out["because"] == "no reward source applies"
    for step in lines(run_dir.metrics_file):
        here = [s for s in samples if s["step"] == step["step"]]
        lengths = [len(s["response"]) / 8 for s in here if int(s["prompt"][-1]) % 2]
        assert step["reward/rewards.py:odd"] == pytest.approx(fmean(lengths))
        assert step["reward/rewards.py:even"] == -1.0
        assert "reward/rewards.py:never" not in step


def test_rewards_beyond_float32_are_left_out(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    """One source is beyond it by itself, the other once it has its weight."""
    functions.write_text(
        "def alone(completions, **_): return [1e300, *[1.0] * (len(completions) - 1)]\n"
        "def weighted(completions, **_): return [*[1.0] * (len(completions) - 1), 2e38]\n"
    )
    sources = tuple(f"{functions}:{name}" for name in ("alone", "weighted"))
    reward = {"sources": sources, "weights": (1.0, -2.0), "on_failure": "drop"}
    run_dir, result = run(settings(tiny_folder, reward=reward), tmp_path)
    assert result.stats["rejected"] == 4
    because = [r["because"] for r in lines(run_dir.rollouts_file)]
    assert sorted(because) == [
        *[""] * 4,
        *["reward function failed"] * 2,
        *["reward not finite"] * 2,
    ]


@pytest.mark.parametrize("failures", [0, 2])
def test_whether_cuda_graphs_are_in_use_is_a_metric_and_a_note(
    failures: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = EagerBackend(failures)
    monkeypatch.setattr("stretto.rollout.steps.backend_of", lambda device: backend)
    notes = Notes()
    run_dir, _ = run(settings(tiny_folder), tmp_path, notes)
    shares = [m["engine/graphs"] for m in run_dir.read_metrics()]
    assert shares == ([0, 0] if failures else [1, 1])
    told = [n for n in notes.notes if "engine/graphs" in n]
    assert len(told) == bool(failures)
    assert all(n.startswith("step 1: decode steps run without CUDA graphs") for n in told)


def test_a_failed_verdict_stops_the_run_or_is_left_out(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    sources = (f"{functions}:fails",)
    with raises(RewardError, "responses-without-reward", "1 of 4"):
        run(settings(tiny_folder, reward={"sources": sources}), tmp_path)
    notes = Notes()
    reward = {"sources": sources, "on_failure": "drop"}
    run_dir, result = run(settings(tiny_folder, reward=reward), tmp_path, notes)
    assert result.stats["rejected"] == 2
    assert len(lines(run_dir.samples_file)) == 6
    told = [n for n in notes.notes if "left out rollout" in n]
    assert [n.partition(":")[0] for n in told] == ["step 1", "step 2"]
    assert "left out rollout 1: " in told[0]
    assert "left out rollout 5: " in told[1]
    assert "nan" in told[0]


def test_ppo_learns_what_is_rewarded(tiny_folder: Path, functions: Path, tmp_path: Path) -> None:
    """From a model that says anything to one that says 'a', in a few steps."""
    config = settings(
        tiny_folder,
        steps=25,
        rollout={"batch": 32, "max_new_tokens": 8},
        reward={"sources": (f"{functions}:letters",), "missing_eos": "off"},
        training={"lr": 1e-2, "critic_lr": 1e-2, "epochs": 2},
        algorithm={"kl_coef": 0.0},
    )
    run_dir, _ = run(config, tmp_path)
    scores = [m["objective/scores"] for m in lines(run_dir.metrics_file)]
    assert fmean(scores[:3]) < 0.05
    assert fmean(scores[-3:]) > 0.5


def test_warm_up_examples_are_the_tasks_answers_from_its_far_end(tiny_folder: Path) -> None:
    config = settings(tiny_folder, warmup_examples=3)
    tokenizer = load_tokenizer(tiny_folder)
    task = tasks.load(config.task, config.seed)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    examples = warmup_examples(3, prompts)
    last = [prompts.prompt_by_id(len(task) - 1 - i) for i in range(3)]
    for example, prompt in zip(examples, last, strict=True):
        row = task.row(prompt.data["_index"])
        assert bytes(example.prompt.tokens).decode() == row.prompt
        assert bytes(example.tokens[:-1].tolist()).decode() == row.reference
        assert example.tokens[-1] == tokenizer.eos_token_id


# -- what is refused before anything is trained --------------------------------------------------


def test_warming_up_needs_answers(tiny_folder: Path, functions: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = settings(
        tiny_folder,
        warmup_examples=4,
        task={"kind": "dataset", "name": str(file), "settings": {}},
        reward={"sources": (f"{functions}:letters",)},
    )
    with pytest.raises(TaskError, match="warmup_examples = 4 trains on the task's own answers"):
        run(config, tmp_path)


def test_a_missing_function_is_refused(tiny_folder: Path, functions: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder, reward={"sources": (f"{functions}:leters",)})
    with pytest.raises(ConfigError, match="letters"):
        run(config, tmp_path)


# -- inference -----------------------------------------------------------------------------------


def test_generate_is_greedy_at_temperature_0_and_keeps_apart(tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(tiny_folder), load_tokenizer(tiny_folder)
    prompts = ["a", "some longer prompt than that", "1 + 1 ="]
    options = RolloutConfig(temperature=0, max_new_tokens=9, batch=2)
    exact = ModelConfig(name=str(tiny_folder), dtype="float32")
    rows = [TaskRow(prompt) for prompt in prompts]
    got = {a.number: a.text for a in generate(exact, rows, TaskConfig(), options)}
    assert sorted(got) == [0, 1, 2]
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        assert got[i] == tokenizer.decode(expected, skip_special_tokens=True)


def test_generate_depends_on_the_seed_alone(tiny_folder: Path) -> None:
    def texts(seed: int) -> list[str]:
        return stretto.generate(tiny_folder, ["a", "b"], max_new_tokens=12, seed=seed)

    assert texts(3) == texts(3)
    assert texts(3)[0] != texts(4)[0]


def test_evaluate_is_the_mean_verdict_on_greedy_answers(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    words = {"name": "spell_backward", "settings": {}}
    warm = settings(tiny_folder, steps=1, warmup_examples=1600, warmup_lr=3e-3, task=words)
    run_dir, _ = run(warm, tmp_path)
    config = settings(tiny_folder, task=words)
    result = evaluation.evaluate(config, model=str(run_dir.model), samples=30)

    auto: Any = AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(run_dir.model), load_tokenizer(run_dir.model)
    task = tasks.load(config.task, config.seed + SEED)
    source = PromptSource(task, config.task, tokenizer, config.seed + SEED)
    verdicts, lengths, ended = [], [], 0
    different = list({p.text: p for p in (source.next() for _ in range(60))}.values())[:30]
    for prompt in different:
        ids = torch.tensor([prompt.tokens])
        answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        verdicts.append(task.verify(prompt.data["_index"], text))
        lengths.append(len(answer))
        ended += int(answer[-1]) == tokenizer.eos_token_id
    assert len(set(verdicts)) > 1  # some better than others
    assert result.pass_at_1 == fmean(v == 1 for v in verdicts)
    assert result.mean_score == pytest.approx(fmean(verdicts), rel=1e-5)
    assert result.mean_score_standard_error == pytest.approx(stdev(verdicts) / 30**0.5, rel=1e-5)
    assert result.mean_tokens == fmean(lengths)
    assert result.ended == ended / 30
    assert result.samples == 30


def test_evaluate_stops_at_a_failed_verdict(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: FunctionScorer, ids: Sequence[int]) -> list[Score]:
        empty = torch.empty(0).numpy()
        return [Score(i, "task", "reward", empty, f"no verdict on {i}") for i in ids]

    monkeypatch.setattr(FunctionScorer, "finish", finish)
    with pytest.raises(RewardError, match="no verdict on 0"):
        evaluation.evaluate(settings(tiny_folder), model=str(tiny_folder), samples=3)


# -- every algorithm -----------------------------------------------------------------------------

PAIRS: dict[str, Any] = {"batch": 8, "samples_per_prompt": 4, "max_new_tokens": 8}
CRITICLESS = [name for name, a in ALGORITHMS.items() if not (a.critic or a.teacher)]


@pytest.mark.parametrize("name", CRITICLESS)
def test_a_run_without_a_critic(
    name: str, tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    """No critic is made, scores, trains or is reported; what is learned is groups of four."""
    config = settings(
        tiny_folder,
        steps=3,
        rollout=PAIRS,
        algorithm={"name": name},
        reward={"sources": (f"{functions}:spread",), "missing_eos": "off"},
        training={"lr": 1e-2},
    )
    run_dir, result = run(config, tmp_path)
    metrics = lines(run_dir.metrics_file)
    assert not [k for m in metrics for k in m if "critic" in k or "value" in k]
    assert {"objective/kl", "group/reward_std", "group/all_equal"} < result.stats.keys()
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(metrics[0].get("val/ratio_max", 1.0) - 1) < 1e-5
    before = load_file(tiny_folder / "model.safetensors")
    assert any(not torch.equal(p, before[n]) for n, p in weights(run_dir).items())
    groups = [m["group/all_equal"] for m in metrics]
    rows = lines(run_dir.rollouts_file)
    for step, share in enumerate(groups, 1):
        rewards = [r["reward"] for r in rows if r["step"] == step]
        both = [rewards[:4], rewards[4:]]
        assert share == fmean(len(set(group)) == 1 for group in both)
    if name == "online-dpo":
        assert [m["dpo/pairs"] for m in metrics] == [2 - 2 * share for share in groups]


def test_a_judge_that_fails_on_half_a_pair_leaves_the_other_half_out(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    """``fails`` gives no number for the second response of each batch."""
    notes = Notes()
    config = settings(
        tiny_folder,
        rollout={"batch": 4, "samples_per_prompt": 2},
        algorithm={"name": "rloo"},
        reward={"sources": (f"{functions}:fails",), "on_failure": "drop"},
    )
    run_dir, result = run(config, tmp_path, notes)
    assert result.stats["rejected"] == 4
    rows = lines(run_dir.rollouts_file)
    states = {r["id"]: (r["state"], r["because"]) for r in rows}
    for first in (0, 4):
        assert states[first] == ("rejected", "group too small")
        assert states[first + 1] == ("rejected", "reward function failed")
        assert states[first + 2] == states[first + 3] == ("trained", "")
    told = [n for n in notes.notes if "left out rollout" in n]
    assert told[0] == "step 1: left out rollout 0: group too small"
    assert "left out rollout 1: " in told[1]


def test_online_dpo_with_nothing_to_prefer_goes_on(
    tiny_folder: Path, functions: Path, tmp_path: Path
) -> None:
    """All rewards are the same: steps are counted, nothing moves."""
    functions.write_text("def same(completions, **_): return [1.0] * len(completions)")
    config = settings(
        tiny_folder,
        rollout=PAIRS,
        algorithm={"name": "online-dpo"},
        reward={"sources": (f"{functions}:same",), "missing_eos": "off"},
    )
    run_dir, result = run(config, tmp_path)
    assert (result.steps, result.stats["dpo/pairs"], result.stats["policy/grad_norm"]) == (2, 0, 0)
    before = load_file(tiny_folder / "model.safetensors")
    after = weights(run_dir)
    assert all(torch.equal(after[n], before[n]) for n in before if n in after)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_importance_weights_of_lagging_data(
    correction: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """On the step's own data they are 1, a version later they are not; ratios start at 1."""
    algorithm = {"old_policy": "proximal", "correction": correction, "correction_cap": 3.0}
    config = settings(
        tiny_folder, steps=4, algorithm=algorithm, schedule={"lag": 1}, training={"lr": 3e-2}
    )
    metrics = lines(run(config, tmp_path)[0].metrics_file)
    assert metrics[0]["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert all(abs(m["correction/weight_mean"] - 1) > 1e-3 for m in metrics[1:])
    for m in metrics:
        assert abs(m["val/ratio_max"] - 1) < 1e-4 > abs(m["val/ratio_min"] - 1)
