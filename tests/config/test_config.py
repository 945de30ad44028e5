"""Settings and recipes: what loads, what round-trips, and what is refused with which words."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raising import raises
from stretto.algorithms.kl import AdaptiveKL
from stretto.cli.memory import parse_parameters
from stretto.config import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    RewardModelConfig,
    SftConfig,
    recipes,
)
from stretto.config.algorithm import ALGORITHMS
from stretto.config.sections import LARGEST_SEED
from stretto.errors import ConfigError, ModelError
from stretto.layout import Layout
from stretto.models.info import measure
from stretto.observe.progress import headline
from stretto.planner.fitting import MemoryPlan, fewest_gpus, format_plan, memory_plan, plan_for


def write(folder: Path, text: str) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    return file


def test_the_packaged_recipes_are_these() -> None:
    assert recipes.names() == [
        "arithmetic", "calculator", "gsm8k", "gsm8k-rho", "no-robots", "opencoder", "posts",
        "stack-exchange", "tiny", "tiny-climb", "tiny-tail", "tiny-turns", "tldr",
    ]  # fmt: skip
    assert recipes.names(SftConfig) == ["no-robots", "opencoder", "posts", "tldr"]
    assert recipes.names(RewardModelConfig) == ["no-robots", "posts", "stack-exchange", "tldr"]


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_loads_and_round_trips_exactly(name: str, tmp_path: Path) -> None:
    config = recipes.load(name)
    again = recipes.load(write(tmp_path, recipes.dump(config)))
    assert again == config
    assert recipes.dump(again) == recipes.dump(config)
    assert 20 < len(recipes.describe(name)) <= 100
    assert not recipes.describe(name).startswith("#")


def test_dump_keeps_every_type_of_a_task_setting(tmp_path: Path) -> None:
    settings = {"flag": True, "count": 1, "ratio": 1.0, "text": 'a "quoted"\nline', "no": False}
    config = recipes.build({"task": {"settings": settings}, "training": {"lr": 1e-07}}, "here")
    again = recipes.load(write(tmp_path, recipes.dump(config)))
    assert again.training.lr == 1e-7
    assert [(v, type(v)) for v in again.task.settings.values()] == [
        (v, type(v)) for v in settings.values()
    ]


def test_dump_names_every_setting() -> None:
    data = tomllib.loads(recipes.dump(Config()))
    for key in recipes.setting_names():
        value = data
        for part in key.split("."):
            value = value[part]
    assert "training.lr" in recipes.setting_names()


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("[training]\nlearnin_rate = 1", "extra_forbidden", ["learnin_rate'. Did you mean"]),
        ("[rollout]\nbach = 1", "extra_forbidden", ["'rollout.bach'", "'rollout.batch'"]),
        ("[training]\nbatch = 1", "extra_forbidden", ["'training.batch'", "'rollout.batch'"]),
        ("lr = 1", "extra_forbidden", ["'lr'", "'training.lr'"]),
        ("[training]\nlr = -1.0", "greater_than", ["training.lr = -1.0", "greater than 0"]),
        ("[training]\nlr = nan", "finite_number", ["training.lr = nan"]),
        ("[reward]\non_failure = 2", "literal_error", ["'reward.on_failure = 2': must be less"]),
        ("steps = 'many'", "int_parsing", ["'steps = \"many\"'", "a valid integer"]),
        (
            "[algorithm]\nkl_estimator = 'k9'",
            "literal_error",
            ["'k1', 'k2' or 'k3'"],
        ),
        ("[algorithm]\naggregation = 'token'", "literal_error", ['"token"', "'token_mean'"]),
        ("[rollout]\nbatch = 33\nsamples_per_prompt = 2", "batch-not-groups", [33, 2]),
        ("[rollout]\ntop_k = 5", "truncated-sampling", [5]),
        ("[rollout]\ntemperature = 0.0", "greedy-training", ["rollout.temperature"]),
        ("[critic]\ninit = 'reward'", "critic-without-reward-model", ["'model:NAME'"]),
        ("[reward]\nsources = []", "no-reward-source", ["'task'"]),
        ("[reward]\nsources = ['task', 'task']", "reward-source-twice", ["'task'"]),
        ("[reward]\nweights = [1.0, 2.0]", "reward-weights-count", [2, 1]),
        ("[algorithm]\nname = 'gpro'", "literal_error", ["'ppo', 'rloo', 'proximal-rloo', 'copg'"]),
        ("[algorithm]\nname = 'rlo'", "literal_error", ["Did you mean 'rloo'?"]),
        ("steps = ", "invalid-toml", []),
        ("[model]\nname = tiny", "invalid-toml", ["line 2", "text needs quotes"]),
    ],
)
def test_a_bad_file_is_refused_in_readable_words(
    tmp_path: Path, text: str, code: str, facts: list[object]
) -> None:
    with raises(ConfigError, code, "own.toml", *facts) as caught:
        recipes.load(write(tmp_path, text))
    said = str(caught.value)
    assert "pydantic" not in said
    assert "\n" not in said


# -- rules of the algorithms ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code", "facts"),
    [
        ({"kl_coef": 0, "kl_target": 1.0}, "kl-target-without-coef", ["kl_coef"]),
        ({"correction": "mask"}, "correction-without-proximal", ["old_policy = 'proximal'"]),
        ({"correction_cap": 0.5}, "correction-cap-below-one", [0.5]),
        (
            {"name": "online-dpo", "old_policy": "proximal"},
            "old-policy-without-ratio",
            ["online-dpo"],
        ),
        ({"name": "best-of-n", "old_policy": "proximal"}, "old-policy-without-ratio", []),
        (
            {"name": "online-dpo", "old_policy": "proximal", "correction": "mask"},
            "old-policy-without-ratio",
            ["correction"],
        ),
        (
            {"name": "online-dpo", "ess_scaling": "sqrt"},
            "ess-scaling-without-weights",
            ["online-dpo", "leave ess_scaling out"],
        ),
        ({"name": "best-of-n", "ess_scaling": "linear"}, "ess-scaling-without-weights", []),
        (
            {"name": "proximal-rloo", "aggregation": "token_mean"},
            "aggregation-of-responses",
            ["proximal-rloo", "token_mean"],
        ),
        ({"name": "online-dpo", "aggregation": "sequence_sum"}, "aggregation-of-responses", []),
        (
            {"name": "proximal-rloo", "old_policy": "proximal", "correction": "truncate"},
            "token-correction-of-responses",
            ["algorithm.correction_level = 'sequence'"],
        ),
        ({"name": "online-dpo", "kl_coef": 0}, "implicit-kl-without-beta", ["online-dpo"]),
        ({"name": "online-dpo", "kl_in": "loss"}, "implicit-kl-placed", ["kl_in"]),
        ({"name": "online-dpo", "kl_target": 6.0}, "implicit-kl-placed", ["kl_target"]),
    ],
)
def test_contradictions_of_an_algorithm_are_refused(
    settings: dict[str, object], code: str, facts: list[object]
) -> None:
    with raises(ConfigError, code, *facts):
        recipes.build({"algorithm": settings, "rollout": {"samples_per_prompt": 2}}, "here")


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if a.group > 1])
def test_algorithms_that_compare_need_several_responses(name: str) -> None:
    with raises(ConfigError, "group-too-small", name, "rollout.samples_per_prompt", 2, 1):
        recipes.build({"algorithm": {"name": name}}, "here")
    given = {"algorithm": {"name": name}, "rollout": {"samples_per_prompt": 2}}
    assert recipes.build(given, "here").algorithm.name == name
    frozen = given | {"critic": {"freeze_steps": 3}}
    with raises(ConfigError, "freeze-without-critic", name, 3):
        recipes.build(frozen, "here")


@pytest.mark.parametrize(
    ("name", "place", "estimator", "averaging"),
    [
        ("ppo", "reward", "k1", "token_mean"),
        ("rloo", "reward", "k1", "sequence_sum"),
        ("proximal-rloo", "reward", "k1", "sequence_mean"),
        ("copg", "reward", "k1", "sequence_sum"),
        ("grpo", "loss", "k3", "sequence_mean"),
        ("online-dpo", "implicit", "k1", "sequence_mean"),
        ("best-of-n", "reward", "k1", "token_mean"),
    ],
)
def test_what_auto_means(name: str, place: str, estimator: str, averaging: str) -> None:
    a = AlgorithmConfig(name=name)  # type: ignore[arg-type]
    assert (a.kl_place, a.estimator, a.averaging) == (place, estimator, averaging)


def test_what_is_said_is_taken() -> None:
    a = AlgorithmConfig(
        name="grpo", kl_in="reward", kl_estimator="k2", aggregation="fixed_length", kl_coef=0
    )
    assert (a.kl_place, a.estimator, a.averaging) == ("reward", "k2", "fixed_length")
    assert not a.has_reference
    assert AlgorithmConfig(name="rloo", kl_in="loss").estimator == "k3"
    assert AlgorithmConfig(name="grpo", kl_in="reward").estimator == "k1"


@pytest.mark.parametrize("kind", [Config, SftConfig, RewardModelConfig])
def test_seeds_are_those_that_torch_and_numpy_take(kind: Any, tmp_path: Path) -> None:
    for seed, code in (
        (-1, "greater_than_equal"),
        (2**63, "less_than_equal"),
        (2**64 + 5, "less_than_equal"),
    ):
        with raises(ConfigError, code, f"here: seed = {seed}"):
            recipes.build({"seed": seed}, "here", kind)
    largest = recipes.build({"seed": LARGEST_SEED}, "here", kind)
    assert recipes.load(write(tmp_path, recipes.dump(largest)), kind) == largest
    torch.manual_seed(largest.seed)
    np.random.default_rng([largest.seed, 0])


def test_beta_cannot_be_driven_below_zero() -> None:
    """Each step moves it by up to a fifth of batch / horizon: -0.2 * 50 / 10 takes all of it."""
    algorithm = {"kl_target": 6.0, "kl_horizon": 10}
    with raises(ConfigError, "kl-horizon-too-short", 10, 50):
        recipes.build({"algorithm": algorithm, "rollout": {"batch": 50}}, "here")
    config = recipes.build({"algorithm": algorithm, "rollout": {"batch": 49}}, "here")
    a = config.algorithm
    beta = AdaptiveKL(a.kl_coef, a.kl_target, a.kl_horizon)
    for _ in range(20):
        beta.update(0.0, config.rollout.batch)
        assert beta.coef > 0
    fixed = algorithm | {"kl_target": 0.0}
    recipes.build({"algorithm": fixed, "rollout": {"batch": 50}}, "here")


def test_patience_needs_evaluations() -> None:
    with raises(ConfigError, "patience-without-evaluations", "eval_patience = 2", "eval_every"):
        recipes.build({"observe": {"eval_patience": 2}}, "here")
    recipes.build({"observe": {"eval_patience": 2, "eval_every": 5}}, "here")


def test_a_stop_string_is_not_empty() -> None:
    for stop in ([""], ["\n", ""]):
        with raises(ConfigError, "empty-stop-string", "rollout.stop"):
            recipes.build({"rollout": {"stop": stop}}, "here")


@pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
def test_proposed_tokens_and_rows_are_counts(value: object) -> None:
    for name in ("speculative_tokens", "speculative_rows"):
        with raises(ConfigError, "engine-argument-no-count", name):
            recipes.build({"rollout": {"engine_args": {name: value}}}, "here")
    rollout = recipes.build({"rollout": {"engine_args": {"speculative_tokens": 2}}}, "x").rollout
    assert (rollout.speculative_tokens, rollout.speculative_rows) == (2, 8)


def test_a_model_that_proposes_tokens_needs_a_number_and_a_whole_engine() -> None:
    args: dict[str, Any] = {"speculative_model": "small"}
    with raises(ConfigError, "draft-without-tokens", "speculative_tokens"):
        recipes.build({"rollout": {"engine_args": args}}, "here")
    args["speculative_tokens"] = 4
    assert recipes.build({"rollout": {"engine_args": args}}, "x").rollout.speculative_model
    slices = {"ranks": 2, "layout": {"generator": {"tp": 2}}}
    sliced = {"runtime": "local", "cluster": {"processes": [{"roles": ["generator"], **slices}]}}
    with raises(ConfigError, "draft-in-slices", "tp = 2"):
        recipes.build({"rollout": {"engine_args": args}, **sliced}, "here")
    judge = {"processes": [{"roles": ["model:a-generator"], "ranks": 2}]}
    reward = {"sources": ["model:a-generator"]}
    whole = {"runtime": "local", "reward": reward, "cluster": judge}
    recipes.build({"rollout": {"engine_args": args}, **whole}, "here")


@pytest.mark.parametrize(
    "process", [{"ranks": 4}, {"ranks": 2, "layout": {"learner": {"fsdp": 2}}}]
)
def test_a_learner_has_stages_or_shards(process: dict[str, Any]) -> None:
    cluster = {"processes": [{"roles": ["learner", "generator"], **process}]}
    staged = {"runtime": "local", "pipeline": {"ranks": 2}, "cluster": cluster}
    ranks = f"{process['ranks']} ranks"
    with raises(ConfigError, "stages-and-shards", "pipeline.ranks = 2", ranks):
        recipes.build(staged, "here")


def test_a_critic_that_scores_has_only_the_learners_shards() -> None:
    shards = {"critic": {"fsdp": 4}}
    joint = {"roles": ["learner", "critic"], "ranks": 4, "layout": shards}
    recipes.build({"runtime": "local", "cluster": {"processes": [joint]}}, "here")
    other_layout = {**joint, "layout": {**shards, "learner": {"fsdp": 2, "tp": 2}}}
    apart = {"roles": ["critic"], "ranks": 4, "layout": shards}
    for process in (other_layout, apart):
        with raises(ConfigError, "critic-in-shards", "layout.critic = { fsdp = 4 }"):
            recipes.build({"runtime": "local", "cluster": {"processes": [process]}}, "here")
    lagging = {"schedule": {"preset": "async"}, "cluster": {"processes": [joint]}}
    with raises(ConfigError, "critic-in-shards", "schedule.lag = 0"):
        recipes.build({"runtime": "local", **lagging}, "here")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"critic"}),
        ({"model": {"lora_rank": 2}}, {"critic", "reference"}),
        ({"model": {"lora_rank": 2}, "schedule": {"preset": "async"}}, {"reference"}),
        ({"pipeline": {"ranks": 4}, "model": {"lora_rank": 2}}, set()),
    ],
)
def test_scorers_that_use_the_learners_weights(
    sections: dict[str, Any], expected: set[str]
) -> None:
    """In the learner's layout or without one. No role of a frozen model of its own."""
    roles = ["learner", "reference", "critic", "model:a"]
    process = {"roles": roles, "ranks": 4}
    cluster = {"processes": [process]}
    config = Config.model_validate({"runtime": "local", "cluster": cluster, **sections})
    for layout in (None, config.learner_layout):
        scorers = {role for role in roles if config.uses_learner(role, layout)}
        assert scorers == expected
        assert not config.uses_learner("critic", Layout(dp=2, tp=2))


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with raises(ConfigError, "greater_than", "'steps = 0': ", "; unknown setting 'modl'"):
        recipes.load(write(tmp_path, "steps = 0\nmodl = 1"))


