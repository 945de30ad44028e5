"""Settings from files: packaged recipes, other TOML files, and run directories.

A recipe is a short TOML file; what it leaves out takes its default. Its first line is a comment,
its description. A run's own ``config.toml`` is read the same way, so that a run can be repeated or
resumed from its folder alone.

Each command that trains has recipes of its own, of the kind of settings that it takes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import tomli_w
from pydantic import BaseModel, ValidationError

from stretto.config import Config, RewardModelConfig, Section, SftConfig
from stretto.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "FOLDERS",
    "build",
    "describe",
    "dump",
    "hint",
    "load",
    "name_of",
    "names",
    "setting_names",
]


S = TypeVar("S", bound=Section)

PACKAGE = "stretto.recipes"
"""Package that holds the recipes."""

RENAMED = {"schedule.batches_per_handover": "schedule.weight_sync_interval"}
"""Names of settings in earlier versions, with their present names."""

_ELSEWHERE = {
    "algorithm.clip": "cliprange clip_ratio eps_clip epsilon",
    "algorithm.kl_coef": "beta kl_beta init_kl_coef kl_loss_coef",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.name": "loss_type adv_estimator advantage_estimator",
    "algorithm.value_clip": "cliprange_value value_clip_range",
    "model.lora_alpha": "alpha",
    "model.lora_rank": "lora_r rank r",
    "model.lora_targets": "lora_target_modules target_modules",
    "model.name": "model_name model_name_or_path pretrain model_path path",
    "observe.checkpoint_every": "save_steps save_freq",
    "observe.trackers": "report_to logger use_wandb",
    "out": "output_dir save_path default_local_dir",
    "reward.sources": "reward_funcs reward_model reward_model_path remote_rm_url reward_pretrain",
    "rollout.batch": "batch_size train_batch_size per_device_train_batch_size rollout_batch_size",
    "rollout.engine": "use_vllm",
    "rollout.max_new_tokens": "max_completion_length response_length max_response_length "
    "generate_max_len max_tokens",
    "rollout.samples_per_prompt": "num_generations n n_samples_per_prompt rloo_k",
    "steps": "max_steps total_training_steps num_steps",
    "task.answer_column": "label_key answer_key",
    "task.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "task.name": "dataset dataset_name train_dataset prompt_data train_files data",
    "task.prompt_column": "input_key prompt_key",
    "training.critic_lr": "critic_learning_rate",
    "training.epochs": "num_ppo_epochs ppo_epochs num_iterations num_train_epochs max_epochs",
    "training.grad_clip": "max_grad_norm max_norm",
    "training.lr": "learning_rate actor_learning_rate",
    "training.lr_schedule": "lr_scheduler_type lr_scheduler lr_warmup_style",
    "training.microbatch_tokens": "gradient_accumulation_steps micro_train_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "training.minibatches": "num_mini_batches ppo_mini_batch_size",
}
ELSEWHERE = {name: ours for ours, names in _ELSEWHERE.items() for name in names.split()}
"""What TRL, verl, OpenRLHF and peft call a setting, by the last part of their name."""

FOLDERS: Mapping[type[Section], str] = {Config: "", SftConfig: "sft", RewardModelConfig: "reward"}
"""Folder of the packaged recipes of each kind of settings, below the package's."""


