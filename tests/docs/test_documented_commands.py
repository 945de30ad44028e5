"""Every command that the pages print, as far as the first thing that takes long.

Options, files, columns and settings are looked at by the same checks as ever. What loads or trains
a real model is stopped there, or told ``--dry-run``; measuring, generating and reporting is done,
on runs of a second.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import run_helpers
import stretto
from docs_helpers import PAGES, ROOT, arguments, blocks, commands, prose, shell_lines
from stretto import api, runs
from stretto.cli.main import main
from stretto.config import Config
from stretto.errors import is_installed
from stretto.models.load import load_tokenizer
from stretto.models.shapes import known_config
from stretto.models.tiny import make_tiny
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.planner.hardware import read_hardware
from stretto.runtime.placement import places
from stretto.runtime.sim.cluster import Cluster
from template_helpers import TEMPLATES

ELSEWHERE = "features"
"""The page whose commands tests/test_readme.py runs."""
COMMANDS = [(p.stem, command) for p in PAGES if p.stem != ELSEWHERE for command in commands(p)]
DRY = ("train", "sft", "reward", "align")
LONG = {
    "stretto.api.training.execute": "a run resumed",
    "stretto.cli.compare.settled": "a comparison",
    "stretto.cli.plan.planning.plan": "a search for plans",
    "stretto.cli.plan.calibrating.calibrate": "measurements",
    "stretto.pipelines.solve.solve": "a search for a schedule",
    "stretto.observe.report.RunServer.serve_forever": "a page that is kept up to date",
    "stretto.cli.generate._lines": "a chat",
    "stretto.cli.serve._serve": "a server",
}
"""What commands call once all is checked, and begins what takes long."""


class BeginsError(Exception):
    """All was in order."""


def rows(file: Path, *of: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in of), encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and runs that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    asked = {"prompt": "What is 3 + 4?", "question": "What is 3 + 4?"}
    told = {"answer": "7", "label": "7", "summary": "seven"}
    rows(folder / "sums.jsonl", *[asked | told | {"question": f"{n} + 4?"} for n in range(10)])
    settings = blocks("tutorial", "toml")[0].replace("smollm2-135m", "tiny-chat")
    (folder / "sums.toml").write_text(settings)
    rows(folder / "mine.jsonl", asked | told)
    some = [{"prompt": f"{n}?"} for n in range(20)]
    rows(folder / "chats.jsonl", *[row | {"completion": "yes"} for row in some])
    rows(folder / "pairs.jsonl", *[row | {"chosen": "yes", "rejected": "no"} for row in some])
    (folder / "rewards.py").write_text(blocks("rewards", "python")[0])
    called, *others = blocks("episodes", "python")
    games = next(block for block in others if "class Guess" in block)
    (folder / "tools.py").write_text(blocks("serving", "python")[0] + called)
    (folder / "games.py").write_text(games)
    (folder / "problem.json").write_text(blocks("pipelines", "json")[0])
    (folder / "here.toml").write_text(blocks("planning", "toml")[0])
    (folder / "cluster.toml").write_text("[rollout]\nengines = 2\n")
    shared = '[task]\nkind = "dataset"\nname = "sums.jsonl"\ncolumns = { answer = "answer" }\n'
    (folder / "my.toml").write_text(f'runtime = "local"\n[model]\nname = "tiny"\n{shared}')
    (folder / "processes.toml").write_text('runtime = "local"\n')
    _runs(folder)
    return folder


def _runs(folder: Path) -> None:
    """Runs of 20 small steps, and models under the names of stages that trained them."""
    out, quiet = folder / "runs", {"progress": "off"}
    make_tiny(folder / "tiny")
    body: Any = AutoModelForCausalLM.from_pretrained(folder / "tiny")
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(body, adapter).save_pretrained(str(folder / "adapter"))
    sums = run_helpers.settings(folder / "tiny", steps=20, observe=quiet)
    own = api.changed(
        sums,
        {"task": {"kind": "dataset", "name": str(folder / "sums.jsonl")}},
        {"reward": {"sources": [f"{folder / 'rewards.py'}:reward_func"]}},
    )
    for name, config in (("tiny", sums), ("my", own)):
        run = RunDirectory.create(out, name, config)
        runs.train(config, run_dir=run, progress=Progress())
    for copied in (
        "arithmetic-001",
        "calculator-001",
        "sums-001",
        "tiny-tail-001",
        "tiny-tail-002",
        "off-policy/n1-001",
    ):
        shutil.copytree(out / "tiny-001", out / copied)
    shutil.copytree(out / "tiny-001", out / "agent-001")
    tokenizer: Any = load_tokenizer(folder / "tiny")
    template = (TEMPLATES / "chatml.jinja").read_text().rstrip("\n")
    for token, tiny in (("<|im_start|>", "<bos>"), ("<|im_end|>", "<eos>")):
        template = template.replace(token, tiny)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out / "agent-001" / "model")
    shared: dict[str, Any] = {
        "model__name": str(folder / "tiny"),
        "out": str(out),
        "observe": quiet,
    }
    chats, pairs = (str(folder / name) for name in ("chats.jsonl", "pairs.jsonl"))
    stretto.sft(stretto.SftConfig(), data__name=chats, **shared)
    stretto.train_reward_model(stretto.RewardModelConfig(), data__name=pairs, **shared)
    shutil.copytree(out / "reward-001", out / "gold-001")


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p}: {c}" for p, c in COMMANDS])
def test_a_command_is_one(
    page: str,
    command: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del page  # which says where to look

    def begins(*_: Any, **__: Any) -> None:
        raise BeginsError

    monkeypatch.chdir(place)
    for name in LONG:
        monkeypatch.setattr(name, begins)
    words = arguments(command)
    if words[0] in DRY and not {"--resume", "--help", "--dry-run"} & set(words):
        words.append("--dry-run")
    if words[0] == "eval":
        words += ["--samples", "2"]
    if words[:2] == ["compare", "--sim"] and words[2].endswith(".toml"):
        words += ["--steps", "2", "--seeds", "0"]
    try:
        status: Any = main(words)
    except BeginsError:
        return
    except SystemExit as end:  # of --help
        status = end.code
    libraries = {"serve": "starlette", "vllm": "vllm", "--model.load-in-4bit": "bitsandbytes"}
    asked = [libraries[word] for word in words if word in libraries]
    if missing := [library for library in asked if not is_installed(library)]:
        assert status == 2
        assert f"needs the library '{missing[0]}'" in capsys.readouterr().err
    else:
        assert status == 0


def test_commands_are_found() -> None:
    pages = {page for page, _ in COMMANDS}
    assert {"first-run", "data", "rewards", "alignment", "evaluation", "checkpoints"} <= pages
    assert ("data", "stretto train arithmetic --task.settings min_terms=2 max_terms=3") in COMMANDS
    assert not any("#" in command for _, command in COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_else_is_typed_is_there(page: Path) -> None:
    """Targets of make, extras, and files; installing and containers need a network."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    for line in shell_lines(page):
        if found := re.match(r"make (\w+)", line):
            assert f"\n{found[1]}:" in makefile
        if found := re.match(r"(?:uv )?pip install .*\[([\w,-]+)\]", line):
            assert set(found[1].split(",")) <= set(extras)
        if found := re.match(r"python ([\w/]+\.py)", line):
            assert (ROOT / found[1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_toml_are_settings(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page.stem, "toml")):
        table = tomllib.loads(block)
        if page.stem == "simulator":
            roles = {"generators": [{"cost": {}}], "learner": {"cost": {}}}
            cluster = Cluster.model_validate(roles | table)
            assert cluster.restarts == table.get("restarts", 0)
            assert bool(cluster.workload.episodes) == ("workload" in table)
        elif page.stem == "planning":
            (tmp_path / "here.toml").write_text(block)
            assert read_hardware(tmp_path / "here.toml").gpu.name == table["gpu"]["name"]
        else:
            assert Config.model_validate(table) != Config(), f"block {number}"


def test_settings_for_gpus_place_learners_and_engines() -> None:
    """As the page says: on one GPU without vLLM, with a generator apart, and with vLLM; on eight
    divided, and on eight shared, by engines in processes of their own and in the learner's. The
    last two blocks are a plan for 64, which tests/cli/test_plan.py makes again.
    """
    found, table = [], dict[str, Any]()
    for block in blocks("gpu", "toml")[:-2]:
        read = tomllib.loads(block)
        table = read if "model" in read else table | read  # what is added to the file before
        config = Config.model_validate(table)
        gpus = 1 if "0.5B" in config.model.name else 8
        assert known_config(config.model.name)
        learner, *others = places(config, cores=64, gpus=gpus)
        seats = [seat.role for place in (learner, *others) for seat in place.roles]
        assert config.rollout.engines == sum(role.startswith("generator") for role in seats)
        found.append((learner.devices, [device for p in others for device in p.devices]))
    cuda = [f"cuda:{i}" for i in range(8)]
    assert found == [
        (tuple(cuda[:1]), []),
        (tuple(cuda[:1]), cuda[:1]),
        (tuple(cuda[:1]), cuda[:1]),
        (tuple(cuda[:4]), cuda[4:]),
        (tuple(cuda), cuda),
        (tuple(cuda), []),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_that_are_named_are_settings(page: Path) -> None:
    """Of pages for those who come from elsewhere, the last column has ours."""
    lines = prose(page).splitlines()
    if page.stem.startswith("coming-from-"):
        lines = [line.rstrip(" |").rpartition(" | ")[2] for line in lines if line.startswith("|")]
    names = re.findall(r"`(?:--)?([a-z]+)\.([a-z_-]+)(?:[ =][^`]*)?`", "\n".join(lines))
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    unknown = []
    for section, name in names:
        known = getattr(sections.get(section), "model_fields", None)
        if known and name not in ("py", "toml") and name.replace("-", "_") not in known:
            unknown.append(f"{section}.{name}")
    assert unknown == []