def test_unknown_recipe_names_the_nearest() -> None:
    with raises(ConfigError, "unknown-recipe", "'tinny'", "Did you mean 'tiny'?"):
        recipes.load("tinny")
    with raises(ConfigError, "unknown-recipe", "'tiny' is a recipe of `stretto train`"):
        recipes.load("tiny", SftConfig)
    with raises(ConfigError, "unknown-recipe", "settings are TOML files"):
        recipes.load("my.yaml")
    with raises(ConfigError, "unknown-recipe", "Known: arithmetic, calculator, gsm8k"):
        recipes.describe("zzz")


def test_missing_files_and_folders_that_are_no_runs(tmp_path: Path) -> None:
    with raises(ConfigError, "unreadable", "absent.toml"):
        recipes.load(tmp_path / "absent.toml")
    with raises(ConfigError, "no-run-directory", "config.toml"):
        recipes.load(tmp_path)


def test_a_run_is_called_after_its_recipe(tmp_path: Path) -> None:
    run = tmp_path / "tiny-007"
    run.mkdir()
    assert recipes.name_of("tiny") == "tiny"
    assert recipes.name_of("some/where/own.toml") == "own"
    assert recipes.name_of(run) == "tiny"
    assert recipes.name_of(run / "config.toml") == "tiny"