def names(kind: type[Section] = Config) -> list[str]:
    """The packaged recipes of a kind, in alphabetical order."""
    folder = _folder(kind)
    files = (Path(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(file.stem for file in files if file.suffix == ".toml")


def describe(name: str, kind: type[Section] = Config) -> str:
    """The one-line description of a packaged recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    return _packaged(name, kind).partition("\n")[0].removeprefix("#").strip()


@overload
def load(name_or_path: str | Path) -> Config: ...
@overload
def load(name_or_path: str | Path, kind: type[S]) -> S: ...
def load(name_or_path: str | Path, kind: type[Any] = Config) -> Any:
    """Load settings from a packaged recipe, a ``.toml`` file, or a run directory.

    A packaged name wins over a folder of the same name in the working directory (``./name`` means
    the folder).

    Args:
        kind: of settings: ``Config``, ``SftConfig`` or ``RewardModelConfig``.

    Raises:
        ConfigError: no such recipe or file, no valid TOML, an unknown key, or a value out of range.
    """
    name = str(name_or_path)
    if name in names(kind):
        return _with_own_files(_parse(_packaged(name, kind), f"recipe '{name}'", kind))
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.toml"
        if not path.is_file():
            raise ConfigError(
                f"'{name_or_path}' is a folder without a config.toml, so not a run directory; "
                "give the folder of a run, a .toml file, or a recipe's name"
            )
    if path.suffix != ".toml":
        raise _unknown_recipe(name, kind)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error}") from error
    return _parse(text, str(path), kind)


def name_of(name_or_path: str | Path) -> str:
    """Short name of a recipe, after which its runs are named."""
    path = Path(name_or_path)
    if path.name == "config.toml":
        path = path.parent
    if path.suffix == ".toml":
        return path.stem
    return re.sub(r"-\d+$", "", path.resolve().name) if path.is_dir() else path.name


def dump(config: Section) -> str:
    """Write every setting as TOML, from which :func:`load` makes an equal object."""
    return tomli_w.dumps(config.model_dump())


def setting_names(kind: type[Section] = Config) -> list[str]:
    """The dotted name of every setting, in the order of :mod:`stretto.config`."""
    return list(_keys_of(kind, ""))


@overload
def build(data: Mapping[str, Any], where: str) -> Config: ...
@overload
def build(data: Mapping[str, Any], where: str, kind: type[S]) -> S: ...
def build(data: Mapping[str, Any], where: str, kind: type[Any] = Config) -> Any:
    """Make settings from nested plain data, validated.

    Args:
        data: as TOML gives it; what is left out takes its default.
        where: where the data comes from, for messages.

    Raises:
        ConfigError: an unknown key, or a value out of range; the message lists all faults.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        problems = "; ".join(_explain(e, kind) for e in faults)
        raise ConfigError(f"{where}: {problems}", code_of(faults[0])) from error


def code_of(fault: ErrorDetails) -> str:
    """Return the code of a fault that pydantic found: the broken rule's, or pydantic's own name."""
    return str(getattr(fault.get("ctx", {}).get("error"), "code", fault["type"]))


def hint(key: str, kind: type[Section] = Config, *, table: bool = False) -> str:
    """Return a sentence that says which setting is probably meant by a name that none has.

    Args:
        table: whether it stands for a whole section.
    """
    every, leaf = setting_names(kind), key.rpartition(".")[2]
    # A setting that exists, but in another section, is what was meant more often than a typo.
    same_leaf = [known for known in every if known.rpartition(".")[2] == leaf]
    if now := RENAMED.get(key):
        return f"It is called '{now}' now."
    if table and "." not in key:
        return nearest(key, {name.partition(".")[0] for name in every if "." in name})
    if not same_leaf and (ours := ELSEWHERE.get(leaf)) in every:
        return f"It is called '{ours}' here."
    if same_leaf:
        return f"Did you mean {' or '.join(map(repr, same_leaf))}?"
    return nearest(key, every)


def _folder(kind: type[Section]) -> Traversable:
    root = resources.files(PACKAGE)
    return root.joinpath(FOLDERS[kind]) if FOLDERS[kind] else root


def _packaged(name: str, kind: type[Section]) -> str:
    if name not in names(kind):
        raise _unknown_recipe(name, kind)
    return _folder(kind).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def _with_own_files(config: Any) -> Any:
    """Replace names of files that come with the packaged recipes by their full paths."""
    folder = Path(str(resources.files(PACKAGE)))

    def located(name: str) -> str:
        file, colon, function = name.partition(":")
        return f"{folder / file}{colon}{function}" if file and (folder / file).is_file() else name

    if isinstance(config, SftConfig | RewardModelConfig):
        data = config.data.model_copy(update={"name": located(config.data.name)})
        return config.model_copy(update={"data": data})
    assert isinstance(config, Config)
    own = {"name": located(config.task.name)}
    if config.task.held_out_rows:
        own["held_out"] = located(config.task.held_out_rows)
    task = config.task.model_copy(update=own)
    sources = tuple(located(source) for source in config.reward.sources)
    reward = config.reward.model_copy(update={"sources": sources})
    return config.model_copy(update={"task": task, "reward": reward})


def _unknown_recipe(name: str, kind: type[Section]) -> ConfigError:
    if "/" in name:
        return ConfigError(
            f"there is no folder '{name}' (looked for from {Path.cwd()}); give a run's folder, a "
            ".toml file, or a recipe's name"
        )
    known = names(kind)
    return ConfigError(
        f"there is no recipe '{name}'. {nearest(name, known) + ' ' if known else ''}"
        "A path to a .toml file or to a run's folder does as well."
    )


def _parse(text: str, where: str, kind: type[S]) -> S:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    try:
        return build(data, where, kind)
    except ConfigError as error:
        others = [k for k in FOLDERS if k is not kind and _fits(data, k)]
        # A single setting may stand at the wrong place, where another kind has one of its name.
        tables = {key for key, value in data.items() if isinstance(value, dict)}
        if others and (_is_run(where) or not tables <= kind.model_fields.keys()):
            raise _other_command(where, others, kind) from error
        raise


def _is_run(where: str) -> bool:
    return Path(where).name == "config.toml"


def _fits(data: Mapping[str, Any], kind: type[Section]) -> bool:
    try:
        kind.model_validate(data)
    except ValidationError:
        return False
    return True


def _other_command(
    where: str, theirs: Sequence[type[Section]], wanted: type[Section]
) -> ConfigError:
    """Error for settings of another kind than a command takes, with what its user may have meant."""
    commands = " or ".join(f"'stretto {_command(kind)}'" for kind in theirs)
    hint = f"give it to {commands}"
    if _is_run(where):
        run = Path(where).parent
        hint = (
            f"for its trained model, name settings of that kind first: stretto {_command(wanted)} "
            f"RECIPE --model.name {run}"
        )
        if wanted is Config:
            hint += f", or to measure it: stretto eval RECIPE --model {run}"
    return ConfigError(
        f"{where} holds settings of {commands}, where those of 'stretto {_command(wanted)}' are "
        f"taken; {hint}"
    )


def _command(kind: type[Section]) -> str:
    return FOLDERS[kind] or "train"


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _explain(error: ErrorDetails, kind: type[Section]) -> str:
    """Write one of pydantic's errors as a sentence with the dotted key, the value and the rule."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        table = isinstance(error["input"], Mapping)
        return f"unknown setting '{key}'. {hint(key, kind, table=table)}"
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    rule = error["msg"].replace("Input should be", "must be")
    closest = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        closest = f". {nearest(error['input'], choices)}"
    return f"{key} = {error['input']!r}: {rule}{closest}"
