"""Plausible mistakes at the command line, and how long Stretto takes to answer each.

    python benchmarks/mistakes.py            # a table: seconds and the answer's first line
    python benchmarks/mistakes.py --only reward

``tests/cli/test_mistakes.py`` holds every answer to what stands here, and that torch is not
imported for any of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROWS = [{"prompt": f"say {word}", "answer": word} for word in ("cat", "dog", "cow")]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 128,
}


def weights(layers: int = 2, hidden: int = 64, words: int = 259) -> tuple[bytes, int]:
    """Return a safetensors file's header for a model of sizes, and the bytes of its weights.

    Only shapes are read of the file, so a sparse one will do.
    """
    shapes = {"model.embed_tokens.weight": [words, hidden]}
    for i in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{i}.self_attn.{name}.weight"] = [hidden, hidden]
    tensors, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * shape[1]
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header, end


FILES: dict[str, str | tuple[bytes, int]] = {
    "rows.jsonl": LINES,
    "unanswered.jsonl": LINES.replace("answer", "label"),
    "empty.jsonl": "",
    "broken.jsonl": LINES + "{'prompt': 1}\n",
    "null.jsonl": '{"prompt": "say hen", "answer": null}\n',
    "blank.jsonl": '{"prompt": " ", "answer": "x"}\n',
    "rows.xlsx": "PK",
    "ok.py": "def ok(completions, **columns):\n    return [1.0] * len(completions)\n",
    "syntax.py": "def ok(completions, **columns)\n    return 1\n",
    "imports.py": "import nosuchlibrary\ndef ok(completions, **columns):\n    return []\n",
    "columns.py": "def ok(completions, solution):\n    return []\n",
    "signature.py": "def ok(text, label):\n    return 1.0\n",
    "words.py": 'greeting = "hello"\n',
    "bad.toml": "steps = \n",
    "typo.toml": "stpes = 3\n",
    "section.toml": "[rolout]\nbatch = 3\n",
    "trl.toml": "[training]\nlearning_rate = 1e-5\n",
    "kind.toml": '[data]\nname = "rows.jsonl"\n',
    "ranks3.toml": (
        'runtime = "local"\n[[cluster.processes]]\nroles = ["generator"]\nranks = 3\n'
        "layout.generator = { tp = 3 }\n"
    ),
    "gpu.toml": (
        'runtime = "local"\n[[cluster.processes]]\nroles = ["learner"]\ndevice = "cuda:1"\n'
    ),
    "role.toml": 'runtime = "local"\n[[cluster.processes]]\nroles = ["learnr"]\n',
    "file": "not a folder",
    "nothing/readme.txt": "no model here",
    "config-only/config.json": json.dumps(CONFIG),
    "no-tokenizer/config.json": json.dumps(CONFIG),
    "no-tokenizer/model.safetensors": weights(),
    "short/config.json": json.dumps(CONFIG),
    "short/model.safetensors": weights(),
    "short/tokenizer.json": "{}",
    "damaged/config.json": json.dumps(CONFIG),
    "damaged/model.safetensors": (weights()[0][:200], 0),
    "damaged/tokenizer.json": "{}",
    "encoder/config.json": json.dumps({"model_type": "t5", "is_encoder_decoder": True}),
    "encoder/model.safetensors": weights(),
    "untyped/config.json": "{}",
    "untyped/model.safetensors": weights(),
    "huge/config.json": json.dumps(CONFIG | {"max_position_embeddings": 4096}),
    "huge/model.safetensors": weights(layers=100, hidden=16384),
    "huge/tokenizer.json": "{}",
    "run-001/config.toml": 'model.name = "tiny"\n',
    "pairs.jsonl": '{"chosen": "a b", "rejected": "a b"}\n',
}
"""Files in the folder in which each mistake is made."""


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what the answer to it must say.

    Attributes:
        name: of the mistake.
        arguments: of ``stretto``, without quoting.
        says: pieces of the answer.
        environment: more variables.
        seconds: that the answer may take; more than 1 where a network is asked.
    """

    name: str
    arguments: str
    says: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 1.0