def test_memory_of_7b_in_both_countings() -> None:
    plan = memory_plan(7 * 10**9)
    low = {role: size / 1e9 for role, size in plan.sixteen_bit.items()}
    assert low == {"actor": 42, "critic": 42, "reference": 14, "reward": 14}
    assert plan.sixteen_bit.total() == 112 * 10**9
    mixed = {role: size / 1e9 for role, size in plan.mixed.items()}
    assert mixed == {"actor": 112, "critic": 112, "reference": 14, "reward": 14}
    assert plan.mixed.total() == 252 * 10**9
    assert (fewest_gpus(plan.sixteen_bit), fewest_gpus(plan.mixed)) == (2, 4)


def test_beside_adapters_the_critic_takes_their_states_alone() -> None:
    plan = memory_plan(1000, 10, models={"actor": 1000, "critic": 1000, "reward": 500})
    assert plan.mixed == {"actor": 2 * 1000 + 16 * 10, "critic": 16 * 10, "reward": 2 * 500}


def test_beside_adapters_matrices_may_be_in_4_bits() -> None:
    """800 of 1000 at 0.5158 bytes; the reference and the critic are on them."""
    plan = memory_plan(1000, 10, models={"actor": 1000, "critic": 1000}, in_4bit=800)
    assert plan.mixed == {"actor": round(2 * 200 + 0.51587 * 800) + 160, "critic": 160}
    tiny = {"name": "tiny", "lora_rank": 2, "dtype": "float32"}
    whole, packed = (plan_of({"model": {**tiny, "load_in_4bit": on}}).mixed for on in (False, True))
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    assert whole["actor"] - packed["actor"] == round((4 - 0.51587) * matrices)


