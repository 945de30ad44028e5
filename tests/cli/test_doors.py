"""Help, names from elsewhere and refusals of the command line, in one voice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from stretto import __version__, foreign
from stretto.cli.completion import options
from stretto.cli.main import COMMANDS, main
from stretto.config import Config, RewardModelConfig, Section, SftConfig, recipes
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import near, nearest
from stretto.interfaces import QUOTED


def run(*arguments: str) -> int:
    """The exit status, whichever way the command line ends."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("b200", ["h200", "gh200", "h100"], []),
        ("4090", ["h200", "5090"], []),
        ("H100", ["h100", "h200"], ["h100"]),
        ("k9", ["k1", "k2"], []),
        ("smollm-135m", ["smollm2-135m", "tiny"], ["smollm2-135m"]),
        ("qwen2.5-8b", ["qwen2.5-7b"], []),
        ("trian", ["train", "chat"], ["train"]),
        ("help", ["eval", "train"], []),
        ("version", ["train"], []),
        ("Max-Turns", ["max_turns"], ["max_turns"]),
    ],
)
def test_only_near_names_are_proposed(name: str, known: list[str], expected: list[str]) -> None:
    assert near(name, known) == expected


def test_many_names_are_not_listed() -> None:
    assert nearest("foo", [f"name-{number}x" for number in range(50)]).count("name") == 1


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--gpus", "[[cluster.processes]]"),
        ("--nproc_per_node", "[[cluster.processes]]"),
        ("--bf16", "--model.dtype bfloat16"),
        ("--fp16", "--model.dtype takes bfloat16 or float32"),
        ("--wandb", "--observe.trackers wandb"),
        ("--report_to", "--observe.trackers"),
        ("--config", ".toml file"),
        ("--list", "'stretto recipes'"),
        ("--model", "--model.name"),
        ("--dataset_name", "--task.name"),
        ("--lora_r", "--model.lora-rank"),
        ("--use_peft", "--model.lora-rank"),
        ("--learning_rate", "--training.lr"),
        ("--learnin-rate", "--training.lr"),
        ("--num_train_epochs", "--steps"),
        ("--per_device_train_batch_size", "--rollout.batch"),
        ("--max_completion_length", "--rollout.max-new-tokens"),
        ("--max_prompt_length", "--task.max-prompt-tokens"),
        ("--num_generations", "--rollout.samples-per-prompt"),
        ("--use_vllm", "--rollout.engine vllm"),
        ("--load_in_8bit", "--model.load-in-4bit"),
        ("--warmup_ratio", "--training.warmup-steps"),
        ("--output_dir", "--out"),
        ("--resume_from_checkpoint", "--resume RUN_DIR"),
        ("--push_to_hub", "uploaded"),
        ("--logging_steps", "metrics.jsonl"),
        ("--system_prompt", "--task.system"),
        ("--epsilon_high", "--algorithm.clip-high"),
        ("--eval_strategy", "--observe.eval-every"),
        ("--data_seed", "--seed"),
        ("--lr-scheduler", "--training.lr-schedule"),
    ],
)
def test_options_of_other_libraries_are_answered_with_the_setting(
    option: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "tiny", option, "2") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"stretto: error: unknown option '{option}'. ")
    assert remedy in said
    assert said.count("\n") == 1


def test_advice_names_settings_that_exist() -> None:
    every = {name for kind in recipes.FOLDERS for name in recipes.setting_names(kind)}
    assert {ours for names in foreign.ELSEWHERE.values() for ours in names} <= every
    for kind in (Config, SftConfig, RewardModelConfig):
        for name in (*foreign.ADVICE, *foreign.ELSEWHERE, "foo"):
            hint = recipes.hint(name, kind)
            quoted = {name for _, name, _ in QUOTED.findall(hint) if name}
            assert quoted <= set(recipes.setting_names(kind)), hint


