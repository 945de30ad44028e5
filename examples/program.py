"""A program that asks the policy for a sum, and lets it try again: its own loop, its own reward.

Shows: run(data, base_url, api_key), which examples/program.toml trains on; any agent program fits.
Needs: openai (pip install openai), and what examples/program.toml needs.
Run:   stretto train examples/program.toml
"""

import re

from openai import AsyncOpenAI

TRIES = 2


async def run(data, base_url, api_key):
    """Return 1 for the right answer at once, half of it for one after a hint, else 0."""
    messages = [{"role": "user", "content": data["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for attempt in range(TRIES):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0]
            if re.findall(r"\d+", said.message.content)[-1:] == [data["answer"]]:
                return 1 / (1 + attempt)
            if said.finish_reason == "length":  # the limit of a turn, which ends the episode
                break
            messages += [said.message, {"role": "user", "content": "That is wrong. Try again."}]
    return 0.0
