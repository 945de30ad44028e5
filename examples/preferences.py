"""From preferences to an aligned model: a reward model of pairs, then reinforcement learning on it.

Shows: pairs with 'chosen' and 'rejected', the reward model's accuracy on pairs left out, RLOO on
it, answers before and after.
Needs: nothing but Stretto; SmolLM2-135M comes out of a Python package (93 MB).
Run:   python examples/preferences.py           some minutes on two cores (--smoke: seconds)
"""

import json
import sys
from pathlib import Path

import stretto

SMOKE = "--smoke" in sys.argv
MODEL = {"name": "tiny" if SMOKE else "smollm2-135m"}
PAIRS = Path(__file__).with_name("pairs.jsonl")  # few words preferred to many
ASKED = ["What is the opposite of slow?", "What is the opposite of rough?"]

learned = stretto.train_reward_model(
    stretto.RewardModelConfig(),
    model=MODEL,
    data={"name": str(PAIRS), "held_out": 0.25},
    batch=6,
    training={"lr": 3e-5, "epochs": 1 if SMOKE else 2},
)
print(f"accuracy on pairs left out: {learned.held_out.accuracy:.2f}")

prompts = [{"prompt": json.loads(line)["prompt"]} for line in PAIRS.open()]
result = stretto.train(
    stretto.Config(steps=2 if SMOKE else 12),
    model=MODEL,
    dataset=prompts,
    reward={"sources": [f"model:{learned.model}"], "missing_eos_penalty": -3.0},
    algorithm={"name": "rloo", "kl_coef": 0.02},
    rollout={"batch": 16, "samples_per_prompt": 4, "max_new_tokens": 24},
    training={"lr": 1e-5},
)
for name, model in (("before", MODEL["name"]), ("after", result.model)):
    print(name, stretto.generate(model, ASKED, max_new_tokens=24))