def test_memory_of_70b_takes_at_least_14_gpus() -> None:
    plan = memory_plan(70 * 10**9)
    assert (plan.sixteen_bit.total(), fewest_gpus(plan.sixteen_bit)) == (1120 * 10**9, 14)


def test_memory_with_lora_trains_the_adapters_alone() -> None:
    plan = memory_plan(1000, 10, models={"actor": 1000, "reference": 1000}, frozen_bytes=4)
    # weights, gradients, Adam
    assert plan.mixed == {"actor": 4040 + 40 + 80, "reference": 4000}
    assert plan.sixteen_bit["actor"] == 2 * 1010 + 4 * 10
    assert "10 trained" in format_plan(plan)


def test_memory_refuses_nothing_to_count() -> None:
    with pytest.raises(ConfigError, match="1 or more; got 0"):
        memory_plan(0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("1.5b", 1_500_000_000),
        ("135M", 135_000_000),
        ("7_000", 7000),
        ("smollm2-135m", None),
        ("7Q", None),
    ],
)
def test_counts_as_people_write_them(text: str, count: int | None) -> None:
    assert parse_parameters(text) == count


def plan_of(settings: dict[str, Any]) -> MemoryPlan:
    config = recipes.build(settings, "here")
    return plan_for(config.model, config.algorithm, config.reward)


