"""Programs that run in a process of their own."""

import os
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI

QUESTION: Any = [{"role": "user", "content": "q"}]


async def run(data, base_url, api_key, http_client):
    """Do what the row says."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    answer = await client.chat.completions.create(model="any", messages=QUESTION)
    if data["answer"] == "raise":
        raise LookupError("no such page")
    if data["answer"] == "die":
        os._exit(3)
    if data["answer"] == "block":
        time.sleep(60)
    if data["answer"] == "refused":
        await client.chat.completions.create(model="any", messages=QUESTION, n=2)
    print("not an answer")
    return {"reward": 1.5, "said": answer.choices[0].message.content}


class Blocking:
    """A program without coroutines, in AReaL's shape."""

    def run(self, data, **extra):
        """Ask once."""
        client = OpenAI(base_url=extra["base_url"], api_key=extra["api_key"], max_retries=0)
        return len(client.chat.completions.create(model="any", messages=QUESTION).choices)