def _on_rows(name: str, more: str, *says: str) -> Mistake:
    """Return a mistake of one who trains on rows of their own."""
    rows = "train tiny --task.kind dataset --task.name rows.jsonl"
    return Mistake(name, f"{rows} {more}", says)


MISTAKES = (
    # What is typed
    Mistake("command", "trian", ("unknown command 'trian'", "'train'")),
    Mistake("recipe", "train tinny", ("no recipe 'tinny'", "'tiny'")),
    Mistake("option", "train tiny --trainig.lr 1", ("'--trainig.lr'", "--training.lr?")),
    Mistake("option without section", "train tiny --lr 1", ("'--lr'", "--training.lr?")),
    Mistake("option of TRL", "train tiny --learning_rate 1", ("--training.lr here",)),
    Mistake("option of verl", "train tiny --kl_loss_coef 1", ("--algorithm.kl-coef here",)),
    Mistake("hydra style", "train tiny training.lr=1", ("two dashes", "--training.lr 1")),
    Mistake("recipe last", "train --steps 3 tiny", ("write 'tiny' first",)),
    Mistake("no number", "train tiny --steps ten", ("steps", "ten")),
    Mistake("negative", "train tiny --steps -3", ("--steps -3", "greater than 0")),
    Mistake("out of range", "train tiny --algorithm.gamma 1.5", ("gamma 1.5", "less than")),
    Mistake("choice", "train tiny --algorithm.name dpo", ("algorithm.name", "dpo")),
    Mistake("type", "train tiny --model.dtype float16", ("model.dtype", "float16")),
    Mistake("file setting", "train tiny --cluster.processes x", ("[[cluster.processes]]",)),
    Mistake("out is a file", "train tiny --out file", ("'file'",)),
    Mistake("generate without prompt", "generate", ("there is no prompt",)),
    # Settings in files
    Mistake("no file", "train nosuch.toml", ("cannot read", "nosuch.toml")),
    Mistake("broken TOML", "train bad.toml", ("'bad.toml' is not valid TOML",)),
    Mistake("unknown setting", "train typo.toml", ("'stpes'", "'steps'")),
    Mistake("unknown section", "train section.toml", ("'rolout'", "'rollout'")),
    Mistake("setting of TRL", "train trl.toml", ("'training.learning_rate'", "'training.lr'")),
    Mistake("other command", "train kind.toml", ("stretto sft",)),
    Mistake("no overrides", "train tiny --overrides no.toml", ("cannot read", "no.toml")),
    Mistake("folder", "train nothing", ("without a config.toml",)),
    # Settings that contradict each other
    Mistake("batch", "train tiny --rollout.samples-per-prompt 3", ("multiple of samples_per",)),
    Mistake("mini-batches", "train tiny --training.minibatches 7", ("does not split",)),
    Mistake("group", "train tiny --algorithm.name grpo", ("at least 2", "got 1")),
    Mistake("greedy", "train tiny --rollout.temperature 0", ("temperature is 0",)),
    Mistake("truncated", "train tiny --rollout.top-k 5", ("truncate sampling",)),
    Mistake("weights", "train tiny --reward.weights 1 2", ("2 numbers for 1 sources",)),
    Mistake("held out", "train tiny --task.held-out 1.5", ("less than 1",)),
    Mistake("one engine", "train tiny --schedule.migrate 0.5", ("rollout.engines is 1",)),
    Mistake("critic", "train tiny --critic.init reward", ("needs a reward model",)),
    Mistake("vllm inline", "train tiny --rollout.engine vllm", ("--runtime local",)),
    Mistake("ranks inline", "train ranks3.toml --runtime inline", ("ranks = 3", "--runtime local")),
    Mistake(
        "pipeline",
        "train tiny --pipeline.ranks 2 --pipeline.stage-counts 4 2 --pipeline.micro-batches 4",
        ("stages",),
    ),
    # Data
    Mistake("procedural task", "train tiny --task.name chain_summ", ("'chain_sum'",)),
    Mistake("no data", "train tiny --task.kind dataset", ("task.name is empty",)),
    Mistake(
        "no data file",
        "train tiny --task.kind dataset --task.name no.jsonl",
        ("no file 'no.jsonl'",),
    ),
    _on_rows("column", "--task.columns prompt=question", "no column 'question'", "answer, prompt"),
    _on_rows("answers", "--task.columns answer=label", "no column 'label'", "answer, prompt"),
    _on_rows("no reward", "--task.name unanswered.jsonl", "cannot score answers", "task.columns"),
    _on_rows("split", "--task.columns answer=answer --task.split test", "--task.split test"),
    _on_rows("size", "--task.columns answer=answer --task.size 9", "holds 3 rows"),
    _on_rows("settings", "--task.settings min=3", "task.settings", "no effect"),
    _on_rows("held-out file", "--task.columns answer=answer --task.held-out no.jsonl", "no.jsonl"),
    _on_rows(
        "warm-up",
        "--task.name unanswered.jsonl --reward.sources ok.py:ok --warmup-examples 9",
        "own answers",
    ),
    *(
        Mistake(
            name,
            f"train tiny --task.kind dataset --task.name {file} --task.columns answer=answer",
            says,
        )
        for name, file, says in (
            ("empty file", "empty.jsonl", ("holds no rows",)),
            ("broken line", "broken.jsonl", ("line 4", "not valid JSON")),
            ("null answer", "null.jsonl", ("row 0", "got None")),
            ("blank prompt", "blank.jsonl", ("row 0", "prompt")),
            ("spreadsheet", "./rows.xlsx", ("must end in one of", ".jsonl")),
        )
    ),
    Mistake("GSM8K", "train gsm8k", ("task.name is empty",)),
    Mistake("GSM8K's form", "train gsm8k --task.name rows.jsonl", ("no column 'question'",)),
    Mistake("demonstrations", "sft --data.name rows.jsonl", ("'messages'", "completion")),
    Mistake("no demonstrations", "sft", ("data.name is empty",)),
    Mistake("pairs", "reward --data.name rows.jsonl", ("no column 'chosen'",)),
    Mistake("equal pairs", "reward --data.name pairs.jsonl", ("row 0",)),
    # Reward functions
    _on_rows("reward file", "--reward.sources no.py:ok", "no.py", "not there"),
    _on_rows("reward name", "--reward.sources ok.py:okay", "does not define 'okay'", "'ok'"),
    _on_rows("reward form", "--reward.sources accuracy", "'accuracy' is none of"),
    _on_rows("reward syntax", "--reward.sources syntax.py:ok", "syntax.py", "line 1"),
    _on_rows("reward import", "--reward.sources imports.py:ok", "nosuchlibrary", "line 1"),
    _on_rows("reward column", "--reward.sources columns.py:ok", "solution", "answer, prompt"),
    _on_rows("reward signature", "--reward.sources signature.py:ok", "(text, label)", "TRL"),
    _on_rows("no reward function", "--reward.sources words.py:ok", "defines no function"),
    _on_rows("reward model", "--reward.sources model:./no", "no folder './no'"),
    # Models
    Mistake("model folder", "train tiny --model.name ./no", ("no folder './no'",)),
    Mistake("known model", "train tiny --model.name tinny", ("'tinny'", "'tiny'")),
    Mistake("Ollama's name", "train tiny --model.name llama3:8b", ("unknown model",)),
    Mistake("empty folder", "train tiny --model.name nothing", ("config.json",)),
    Mistake("model file", "train tiny --model.name file", ("is a file",)),
    Mistake("no weights", "train tiny --model.name config-only", ("no *.safetensors",)),
    Mistake("no tokenizer", "train tiny --model.name no-tokenizer", ("tokenizer",)),
    Mistake("damaged", "train tiny --model.name damaged", ("damaged", "download the model again")),
    Mistake("encoder", "train tiny --model.name encoder", ("t5", "decoder-only")),
    Mistake("no type", "train tiny --model.name untyped", ("model_type",)),
    Mistake("context", "train tiny --model.name short", ("positions for 128",)),
    Mistake(
        "LoRA's targets",
        "train tiny --model.name short --task.max-prompt-tokens 9 --model.lora-rank 2 "
        "--model.lora-targets query",
        (" query ", "layer"),
    ),
    Mistake("memory", "train tiny --model.name huge", ("free", "--model.lora-rank 16", "rloo")),
    Mistake("critic's model", "train tiny --critic.init ./no", ("no folder './no'",)),
    Mistake("evaluated model", "eval tiny --model ./no", ("no folder './no'",)),
    Mistake("generating model", "generate hi --model ./no", ("no folder './no'",)),
    Mistake("model to talk to", "chat ./no", ("no folder './no'",)),
    Mistake("model to serve", "serve ./no", ("no folder './no'",)),
    Mistake(
        "hub model offline",
        "train tiny --model.name owner/model",
        ("not on this machine",),
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
        5.0,
    ),
    Mistake(
        "hub data offline",
        "train tiny --task.kind dataset --task.name owner/rows --reward.sources ok.py:ok",
        ("not on this machine",),
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
        5.0,
    ),
    Mistake(
        "cache",
        "train tiny",
        ("STRETTO_CACHE",),
        {"STRETTO_CACHE": "file/cache"},
    ),
    # Machines
    Mistake("no GPU", "train tiny --model.device cuda", ("torch would see none",)),
    Mistake("GPU by number", "train gpu.toml", ("cuda:1", "0 GPUs")),
    Mistake("slices", "train ranks3.toml --model.name tiny", ("tp = 3", "heads")),
    Mistake("role", "train role.toml", ("'learnr'", "'learner'")),
    Mistake(
        "Ray's address",
        "train tiny --runtime ray --cluster.address 127.0.0.1:9",
        ("127.0.0.1:9", "ray start"),
    ),
    Mistake("plan without GPUs", "plan tiny", ("--gpus",)),
    Mistake("plan's GPU", "plan tiny --gpus 8 --gpu h300", ("gh200, h100, h200",)),
    # Runs
    Mistake("resume nothing", "train --resume runs/no", ("runs/no",)),
    Mistake("resume with another rate", "train --resume run-001 --training.lr 1", ("lr",)),
    Mistake("evaluate no run", "eval runs/tiny-999", ("runs/tiny-999",)),
    Mistake("unfinished run", "eval run-001", ("no trained model",)),
    Mistake("report of no run", "report runs/no", ("runs/no",)),
)


def write_files(folder: Path) -> None:
    """Write the files that mistakes are made with."""
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        start, rest = (content.encode(), 0) if isinstance(content, str) else content
        with file.open("wb") as opened:
            opened.write(start)
            opened.truncate(len(start) + rest)  # sparse


def main() -> None:
    """Print a table of mistakes, with the seconds that each answer takes in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mistakes with this text in their name")
    parser.add_argument("--smoke", action="store_true", help="the first three alone")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_files(folder)
    print(f"| {'mistake':<26} | seconds | answer |\n|---|---|---|")
    chosen = [mistake for mistake in MISTAKES if asked.only in mistake.name]
    for mistake in chosen[: 3 if asked.smoke else None]:
        began_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "stretto", *mistake.arguments.split()],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **mistake.environment},
            stdin=subprocess.DEVNULL,
            check=False,
        )
        seconds = time.perf_counter() - began_s
        said = (done.stderr or done.stdout).strip().split("\n")
        line = next((s for s in said if "stretto: error:" in s), said[0])
        print(f"| {mistake.name:<26} | {seconds:7.2f} | {line[:160]} |", flush=True)


if __name__ == "__main__":
    main()