def test_an_option_like_no_other_gets_no_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "tiny", "--foo") == 2
    said = capsys.readouterr().err
    assert "--help-all" in said
    assert len(said) < 200


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("generate --max_tokens 5 hi", ["'--max_tokens'", "--max-new-tokens"]),
        ("generate hi --modle x", ["'--modle'", "--model"]),
        ("generate hi --samples", ["'--samples'"]),
        ("train tiny --steps ten", ["--steps ten", "whole number"]),
        ("train tiny -steps 5", ["'-steps'", "two dashes"]),
        ("train tiny --rollout.temperature hot", ["--rollout.temperature hot", "a number"]),
        ("train tiny --algorithm.name GRPO", ["--algorithm.name GRPO", "'grpo'"]),
        ("eval", ["RECIPE_OR_RUN"]),
        ("serve", ["MODEL_OR_RUN"]),
        ("eval tiny --samples many", ["--samples many", "whole number"]),
        ("chat a b", ["'b'", "'stretto chat'"]),
        ("pipeline --actr 7B", ["'--actr'", "--actor"]),
        ("memory 7B --gpus 8 --gpu b300", ["'b300'", "h100"]),
        ("compare --sim x --foo", ["'--foo'"]),
    ],
)
def test_refusals_of_the_parser_are_one_sentence(
    line: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("stretto: error: ")
    assert said.count("\n") == 1
    assert not set("│╭╰") & set(said)
    assert [fact for fact in facts if fact not in said] == []


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["version"]])
def test_the_version_by_all_its_names(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("help") == 0
    assert all(f"\n  {name} " in capsys.readouterr().out for name in [next(iter(COMMANDS))])
    assert run("help", "memory") == 0
    assert "usage: stretto memory" in capsys.readouterr().out


def test_recipes_are_printed_as_toml_that_loads_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, kind in (("train", Config), ("sft", SftConfig), ("reward", RewardModelConfig)):
        for name in recipes.names(kind):
            assert run("recipes", folder, name) == 0
            text = capsys.readouterr().out
            assert tomllib.loads(text)
            (tmp_path / "own.toml").write_text(text)
            assert recipes.load("own.toml", kind) == recipes.load(name, kind)
    assert run("recipes", "tiny") == 0
    assert "warmup" in capsys.readouterr().out
    assert run("recipes", "tinny") == 2
    assert "'tiny'" in capsys.readouterr().err


def test_a_value_for_a_section_names_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text('model = "tiny"')
    assert run("train", str(tmp_path / "own.toml"), "--dry-run") == 2
    assert "'model.name = " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "sft", "reward", "compare", "plan", "eval", "label"])