def test_the_tiny_model_and_the_plan_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from stretto.models.resolve import resolve

    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    config = recipes.load("tiny")
    parameters = AutoModelForCausalLM.from_pretrained(resolve("tiny")).num_parameters()
    assert measure(config.model) == (parameters, None)
    settings = {"model": {"name": "tiny", "dtype": "float32"}, "algorithm": {"kl_coef": 0.0}}
    plan = plan_of(settings)
    assert list(plan.mixed) == ["actor", "critic"]
    settings |= {"algorithm": {"kl_coef": 0.1}, "reward": {"sources": ["model:x"]}}
    plan = plan_of(settings)
    assert list(plan.mixed) == ["actor", "critic", "reference", "reward"]
    assert plan.mixed["reference"] == 4 * parameters
    settings |= {"algorithm": {"name": "rloo"}, "rollout": {"samples_per_prompt": 2}}
    plan = plan_of(settings)
    assert list(plan.mixed) == ["actor", "reference", "reward"]
    assert "(all trained in actor)" in format_plan(plan)


def test_a_model_that_is_not_there_is_said_so() -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        measure(ModelConfig(name="smollm2-136m"))


def test_the_default_model_is_counted_by_its_shape() -> None:
    # Embedding (tied) + 30 x (q, o; k, v; gate, up, down; two norms) + last norm.
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    expected = 49152 * 576 + 30 * layer + 576
    base = recipes.load("arithmetic").model
    assert measure(base) == (expected, None)
    adapted = base.model_copy(update={"lora_rank": 2})
    rank_sum = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)
    assert measure(adapted) == (expected, 30 * 2 * rank_sum)


