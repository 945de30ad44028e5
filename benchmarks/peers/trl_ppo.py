"""Step time of TRL's PPOTrainer on the CPU (trl 1.12, the last release that has it).

One step: prompts (by default 16 GSM8K questions under the model's chat template) are sampled to
exactly 64 tokens each (no stop token), scored by the reference, value and reward models, and
trained on for one PPO epoch of one mini-batch with AdamW. Policy and reference are the given model;
value and reward model are the same one with a random scalar head. There is no evaluation, no
checkpoint and no gradient checkpointing.

Precision: all four models are loaded with dtype=torch.bfloat16 (--dtype float32 for the other).
`bf16=True` in the config would change nothing: this trainer builds its own Accelerator without it,
so that weights loaded as fp32 are computed in fp32.
A backward pass takes 4 samples: no slower than all 16 at once, and about half the memory.

step_s is the wall time from the end of a step to the end of the next; the first holds the warm-up,
so that samples_per_s is over the median of the others. phase_s has the medians, also without the
first step, of the trainer's parts, with "other" for what is left of the step. Run it in the
environment that setup.sh makes:

    .peers/trl/bin/python benchmarks/peers/trl_ppo.py --model DIR --data gsm8k_train.jsonl
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))
from _shared import leave_out, parse

try:
    import_module("trl")  # before those that take seconds

    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
except ImportError as error:
    leave_out(error, "benchmarks/peers/setup.sh FOLDER trl makes the environment for this")

SMOKE = {"steps": 2, "prompts_per_step": 2, "micro_batch": 1, "response_tokens": 4}


class StepTimer(TrainerCallback):
    """Wall time of each step, and of the wrapped calls in it."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.current: defaultdict[str, float] = defaultdict(float)
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        step = now - self.last
        self.step_s.append(step)
        self.phases.append({**self.current, "other": step - sum(self.current.values())})
        self.current.clear()
        self.last = now

    def wrap(self, owner: Any, attribute: str, phase: Callable[[], str]) -> None:
        """Make `owner.attribute` add its time to `phase()` of the current step."""
        function = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.current[phase()] += time.perf_counter() - start

        setattr(owner, attribute, timed)


def load_prompts(path: Path, tokenizer: Any) -> Dataset:
    """The token ids of every question of a JSON-lines file under the chat template."""
    questions = [json.loads(line)["question"] for line in path.read_text().splitlines()]
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return Dataset.from_dict({"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a causal LM in HF format")
    parser.add_argument("--data", required=True, type=Path, help="JSON lines with a question each")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4, help="samples a backward pass")
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    args = parse(parser, SMOKE, model="model", data="data")
    if args.prompts_per_step % args.micro_batch:
        parser.error("--prompts-per-step must be a multiple of --micro-batch")
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is a warm-up")
    return args


def build_trainer(args: argparse.Namespace, timer: StepTimer, output_dir: str) -> PPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        # The trainer masks every pad token, which would take the chat's turn ends with it.
        tokenizer.pad_token = tokenizer.unk_token
    dtype = getattr(torch, args.dtype)

    def causal() -> Any:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)

    def scalar(seed: int) -> Any:
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=1, dtype=dtype
        )

    config = PPOConfig(
        output_dir=output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts_per_step // args.micro_batch,
        total_episodes=args.steps * args.prompts_per_step,
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=args.response_tokens,
        temperature=args.temperature,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=causal(),
        ref_model=causal(),
        reward_model=scalar(args.seed + 1),
        value_model=scalar(args.seed + 2),
        train_dataset=load_prompts(args.data, tokenizer),
        callbacks=[timer],
    )


def add_phases(timer: StepTimer, trainer: PPOTrainer) -> None:
    def forward_phase() -> str:
        return "train forward" if torch.is_grad_enabled() else "reference scoring"

    timer.wrap(ppo_trainer, "batch_generation", lambda: "generation")
    timer.wrap(ppo_trainer, "forward", forward_phase)
    timer.wrap(ppo_trainer, "get_reward", lambda: "value and reward scoring")
    timer.wrap(trainer.accelerator, "backward", lambda: "backward")
    timer.wrap(trainer.optimizer, "step", lambda: "optimizer")


def main() -> None:
    args = parse_args()
    timer = StepTimer()
    # The trainer prints its progress; stdout is for the result.
    with tempfile.TemporaryDirectory() as output_dir, redirect_stdout(sys.stderr):
        trainer = build_trainer(args, timer, output_dir)
        add_phases(timer, trainer)
        trainer.train()
    later = timer.phases[1:]
    result = {
        "name": "trl-1.12 PPOTrainer",
        "step_s": timer.step_s,
        "samples_per_s": args.prompts_per_step / statistics.median(timer.step_s[1:]),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phase_s": {key: statistics.median(phase[key] for phase in later) for key in later[0]},
        "settings": {
            k: v for k, v in vars(args).items() if k not in ("model", "data", "out", "smoke")
        },
        "threads": torch.get_num_threads(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "accelerate", "trl")
        },
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