def test_help_is_short_and_help_all_complete(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    short = capsys.readouterr().out
    assert run(command, "--help-all") == 0
    whole = capsys.readouterr().out
    assert len(short.splitlines()) <= 130
    assert len(short) < len(whole)
    assert "--help-all documents all of them" in short
    kinds: dict[str, type[Section]] = {"sft": SftConfig, "reward": RewardModelConfig}
    if command in ("train", *kinds):
        for name in recipes.setting_names(kinds.get(command, Config)):
            assert "--" + name.replace("_", "-") in whole or name == "cluster.processes"


@pytest.mark.parametrize(
    "line",
    [
        "train tiny --model.name some/model",
        "generate hi --model some/model",
        "eval tiny --model some/model",
    ],
)
def test_a_hub_that_must_not_be_asked_is_a_sentence_true_in_every_command(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    assert run(*line.split()) == 2
    said = capsys.readouterr().err
    assert "'some/model'" in said
    assert "HF_HUB_OFFLINE" in said
    assert "no such folder" in said
    assert "--model.name" not in said


def completed(script: str, *words: str) -> list[str]:
    """What bash proposes for the last of the words."""
    ask = f"{script}\nCOMP_WORDS=({' '.join(words)} ''); COMP_CWORD={len(words) - 1}\n_stretto\n"
    shown = subprocess.run(
        ["bash", "-c", f'{ask}printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.split()


def test_bash_completes_commands_settings_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "bash") == 0
    script = capsys.readouterr().out
    assert set(completed(script, "stretto", "''")) >= {*COMMANDS}
    assert completed(script, "stretto", "tra") == ["train"]
    options = {f"--{name.replace('_', '-')}" for name in recipes.setting_names()}
    assert {*completed(script, "stretto", "train", "--")} >= options - {"--cluster.processes"}
    assert "--training.lr-schedule" in completed(script, "stretto", "train", "--training.l")
    assert "tiny" in completed(script, "stretto", "train", "ti")
    assert completed(script, "stretto", "sft", "--data.na") == ["--data.name"]
    assert completed(script, "stretto", "memory", "--lora-r") == ["--lora-rank"]
    assert completed(script, "stretto", "doctor", "tiny") == []
    assert set(completed(script, "stretto", "help", "''")) >= {*COMMANDS}
    values = ("stretto", "train", "--algorithm.name")
    assert completed(script, *values, "''") == [*ALGORITHMS]
    assert completed(script, *values, "=", "''") == [*ALGORITHMS]  # bash's words of --name=value
    assert completed(script, *values, "=", "gr") == ["grpo"]
    assert completed(script, "stretto", "train", "--runtime", "l") == ["local"]
    assert completed(script, "stretto", "train", "tiny", *["--x"] * 9, "--runt") == ["--runtime"]
    for name in ("plan", "memory"):
        assert completed(script, "stretto", name, "--gpu", "rtx") == ["rtx4090", "rtx5090"]
    assert completed(script, "stretto", "plan", "--model-shape", "gpt") == list(OSS)
    assert completed(script, "stretto", "memory", "gpt") == list(OSS)
    assert "b200" not in completed(script, "stretto", "doctor", "--gpu", "''")


OSS = ("gpt-oss-20b", "gpt-oss-120b")


def test_choices_are_those_of_the_settings() -> None:
    for name, choices in options("train").items():
        assert all(re.fullmatch(r"[\w.-]+", choice) for choice in choices), name
    assert options("train")["--algorithm.aggregation"] == [
        *("auto", "token_mean", "sequence_mean", "sequence_sum", "fixed_length")
    ]
    assert list(options("completion")) == ["--help"]


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("stretto tra", ["train"]),
        ("stretto train --runtime ", ["inline", "local", "ray"]),
        ("stretto train --runtime=l", ["--runtime=local"]),
        ("stretto plan --gpu rtx", ["rtx4090", "rtx5090"]),
        ("stretto train tiny-t", ["tiny-tail", "tiny-turns"]),
        ("stretto train --model.lora-k", ["--model.lora-kind"]),
    ],
)
@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_fish_and_zsh_complete_the_same(
    shell: str, line: str, offers: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert run("completion", shell) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    if shell == "fish":
        ask = f"source script; complete -C '{line}'"
    else:  # the words of a line as bashcompinit gives them to the function
        words = line.split(" ")
        ask = (
            f"source script; COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}')\n"
            f"COMP_CWORD={len(words) - 1}; emulate sh; _stretto\n"
            'print -rl -- "${COMPREPLY[@]}"'
        )
    shown = subprocess.run(
        [shell, "-c", ask],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # zsh itself leaves out what does not begin with the word.
    last = line.rpartition(" ")[2]
    assert [offer for offer in shown.stdout.split() if offer.startswith(last)] == offers


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("watch nowhere", "there is no folder 'nowhere'"),
        ("label pairs.jsonl --by model:tiny", "needs --out"),
    ],
)
def test_what_is_missing_is_named(line: str, fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert fact in capsys.readouterr().err


def test_an_option_and_a_section_of_one_name_are_given_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "tiny", "--model", "nowhere", "--model.dtype", "float32"]) == 2
    assert "unknown model 'nowhere'" in capsys.readouterr().err