@pytest.mark.parametrize(
    ("settings", "remarks"),
    [
        ({}, []),
        ({"algorithm": {"lam": 0.9, "clip": 0.1}}, []),
        (
            {
                "algorithm": {"name": "rloo", "lam": 0.9, "clip": 0.1, "scale_rewards": "none"},
                "training": {"critic_lr": 1e-3},
            },
            [
                "without effect on 'rloo': algorithm.lam, training.critic_lr, algorithm.clip, "
                "algorithm.scale_rewards"
            ],
        ),
        (
            {"algorithm": {"name": "grpo", "kl_estimator": "k1"}},
            ["the KL holds nothing back: k1's gradient in the loss has mean zero"],
        ),
        ({"algorithm": {"name": "grpo", "kl_estimator": "k1", "kl_coef": 0}}, []),
        (
            {"algorithm": {"name": "copg", "old_policy": "proximal"}},
            ["algorithm.old_policy = 'proximal' changes no gradient of 'copg'"],
        ),
        (
            {
                "algorithm": {"name": "rloo", "old_policy": "proximal"},
                "training": {"epochs": 2},
            },
            [
                "algorithm.old_policy = 'proximal' changes no gradient of 'rloo' without a "
                "correction and costs a forward pass"
            ],
        ),
        (
            {"schedule": {"overcommit": 4, "overcommit_min": 2, "overcommit_window": 5}},
            [
                "without effect while schedule.overcommit is 4: schedule.overcommit_min, "
                "schedule.overcommit_window"
            ],
        ),
        (
            {
                "schedule": {
                    "preset": "oppo",
                    "overcommit_rule": "throughput",
                    "overcommit_min": 2,
                    "overcommit_increment": 2,
                }
            },
            [
                "without effect on overcommit_rule = 'throughput': schedule.overcommit_increment",
            ],
        ),
        (
            {"rollout": {"stop": (r"\n", "\n", "end", r"\t:")}},
            [r"rollout.stop has a backslash and a letter in \n and \t:"],
        ),
        ({"rollout": {"stop": ("\n", "\t", "</a>", "\\")}}, []),
        ({"schedule": {"preset": "oppo", "overcommit_decrement": 2}}, []),
        ({"schedule": {"preset": "stretto"}}, []),
        (
            {"schedule": {"preset": "stretto"}, "rollout": {"samples_per_prompt": 2, "engines": 2}},
            ["schedule.migrate = 'auto' moves nothing while schedule.score_on is 'chunk'"],
        ),
    ],
)
def test_what_has_no_effect_is_remarked_on(settings: dict[str, Any], remarks: list[str]) -> None:
    settings = {"rollout": {"samples_per_prompt": 2}, **settings}
    config = Config.model_validate(settings)
    assert len(config.remarks) == len(remarks)
    for said, begin in zip(config.remarks, remarks, strict=True):
        assert said.startswith(begin)
        assert f"\nnote: {said}" in headline(config)


