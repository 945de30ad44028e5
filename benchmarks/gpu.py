"""What only a GPU can show: first whether it is right, in order of risk, then how fast it is.

    python benchmarks/gpu.py                          # all parts, at most ten minutes each
    python benchmarks/gpu.py --parts graphs decode    # some of them

Weights are random, of Qwen2.5's shapes, and nothing is fetched. Each part has a process of its own,
as a fault in one kernel ends all CUDA work of a process; the others go on. The rows of all parts
are written to one Markdown file as they come.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from safetensors.torch import load_file

import ppo_step
from _shared import parse
from stretto import api
from stretto.cli import contracts
from stretto.config import PRESETS, Config, RolloutConfig
from stretto.errors import first_line, is_installed
from stretto.models.shapes import known_config
from stretto.models.tiny import byte_tokenizer
from stretto.observe.progress import NoProgress
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.scoring.models import reference_scorer

LIMIT_S = 600.0
PRELOADED = ["torch.distributed", "transformers.modeling_utils", "stretto.runtime.run"]
TINY = {**contracts.SMALL, "tie_word_embeddings": True}
SMOKE = {
    "sizes": ["tiny"],
    "rows": [2],
    "prompt_tokens": 8,
    "new_tokens": 8,
    "batch": 4,
    "steps": 2,
}


class Row(NamedTuple):
    """A line of the table: ``result`` is ok, FAILED, or left out."""

    what: str
    result: str
    figure: str


@dataclass(frozen=True, slots=True)
class Bench:
    """The command line, the device, and a folder for what runs leave."""

    args: argparse.Namespace
    device: torch.device
    folder: Path

    def shape(self, size: str) -> Mapping[str, Any]:
        """The shape of Qwen2.5 of a size such as "0.5"."""
        config = TINY if size == "tiny" else known_config(f"Qwen/Qwen2.5-{size}B-Instruct")
        assert config is not None
        return {name: value for name, value in config.items() if name != "model_type"}

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def model(self, size: str) -> torch.nn.Module:
        return contracts.random_model(self.shape(size), self.device, self.dtype)

    @property
    def smallest(self) -> str:
        return str(self.args.sizes[0])

    def engine(self, model: torch.nn.Module, rows: int, **options: Any) -> TorchEngine:
        a = self.args
        config = RolloutConfig(batch=rows, max_new_tokens=a.new_tokens, **options)
        longest = a.prompt_tokens + a.new_tokens
        return TorchEngine(model, EngineSettings(rollout=config, longest=longest))

    def rollouts(self, rows: int, size: str) -> list[Any]:
        tokens, vocabulary = self.args.prompt_tokens, self.shape(size)["vocab_size"]
        return contracts.random_rollouts(rows, vocabulary, tokens, tokens)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        self.wait()
        start_s = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start_s

    def config(self, **sections: Any) -> Config:
        """A run of PPO with the smallest model, whose files are written once."""
        source = self.folder / "model"
        if not source.exists():
            self.model(self.smallest).save_pretrained(source)  # type: ignore[operator]
            byte_tokenizer().save_pretrained(source)
        a = self.args
        given = {
            "steps": a.steps,
            "out": str(self.folder / "runs"),
            "model": {"name": str(source), "device": self.device.type},
            "task": {"name": "spell_backward", "size": 200},
            "rollout": {"engine": "torch", "batch": a.batch, "max_new_tokens": a.new_tokens},
            "training": {"microbatch_tokens": a.microbatch_tokens},
            "reward": {"missing_eos": "off"},
            "observe": {"checkpoint_minutes": 0},
        }
        for name, section in sections.items():
            both = isinstance(section, dict) and isinstance(given.get(name), dict)
            given[name] = {**given[name], **section} if both else section
        return Config.model_validate(given)

    def trained(self, config: Config) -> tuple[dict[str, torch.Tensor], dict[str, float], Path]:
        """The weights after a run, the metrics of its last step, and its folder."""
        run = api.train(config, progress=NoProgress()).model.parent
        lines = (run / "metrics.jsonl").read_text().splitlines()
        files = (run / "model").glob("*.safetensors")
        return {n: t for f in files for n, t in load_file(f).items()}, json.loads(lines[-1]), run


def attempt(what: str, measure: Callable[[], str]) -> Row:
    """What was measured, or why that failed; the part goes on."""
    try:
        return Row(what, "ok", measure())
    except Exception as error:
        return Row(what, "FAILED", f"{type(error).__name__}: {first_line(error)}")


def largest_gap(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    gap = max((one[n].float() - other[n].float()).abs().max().item() for n in one)
    return "the same weights, bit for bit" if gap == 0 else f"weights differ by {gap:.2g} at most"


# -- is it right? --------------------------------------------------------------------------------


def kept_contracts(bench: Bench) -> Iterator[Row]:
    for name, kept, text in contracts.checked(bench.device):
        yield Row(f"contract: {name}", "ok" if kept else "FAILED", text)


def graphs(bench: Bench) -> Iterator[Row]:
    """Also captured while another thread allocates and waits on the same GPU."""
    model, rows, size = bench.model(bench.smallest), bench.args.rows[-1], bench.smallest

    def made(**options: Any) -> list[Any]:
        engine = bench.engine(model, rows, **options)
        return contracts.decoded(engine, bench.rollouts(rows, size), 16)

    eager = made(engine_args={"cuda_graphs": False})

    def same(busy: bool) -> str:
        done = Event()

        def disturb() -> None:
            while not done.is_set():
                torch.ones(1 << 20, device=bench.device).sum().item()

        thread = Thread(target=disturb)
        if busy:
            thread.start()
        try:
            graphed = made()
        finally:
            done.set()
            if busy:
                thread.join()
        pairs = list(zip(graphed, eager, strict=True))
        equal = sum(a == b for x, y in pairs for a, b in zip(x.tokens, y.tokens, strict=True))
        gap = max(abs(a[0] - b[0]) for a, b in ((x.logprobs, y.logprobs) for x, y in pairs))
        of_all = sum(len(r) for r in eager)
        return f"{equal / of_all:.1%} of tokens as eager; first log-probs differ by {gap:.2g} nats"

    yield attempt("CUDA graphs against eager", partial(same, False))
    yield attempt("the same, captured beside a busy thread", partial(same, True))


def learner(bench: Bench) -> Iterator[Row]:
    for size in bench.args.sizes[:2]:
        model, rows = bench.model(size), bench.args.rows[0]

        def gap(model: Any = model, rows: int = rows, size: str = size) -> str:
            engine = bench.engine(model, rows)
            made = contracts.decoded(engine, bench.rollouts(rows, size), 16)
            return f"{contracts.logprob_gap(model, made):.2g} nats (root mean square)"

        yield attempt(f"engine against learner, {size}B, {bench.dtype}", gap)
        del model


def streams(bench: Bench) -> Iterator[Row]:
    """Roles as threads of one process, which share the GPU and its default stream."""
    for preset in PRESETS:
        engines = 2 if PRESETS[preset].several_engines else 1

        def run(preset: str = preset, engines: int = engines) -> str:
            schedule, rollout = {"preset": preset}, {"engines": engines}
            _, metrics, _ = bench.trained(bench.config(schedule=schedule, rollout=rollout))
            return f"ends; ratio of the last step {metrics['val/ratio']:.3f}"

        yield attempt(f"inline, {preset}", run)


def processes(bench: Bench, *devices: str, **options: Any) -> dict[str, Any]:
    """Settings of a learner with all that scores in one process, and a generator in another."""
    learner, generator = devices or ("", "")
    return {
        "runtime": "local",
        "cluster": {
            "weight_sync_timeout_s": 120.0,
            "processes": [
                {"roles": ["learner", "reference", "critic"], "device": learner, **options},
                {"roles": ["generator"], "device": generator},
            ],
        },
    }


def offload(bench: Bench) -> Iterator[Row]:
    def same() -> str:
        ends = [
            bench.trained(bench.config(**processes(bench, offload=away)))[0]
            for away in (False, True)
        ]
        return f"with and without: {largest_gap(*ends)}"

    yield attempt("tensors of roles that rest are in the host's memory", same)


def sync(bench: Bench) -> Iterator[Row]:
    kind, gpus = bench.device.type, torch.cuda.device_count()
    places = {"learner and generator on one device": ("cuda:0", "cuda:0")}
    if gpus > 1:
        places["learner and generator on two GPUs"] = ("cuda:0", "cuda:1")
    for what, devices in places.items() if kind == "cuda" else [("gloo, on the CPU", ())]:

        def synced(devices: tuple[str, ...] = tuple(devices)) -> str:
            _, metrics, _ = bench.trained(bench.config(**processes(bench, *devices)))
            seconds, mb = (metrics[f"weight_sync/actor_{unit}"] for unit in ("s", "mb"))
            gap = metrics["weight_sync/logprob_gap"]
            return f"{mb:.0f} MB in {seconds:.2f} s; probe differs by {gap:.2g} nats"

        yield attempt(f"weight sync, {what}", synced)
    if kind == "cuda" and gpus < 2:
        yield Row("weight sync, NCCL", "left out", "one GPU")


def vllm(bench: Bench) -> Iterator[Row]:
    if not is_installed("vllm") or bench.device.type == "cpu":
        yield Row("vLLM generates", "left out", "vLLM is not installed, or there is no GPU")
        return
    devices = ("cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}")
    for sleep in (False, True):

        def run(sleep: bool = sleep) -> str:
            options = {"gpu_memory_utilization": 0.4, "enable_sleep_mode": sleep}
            rollout = {"engine": "vllm", "engine_args": options}
            _, metrics, _ = bench.trained(
                bench.config(rollout=rollout, **processes(bench, *devices))
            )
            return f"probe differs by {metrics['weight_sync/logprob_gap']:.2g} nats"

        yield attempt("vLLM loads weights" + (" and sleeps" if sleep else ""), run)


def resume(bench: Bench) -> Iterator[Row]:
    def again() -> str:
        every = {"observe": {"checkpoint_every": 1}}
        steps = 2 * bench.args.steps
        straight, _, _ = bench.trained(bench.config(**every, steps=steps))
        _, _, run = bench.trained(bench.config(**every))
        api.resume(run, progress=NoProgress(), steps=steps)
        files = (run / "model").glob("*.safetensors")
        resumed = {n: t for f in files for n, t in load_file(f).items()}
        return f"resumed half-way and straight: {largest_gap(straight, resumed)}"

    yield attempt("a run that is resumed", again)


# -- how fast is it? -----------------------------------------------------------------------------


def bandwidth(bench: Bench) -> float:
    """Bytes a second that are read and written by a copy within the device's memory."""
    source = torch.ones((1 << 24) if bench.args.smoke else (1 << 30), dtype=torch.uint8)
    source = source.to(bench.device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / min(bench.seconds(lambda: target.copy_(source)) for _ in range(4))


def decode(bench: Bench) -> Iterator[Row]:
    """The limit: all weights, and the keys and values so far, are read once for each token."""
    rate, a = bandwidth(bench), bench.args
    yield Row("memory bandwidth, measured by a copy", "ok", f"{rate / 1e9:,.0f} GB/s")
    for size in a.sizes:
        model: Any = bench.model(size)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        for rows in a.rows:

            def ours(
                model: Any = model, rows: int = rows, size: str = size, weights: int = weights
            ) -> str:
                engine, made = bench.engine(model, rows), bench.rollouts(rows, size)
                contracts.decoded(engine, made, a.new_tokens)  # a rehearsal, which captures
                made = bench.rollouts(rows, size)
                seconds = bench.seconds(lambda: contracts.decoded(engine, made, a.new_tokens))
                cache = rows * (a.prompt_tokens + a.new_tokens / 2) * engine.kv_bytes_per_token
                limit = rows * rate / (weights + cache)
                found = rows * a.new_tokens / seconds
                return f"{found:,.0f} tokens/s, {found / limit:.0%} of the bandwidth's limit"

            def theirs(model: Any = model, rows: int = rows, size: str = size) -> str:
                prompts = [r.prompt.tokens for r in bench.rollouts(rows, size)]
                ids = torch.tensor(prompts, device=bench.device)
                more = {"max_new_tokens": a.new_tokens, "min_new_tokens": a.new_tokens}
                call = partial(
                    model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=True, **more
                )
                with torch.inference_mode():
                    bench.seconds(call)
                    seconds = bench.seconds(call)
                return f"{rows * a.new_tokens / seconds:,.0f} tokens/s"

            yield attempt(f"decode, {size}B, {rows} rows: Stretto", ours)
            yield attempt(f"decode, {size}B, {rows} rows: transformers", theirs)
        del model


def ppo(bench: Bench) -> Iterator[Row]:
    """The first step is a rehearsal."""
    variants: dict[str, dict[str, Any]] = {
        preset: {"schedule": {"preset": preset}}
        for preset in PRESETS
        if not PRESETS[preset].several_engines
    }
    variants["sync, without CUDA graphs"] = {"rollout": {"engine_args": {"cuda_graphs": False}}}
    variants["sync, recomputing"] = {"model": {"gradient_checkpointing": True}}
    variants["sync, LoRA"] = {"model": {"lora_rank": 16}}
    if bench.device.type == "cuda" and is_installed("liger_kernel"):
        variants["sync, Liger's kernels"] = {"model": {"use_liger_kernel": True}}
    if bench.device.type == "cuda" and is_installed("bitsandbytes"):
        variants["sync, moments in 8 bits"] = {"training": {"optim": "adamw_8bit"}}
        variants["sync, paged moments"] = {"training": {"optim": "paged_adamw_32bit"}}
    for what, sections in variants.items():

        def step(sections: dict[str, Any] = sections) -> str:
            steps_s, phases = ppo_step.timed(bench.config(**sections))
            spans = sorted(phases[-1].items())
            parts = ", ".join(f"{n} {s:.2f}" for n, s in spans if not n.startswith("driver"))
            return f"{steps_s[-1]:.2f} s ({parts})"

        yield attempt(f"PPO step, {what}", step)


def overlap(bench: Bench) -> Iterator[Row]:
    size, rows = bench.smallest, bench.args.rows[-1]
    model = bench.model(size)
    engine = bench.engine(model, rows)
    scorer = reference_scorer(bench.model(size), 1.0, 8192)
    scored = contracts.decoded(engine, bench.rollouts(rows, size), 64)

    def generate() -> None:
        contracts.decoded(engine, bench.rollouts(rows, size), 64)

    def score() -> None:
        scorer.admit([r.response() for r in scored])
        scorer.finish([r.id for r in scored])

    def both() -> None:
        thread = Thread(target=score)
        thread.start()
        generate()
        thread.join()

    def measured() -> str:
        score()
        alone = bench.seconds(generate), bench.seconds(score)
        together = bench.seconds(both)
        hidden = (sum(alone) - together) / min(alone)
        return (
            f"decode {alone[0]:.3f} s, prefill {alone[1]:.3f} s, both at once {together:.3f} s: "
            f"{hidden:.0%} of the shorter is hidden"
        )

    yield attempt("decode beside prefill", measured)


PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "contracts": kept_contracts,
    "graphs": graphs,
    "learner": learner,
    "streams": streams,
    "offload": offload,
    "sync": sync,
    "vllm": vllm,
    "resume": resume,
    "decode": decode,
    "ppo": ppo,
    "overlap": overlap,
}


