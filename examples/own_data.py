"""Own rows, own reward function, own model, in Python.

Shows: rows as a list, a function of this script as the reward, a model as an object.
Needs: nothing but Stretto; SmolLM2-135M comes out of a Python package (93 MB).
Run:   python examples/own_data.py              about a minute on two cores (--smoke: seconds)
"""

import sys

import stretto

SMOKE = "--smoke" in sys.argv
OPPOSITES = {"hot": "cold", "big": "small", "early": "late", "light": "dark", "fast": "slow"}
rows = [{"prompt": f"What is the opposite of {w}?", "answer": o} for w, o in OPPOSITES.items()]


def brief(completions, answer):
    """Half a point for the right word, and more for fewer words; columns of the rows come along."""
    return [
        (right in text.lower()) / 2 + 1 / (1 + len(text.split()))
        for text, right in zip(completions, answer, strict=True)
    ]


result = stretto.train(
    stretto.Config(steps=2 if SMOKE else 12),
    model="tiny" if SMOKE else "smollm2-135m",
    dataset=rows,
    reward=brief,
    rollout={"batch": 16, "samples_per_prompt": 4, "max_new_tokens": 24},
    algorithm={"name": "grpo", "kl_coef": 0},  # no critic, no reference
    training={"lr": 2e-5},
)
print("reward of the last step:", result.stats["objective/scores"])
print(stretto.generate(result.model, ["What is the opposite of happy?"], max_new_tokens=24))