def test_vllm_has_processes_of_its_own() -> None:
    data: dict[str, Any] = {"rollout": {"engine": "vllm", "engine_args": {"block_size": 32}}}
    with raises(ConfigError, "vllm-without-processes", "`runtime = local`"):
        recipes.build(data, "here")
    together = {"processes": [{"roles": ["learner", "generator"], "ranks": 2}]}
    for runtime in ("local", "ray"):
        assert recipes.build({**data, "runtime": runtime}, "here").rollout.engine == "vllm"
        with raises(ConfigError, "vllm-beside-learner"):
            recipes.build({**data, "runtime": runtime, "cluster": together}, "here")


def test_the_own_engine_has_one_argument() -> None:
    off = Config.model_validate({"rollout": {"engine_args": {"cuda_graphs": False}}})
    assert Config().rollout.cuda_graphs
    assert not off.rollout.cuda_graphs
    with raises(ConfigError, "unknown-engine-argument", "'block_size'"):
        recipes.build({"rollout": {"engine_args": {"block_size": 32}}}, "here")


def test_mini_batches_are_no_more_than_what_is_trained_on() -> None:
    data: dict[str, Any] = {
        "algorithm": {"name": "online-dpo"},
        "rollout": {"batch": 32, "samples_per_prompt": 8},
        "training": {"minibatches": 4},
    }
    recipes.build(data, "here")
    data["training"]["minibatches"] = 8
    with raises(ConfigError, "minibatches-beyond-groups", 8, 4):
        recipes.build(data, "here")
    recipes.build({**data, "algorithm": {"name": "rloo"}}, "here")
    data["training"]["minibatches"] = 5
    with raises(ConfigError, "minibatches-not-divisor", 32, 5):
        recipes.build(data, "here")


def test_reward_models_count_with_their_own_size() -> None:
    tiny = {"model": {"name": "tiny", "dtype": "float32"}, "algorithm": {"kl_coef": 0}}
    sizes = {}
    for source in ("model:tiny", "model:smollm2-135m"):
        plan = plan_of({**tiny, "reward": {"sources": [source]}})
        sizes[source] = plan.mixed["reward"]
    assert sizes["model:smollm2-135m"] == 4 * 134_515_008
    assert sizes["model:tiny"] == 4 * 115_200


@pytest.mark.parametrize(("former", "now"), recipes.RENAMED.items())
def test_former_names_of_settings_lead_to_present_ones(former: str, now: str) -> None:
    section, *table, name = former.split(".")
    settings: dict[str, Any] = {name: 1}
    if table:
        settings = {table[0]: [{"roles": ["learner"], **settings}]}
        former = f"{section}.{table[0]}.0.{name}"
    with raises(ConfigError, "extra_forbidden", f"'{former}'", f"called `{now}` now"):
        recipes.build({section: settings}, "here")
    assert any(now.startswith(known) for known in recipes.setting_names())
