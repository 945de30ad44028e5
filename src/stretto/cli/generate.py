"""``stretto generate`` and ``chat``: let a model answer prompts, or talk to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from stretto import files, tasks
from stretto.api.inference import answers, generate
from stretto.cli.parsing import File, takes
from stretto.config import RolloutConfig, TaskConfig, recipes
from stretto.config.sections import NonNegativeInt, PositiveInt, Rows
from stretto.errors import ConfigError, EngineError, TaskError
from stretto.models.resolve import is_known, resolve
from stretto.observe.progress import on_stderr
from stretto.saying import LOADING, silent, working
from stretto.schedules.episode_metrics import calls
from stretto.signals import Terminated
from stretto.tasks import TaskRow

if TYPE_CHECKING:
    from stretto.api.policies import Conversation, Policy
    from stretto.evaluation.generation import Answer


_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p")


@takes(generate, *_SAMPLING, "stop", "seed", "system", "chat", "template_arguments")
@takes(generate, "dtype", "device")
def command_generate(
    prompt: Annotated[tuple[str, ...], arg(metavar="PROMPT")] = (),
    /,
    model: str = "smollm2-135m",
    prompts: File = "",
    prompt_column: str = "prompt",
    out: File = "",
    json: bool = False,
    samples: Rows = 1,
    tools: Annotated[Sequence[str], arg(metavar="FILE.py:NAME")] = (),
    max_turns: PositiveInt = 8,
    **options: Any,
) -> None:
    """Let a model answer prompts from arguments, a file, or the lines of standard input.

    Args:
        prompt: A prompt; may be repeated.
        model: A known name, a local folder in Hugging Face format, a hub name, or a run's folder.
        prompts: File with prompts: the lines of a .txt file, or the rows of a file that training
            reads, for example .jsonl or .parquet.
        prompt_column: Column of that file's rows with the prompt: text, or a list of chat messages.
        out: Write answers to this file as JSON Lines, instead of to standard output.
        json: Print a JSON object per answer, one a line: prompt, response, finish_reason ('stop' or
            'length'), tokens, and the numbers of prompt and sample.
        samples: Answers to each prompt.
        tools: A function that the model may call, as 'file.py:name' or 'package.module:name', with
            type hints and a docstring; may be repeated. Or one environment. Each answer is then an
            episode, whose turns, calls and results are printed.
        max_turns: Limit of turns in an episode.
    """
    if out and prompts and Path(out).resolve() == Path(prompts).resolve():
        raise ConfigError(f"--out would overwrite --prompts, '{prompts}'", "cannot-write")
    rows = _prompts(prompt, prompts, prompt_column)

    def line(answer: Answer) -> str:
        number, sample = divmod(answer.number, samples)
        if json or out:
            return _record(rows[number], number, sample, answer)
        of = f".{sample + 1}" if samples > 1 else ""
        text = answer.episode.told() if answer.episode else answer.text
        return text if len(rows) * samples == 1 else f"[{number + 1}{of}] {text}"

    if tools and options["chat"] == "off":
        raise ConfigError(
            "tools answer in messages, for which --chat off has no form; leave that out",
            "tools-without-chat",
        )
    environment = {"sources": tools, "max_turns": max_turns} if tools else None
    _write(
        map(line, answers(model, rows, samples=samples, environment=environment, **options)), out
    )


def _prompts(given: Sequence[str], file: str, column: str) -> list[TaskRow]:
    if given and file:
        raise ConfigError("there are prompts and --prompts; give one of them", "two-prompt-sources")
    if file and not file.endswith(".txt"):
        task = tasks.load(TaskConfig(kind="dataset", name=file, columns={"prompt": column}), 0)
        if task.left_out:
            print(f"{task.left_out} rows left out; {task.left_out_because}", file=sys.stderr)
        return [task.row(i) for i in task.indices]
    lines: Iterable[str] = given
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").split("\n")  # as standard input
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read '{file}': {error}", "unreadable-prompts") from error
    elif not given and not sys.stdin.isatty():
        lines = sys.stdin
    rows = [TaskRow(line.rstrip("\n")) for line in lines if given or line.strip()]
    if not rows:
        raise ConfigError(
            "there is no prompt; give one, lines on standard input, or a file with --prompts",
            "no-prompt",
        )
    return rows


def _record(row: TaskRow, number: int, sample: int, answer: Answer) -> str:
    prompt = row.prompt if isinstance(row.prompt, str) else list(row.prompt)
    record: dict[str, Any] = {
        "prompt": prompt,
        "response": answer.text,
        "finish_reason": str(answer.finish),
        "tokens": answer.tokens,
        "index": number,
        "sample": sample,
    }
    if episode := answer.episode:
        record |= {
            "messages": list(episode.messages),
            "calls": [call for o in episode.log for call in calls(o)],
            "turns": sum(len(r.turns) for r in episode.samples),
            "ended_by": episode.log[-1].ended_by,
            "reward": None if episode.failure else episode.reward,
        }
        if episode.failure:
            record["failure"] = episode.failure
    return json.dumps(record, ensure_ascii=False)


def _write(lines: Iterable[str], out: str) -> None:
    """Write lines as they come. An existing file keeps its content until the first one."""
    with files.explained(Path(out)):
        file = Path(out).open("a", encoding="utf-8") if out else nullcontext(sys.stdout)  # noqa: SIM115
    with file as stream:
        for number, line in enumerate(lines):
            if out and not number and stream.seekable():
                stream.truncate(0)
            print(line, file=stream, flush=True)


CHAT_HELP = "/exit leaves, /clear begins anew, /system TEXT sets the system message"


def check_model(name: str) -> None:
    """Raise an error for a model that cannot exist, before torch is loaded."""
    if not (is_known(name) or Path(name).expanduser().is_dir()):
        resolve(name, silent)


@takes(generate, *_SAMPLING[1:], "seed", "template_arguments", "device")
def command_chat(
    model: Annotated[str, arg(metavar="MODEL_OR_RUN")],
    /,
    system: str = "",
    max_new_tokens: PositiveInt = 512,
    max_model_len: NonNegativeInt = 0,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    **options: Any,
) -> None:
    """Talk to a model. Its answers appear as they are generated. /exit or Ctrl-D leaves, /clear
    starts again, /system TEXT sets the system message, and Ctrl-C stops an answer. Uses the model's
    chat template; a model without one continues the text so far. Without a terminal, each line of
    standard input is a turn.

    Args:
        model: A known name, a local folder in Hugging Face format, a hub name, or a run's folder
            (the newest checkpoint during training, then the trained model).
        system: A system message. Needs a chat template.
        max_new_tokens: Token limit of an answer.
        max_model_len: Tokens of prompt and answer. 0: 4096, or the model's positions if fewer.
        dtype: Type to compute in. auto: a run's own, else bfloat16 if the hardware is faster with
            it, else float32.
    """
    limits = {"batch": 1, "max_new_tokens": max_new_tokens}
    sampling = {name: options[name] for name in _SAMPLING[1:]}
    rollout = recipes.build(limits | sampling, "", RolloutConfig)
    check_model(model)
    with working(on_stderr, LOADING):
        from stretto.api.policies import Conversation, open_policy
    policy = open_policy(
        model,
        rollout,
        dtype=dtype,
        device=options["device"],
        max_model_len=max_model_len,
        seed=options["seed"],
        template_arguments=options["template_arguments"],
    )
    _talk(policy, Conversation(policy, rollout, options["seed"], system))


def _talk(policy: Policy, talk: Conversation) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # input() uses it for line editing

        of = f", step {policy.step}" if policy.run else ""
        print(f"{policy.name}{of}. {CHAT_HELP}; Ctrl-C stops an answer.")
        if not policy.tokenizer.chat_template:
            print("It has no chat template, and goes on with the text so far.")
    for line in _lines(interactive):
        command, _, rest = line.strip().partition(" ")
        try:
            if command == "/exit":
                return
            if command == "/clear":
                talk.clear()
            elif command == "/system":
                talk.set_system(rest.strip())
            elif command.startswith("/"):
                print(f"There is no {command}: {CHAT_HELP}.", file=sys.stderr)
            elif command:
                for piece in talk.answer(line):
                    print(piece, end="", flush=True)
                print(flush=True)
        except (ConfigError, EngineError, TaskError) as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt as stop:
            _unless_terminated(stop)


def _lines(shown: bool) -> Iterator[str]:
    if not shown:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt as stop:
            _unless_terminated(stop)


def _unless_terminated(stop: KeyboardInterrupt) -> None:
    if isinstance(stop, Terminated):
        raise stop
    print(flush=True)
