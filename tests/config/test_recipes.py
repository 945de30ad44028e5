"""Each packaged recipe: its task opens, its judge knows the answers, and gsm8k runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from raising import raises
from stretto import runs, tasks
from stretto.config import Config, RewardModelConfig, Section, SftConfig, recipes
from stretto.config.training_config import WITHOUT_EFFECT
from stretto.errors import ConfigError
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.tasks.procedural import DEFAULT_SIZE
from stretto.tasks.prompts import render
from stretto.training.supervised import updates

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"

ROWS = [
    {
        "question": f"What is {n} + {n}?",
        "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}",
    }
    for n in range(3, 11)
]


@pytest.fixture
def gsm8k_file(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def changed(name: str, **sections: Any) -> Config:
    data = recipes.load(name).model_dump()
    for key, value in sections.items():
        data[key] = data[key] | value if isinstance(value, dict) else value
    return Config.model_validate(data)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def has_judge(name: str) -> bool:
    """Whether the task judges by itself, and not a reward model or a function alone."""
    task = recipes.load(name).task
    return task.kind != "dataset" or "answer" in task.columns


JUDGED = list(filter(has_judge, recipes.names()))


@pytest.mark.parametrize("name", JUDGED)
def test_the_judge_of_each_recipe_knows_its_answers(name: str, gsm8k_file: Path) -> None:
    config = recipes.load(name)
    if config.task.kind == "gsm8k":
        config = changed(name, task={"name": str(gsm8k_file)})
    task = tasks.load(config.task, config.seed)
    assert task.has_verifier
    for index in (0, 1, len(task) - 1):
        row = task.row(index)
        assert row.reference is not None
        assert task.verify(index, row.reference) == 1.0
        assert task.verify(index, "no idea, 10101") < 0.5
        tokenizer = byte_tokenizer()
        if config.task.system:
            tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        prompt = render(row, config.task, tokenizer, index)
        assert bytes(prompt.tokens).decode() == prompt.text


@pytest.mark.parametrize("name", recipes.names())
def test_each_recipe_has_room_for_its_prompts_and_its_warm_up(name: str) -> None:
    config = recipes.load(name)
    # Warm-up examples come from the far end of the task; RL must not reach them.
    prompts = config.steps * config.rollout.batch // config.rollout.samples_per_prompt
    if config.warmup_examples:
        assert prompts + config.warmup_examples < DEFAULT_SIZE


def test_gsm8k_runs_on_its_published_form(
    gsm8k_file: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config = changed(
        "gsm8k",
        steps=2,
        threads=1,
        model={"name": str(tiny_folder)},
        task={"name": str(gsm8k_file)},
        rollout={"batch": 4, "samples_per_prompt": 2, "max_new_tokens": 6},
        observe={"progress": "off", "samples": 8},
    )
    run_dir = RunDirectory.create(tmp_path, "gsm8k", config)
    runs.train(config, run_dir=run_dir, progress=Progress())
    samples = lines(run_dir.samples_file)
    prompts = [s["prompt"] for s in samples]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 4
    assert all(any(row["question"] in p for row in ROWS) for p in prompts)


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not there")
def test_gsm8k_trains_the_real_model_on_the_real_file(tmp_path: Path) -> None:
    config = changed(
        "gsm8k",
        steps=3,
        task={"name": str(GSM8K)},
        rollout={"batch": 8, "max_new_tokens": 64},
        observe={"progress": "off", "samples": 8},
    )
    run_dir = RunDirectory.create(tmp_path, "gsm8k", config)
    result = runs.train(config, run_dir=run_dir, progress=Progress())
    assert result.steps == 3
    metrics, samples = lines(run_dir.metrics_file), lines(run_dir.samples_file)
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert len(samples) == 24
    questions = {json.loads(line)["question"] for line in GSM8K.open()}
    for m in metrics:
        own = [s for s in samples if s["step"] == m["step"]]
        assert len({s["prompt"] for s in own}) == 2  # four answers to each
        assert {s["reward"] for s in own} <= {0.0, 1.0}
        kept = [s["reward"] if s["finish"] == "stop" else 0.0 for s in own]
        assert m["objective/scores"] == pytest.approx(fmean(kept))
        assert m["val/ratio"] == pytest.approx(1, abs=0.02)
        assert m["policy/entropy_avg"] < 3  # a language model, no noise: ln(49152) is 10.8
    assert all(any(q in s["prompt"] for q in questions) for s in samples)
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1.0)
    assert (run_dir.model / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_tiny_learns(seed: int, tmp_path: Path) -> None:
    """From under 0.6 to over 0.8, whatever the CPU; test_tiny_algorithms.py says why so."""
    config = changed("tiny", seed=seed, observe={"progress": "off"})
    run_dir = RunDirectory.create(tmp_path, "tiny", config)
    runs.train(config, run_dir=run_dir, progress=Progress())
    rewards = [step["objective/scores"] for step in lines(run_dir.metrics_file)]
    assert fmean(rewards[:10]) < 0.6
    assert fmean(rewards[-10:]) > 0.8


# -- recipes of the other commands ---------------------------------------------------------------

OTHERS = [(kind, name) for kind in (SftConfig, RewardModelConfig) for name in recipes.names(kind)]


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_recipes_of_other_commands_load_and_round_trip(
    kind: type[Section], name: str, tmp_path: Path
) -> None:
    config = recipes.load(name, kind)
    assert type(config) is kind
    file = tmp_path / "again.toml"
    file.write_text(recipes.dump(config))
    assert recipes.load(file, kind) == config
    assert 20 < len(recipes.describe(name, kind)) <= 120


def test_recipes_of_a_huge_dataset_read_a_part_that_lasts() -> None:
    """Its rows are not read one by one before a run starts."""
    config, reward = (recipes.load("stack-exchange", kind) for kind in (Config, RewardModelConfig))
    assert isinstance(config, Config)
    assert isinstance(reward, RewardModelConfig)
    assert config.steps * config.rollout.batch == 112_000 < config.task.size == 200_000
    trained_on = round(reward.data.size * (1 - reward.data.held_out))
    assert updates(reward, trained_on) == 383


def test_demonstrations_of_conversations_meet_a_model_with_a_chat_template() -> None:
    tuned = recipes.load("no-robots", SftConfig)
    assert tuned.model.name.endswith("-Instruct")
    assert recipes.load("no-robots", Config).model.name == tuned.model.name
    assert recipes.load("no-robots", RewardModelConfig).model.name == tuned.model.name


def test_a_recipe_belongs_to_one_command(tmp_path: Path) -> None:
    with raises(ConfigError, "unknown-recipe", "'arithmetic'"):
        recipes.load("arithmetic", SftConfig)
    file = tmp_path / "own.toml"
    file.write_text("[rollout]\nbatch = 4")
    assert recipes.load(file).rollout.batch == 4
    with raises(ConfigError, "settings-of-another-command", "'stretto train'", "'stretto reward'"):
        recipes.load(file, RewardModelConfig)
    file.write_text("batch = 4\n[model]\nname = 'tiny'")  # for 'train' it is rollout.batch
    with raises(ConfigError, "extra_forbidden", "'batch'", "'rollout.batch'"):
        recipes.load(file)
    with raises(ConfigError, "extra_forbidden", "'data.epochs'", "training.epochs"):
        recipes.build({"data": {"epochs": 3}}, "here", SftConfig)


@pytest.mark.parametrize("kind", [SftConfig, RewardModelConfig])
def test_settings_of_other_commands_are_few_and_have_their_help(kind: type[Section]) -> None:
    assert len(recipes.setting_names(kind)) - len(WITHOUT_EFFECT) <= 44
    sections: list[type[Section]] = [kind]
    while sections:
        section = sections.pop()
        for key, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                sections.append(info.annotation)
            else:
                assert info.description, f"{section.__name__}.{key} has no help"


def test_paths_in_a_file_are_from_here_or_else_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "settings", tmp_path / "here"
    (folder / "models" / "m").mkdir(parents=True)
    (folder / "tiny").mkdir()
    here.mkdir()
    for name in ("rows.jsonl", "reward.py", "both.jsonl"):
        (folder / name).write_text("")
    (here / "both.jsonl").write_text("")
    monkeypatch.chdir(here)
    lines = (
        "[task]",
        'kind = "dataset"',
        'name = "rows.jsonl"',
        'held_out = "both.jsonl"',
        "[reward]",
        'sources = ["reward.py:score", "model:models/m", "none.py:score", "http://localhost/x"]',
        "[model]",
        'name = "tiny"',
        "[algorithm]",
        'name = "distill"',
        'teachers = { a = "models/m", b = "tiny" }',
        "[rollout]",
        'engine_args = { speculative_tokens = 2, speculative_model = "models/m" }',
    )
    (folder / "s.toml").write_text("\n".join(lines))
    config = recipes.load(folder / "s.toml")
    assert config.task.name == str(folder / "rows.jsonl")
    assert config.task.held_out == "both.jsonl"
    assert config.reward.sources == (
        f"{folder / 'reward.py'}:score",
        f"model:{folder / 'models' / 'm'}",
        "none.py:score",
        "http://localhost/x",
    )
    assert config.model.name == "tiny"
    assert config.algorithm.teachers == {"a": str(folder / "models" / "m"), "b": "tiny"}
    assert config.rollout.speculative_model == str(folder / "models" / "m")