# -- the command ---------------------------------------------------------------------------------


def work(part: str, args: argparse.Namespace, rows: Path) -> None:
    """Do a part, and add its rows to a file as they come; in a process of its own."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, rows.open("a") as out:

        def add(row: Row) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{part}: {row.what}: {row.result}: {row.figure}", flush=True)

        try:
            for row in PARTS[part](Bench(args, device, Path(folder))):
                add(row)
        except Exception as error:
            add(Row("the rest", "FAILED", f"{type(error).__name__}: {first_line(error)}"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        kind = "the process's memory"
        if gpu:
            peak, kind = torch.cuda.max_memory_allocated(device), "memory on the GPU"
        add(Row(f"peak of {kind}", "", f"{peak / 1e9:.2f} GB"))


def run(part: str, args: argparse.Namespace, rows: Path) -> list[Row]:
    """Have a process do a part within its time; the rows that it has left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=work, args=(part, args, rows))
    process.start()
    process.join(args.limit_s)
    late = process.is_alive()
    process.kill()
    process.join()
    found = [Row(*json.loads(line)) for line in rows.read_text().splitlines()]
    if late:
        found.append(Row("the rest", "FAILED", f"not done after {args.limit_s:.0f} s"))
    elif process.exitcode:
        found.append(Row("the rest", "FAILED", f"exit status {process.exitcode}"))
    return found


def machine() -> str:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}" if names else "no GPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", default=["0.5", "1.5", "7"], help="of Qwen2.5, in B")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64], help="decoded at a time")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="responses of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a part")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file; gpu.md by default")
    args = parse(parser, SMOKE)
    if not torch.cuda.device_count() and not args.smoke:
        print("torch sees no GPU; --smoke runs tiny shapes on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch if args.smoke else ".") / "gpu.md"
        lines = [
            f"# {machine()}, torch {torch.__version__}",
            "",
            f"    python benchmarks/gpu.py {' '.join(sys.argv[1:])}",
            "",
            "| part | what | result | figure |",
            "|---|---|---|---|",
        ]
        failed = 0
        for part in args.parts:
            rows = Path(scratch) / f"{part}.jsonl"
            rows.touch()
            found = run(part, args, rows)
            failed += sum(row.result == "FAILED" for row in found)
            lines += [f"| {part} | {' | '.join(row)} |" for row in found]
            out.write_text("\n".join(lines) + "\n")
        print(out.read_text() if args.smoke else f"{out}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
