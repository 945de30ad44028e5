"""What only a GPU can show: first whether it is right, in order of risk, then how fast it is.

    python benchmarks/gpu.py                          # all parts, within eight minutes
    python benchmarks/gpu.py --parts graphs decode    # some of them

Weights are random, and nothing is fetched. Tiny models show whether results are right, and
Qwen2.5's shapes how fast they come. Each part has a process of its own, as a fault in one kernel
ends all CUDA work of a process; the others go on. Rows are printed as they come, and written to one
Markdown file. Tracebacks, and the stacks of a part that hangs, go to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from threading import Event, Thread
from typing import Any, NamedTuple

from stretto.models.backend import keep_freed_memory
from stretto.models.layer_shards import Grid

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from safetensors.torch import load_file

import ppo_step
from _shared import parse
from stretto import api
from stretto.assembly.run_models import Overrides
from stretto.config import PRESETS, Config, OptimizerConfig, RolloutConfig
from stretto.errors import first_line, is_installed
from stretto.layout import Layout
from stretto.models.shapes import known_config
from stretto.models.tiny import byte_tokenizer
from stretto.observe.display import Progress
from stretto.planner import fitting
from stretto.planner.measuring import MeasuredModel, WorkSizes, peaks, prefills, swaps, trainings
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.runtime.placement import places
from stretto.scoring.model_scorers import reference_scorer
from stretto.testing import contracts
from stretto.training.sharded import ShardedModel
from stretto.training.trained import LearningRate, TrainedModel

LIMIT_S = 75.0
LONGER = {"ppo": 2}
"""Parts that may take a multiple of the limit of a part."""

MINUTES = 8.0
FEW = 2
"""Steps of runs that show whether results are right."""

LEAST_S = 10.0
"""A part begins only if so much time is left: torch and CUDA take several seconds to start."""

PRELOADED = ["torch.distributed", "transformers.modeling_utils", "stretto.runtime.run"]
TINY = {**contracts.SMALL, "tie_word_embeddings": True}
SMOKE = {
    "limit_s": 600.0,
    "minutes": 60.0,
    "sizes": ["tiny"],
    "rows": [2],
    "prompt_tokens": 8,
    "new_tokens": 8,
    "batch": 4,
    "steps": 3,
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
    size: str = "tiny"  # of the model in runs

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

    @property
    def first_sizes(self) -> list[str]:
        return list(dict.fromkeys(("tiny", self.smallest)))

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
        """A run of PPO with a model of the size, whose files are written once."""
        source = self.folder / "model"
        if not source.exists():
            self.model(self.size).save_pretrained(source)  # type: ignore[operator]
            byte_tokenizer().save_pretrained(source)
        a = self.args
        tokens = min(a.new_tokens, 32) if self.size == "tiny" else a.new_tokens
        given = {
            "steps": a.steps,
            "out": str(self.folder / "runs"),
            "model": {"name": str(source), "device": self.device.type},
            "task": {"name": "spell_backward", "size": 200},
            "rollout": {"engine": "torch", "batch": a.batch, "max_new_tokens": tokens},
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
        run = api.train(config, progress=Progress()).model.parent
        lines = (run / "metrics.jsonl").read_text().splitlines()
        files = (run / "model").glob("*.safetensors")
        return {n: t for f in files for n, t in load_file(f).items()}, json.loads(lines[-1]), run


def attempt(what: str, measure: Callable[[], str]) -> Row:
    """What was measured, or why that failed; the part goes on."""
    try:
        return Row(what, "ok", measure())
    except Exception as error:
        print(f"--- {what}", file=sys.stderr)
        traceback.print_exc()
        return Row(what, "FAILED", f"{type(error).__name__}: {first_line(error)}")
    finally:
        gc.collect()  # before the next one asks for memory


def largest_gap(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    gap = max((one[n].float() - other[n].float()).abs().max().item() for n in one)
    return "the same weights, bit for bit" if gap == 0 else f"weights differ by {gap:.2g} at most"


# -- is it right? --------------------------------------------------------------------------------


def kept_contracts(bench: Bench) -> Iterator[Row]:
    for name, kept, text in contracts.checked(bench.device):
        yield Row(f"contract: {name}", "ok" if kept else "FAILED", text)


def graphs(bench: Bench) -> Iterator[Row]:
    """Also captured while another thread allocates and waits on the same GPU."""
    for size in bench.first_sizes:
        yield from _graphs(bench, size)


def _graphs(bench: Bench, size: str) -> Iterator[Row]:
    model, rows = bench.model(size), bench.args.rows[-1]

    def made(**options: Any) -> list[Any]:
        engine = bench.engine(model, rows, **options)
        found = contracts.decoded(engine, bench.rollouts(rows, size), 16)
        if engine.graphed_steps == 0:
            raise RuntimeError("decode steps were not captured; the log says why")
        return found

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

    yield attempt(f"CUDA graphs against eager, {size}B", partial(same, False))
    yield attempt(f"the same, captured beside a busy thread, {size}B", partial(same, True))


def learner(bench: Bench) -> Iterator[Row]:
    for size in bench.first_sizes:
        model, rows = bench.model(size), bench.args.rows[0]

        def gap(model: Any = model, rows: int = rows, size: str = size) -> str:
            engine = bench.engine(model, rows)
            made = contracts.decoded(engine, bench.rollouts(rows, size), 16)
            return f"{contracts.logprob_gap(model, made):.2g} nats (root mean square)"

        yield attempt(f"engine against learner, {size}B, {bench.dtype}", gap)
        del model


def sharded(bench: Bench) -> Iterator[Row]:
    """FSDP on one rank: its kernels, its types and its collectives, without a second GPU."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if bench.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    rate, config = LearningRate(1e-3, 10), OptimizerConfig()
    ids = torch.arange(48, device=bench.device).view(4, 12)

    def ends(shards: bool) -> dict[str, torch.Tensor]:
        model = bench.model("tiny").requires_grad_(True)
        trained: TrainedModel = TrainedModel(model, rate, config)
        if shards:
            trained.close()
            trained = ShardedModel(model, Grid(bench.device.type, Layout()), rate, config)

        def loss() -> torch.Tensor:
            model: Any = trained.model
            logits: torch.Tensor = model(input_ids=ids).logits
            return logits.float().log_softmax(-1)[..., 7].mean().neg()

        for _ in range(3):
            with trained.training():
                trained.before_pass(last=True)
                trained.compute(loss).backward()
            trained.update()
        return dict(trained.gathered(trained.snapshot()))

    yield attempt("FSDP on one rank against none", lambda: largest_gap(ends(True), ends(False)))
    dist.destroy_process_group()


def streams(bench: Bench) -> Iterator[Row]:
    """Roles as threads of one process, which share the GPU and its default stream."""
    for preset in PRESETS:
        engines = 2 if PRESETS[preset].several_engines else 1

        def run(preset: str = preset, engines: int = engines) -> str:
            schedule, rollout = {"preset": preset}, {"engines": engines}
            config = bench.config(steps=FEW, schedule=schedule, rollout=rollout)
            _, metrics, _ = bench.trained(config)
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


FLOAT32: Mapping[str, Any] = {"model": {"dtype": "float32"}}
"""For rows that compare weights. Kernels may add up in any order: a run that is repeated without a
change gives the yardstick.
"""


def offload(bench: Bench) -> Iterator[Row]:
    def same() -> str:
        one, again, away = (
            bench.trained(bench.config(steps=FEW, **FLOAT32, **processes(bench, offload=offload)))[
                0
            ]
            for offload in (False, False, True)
        )
        return (
            f"with and without: {largest_gap(one, away)}; twice the same: {largest_gap(one, again)}"
        )

    yield attempt("tensors of roles that rest are in the host's memory", same)


def sync(bench: Bench) -> Iterator[Row]:
    kind, gpus = bench.device.type, torch.cuda.device_count()
    places = {"learner and generator on one device": ("cuda:0", "cuda:0")}
    if gpus > 1:
        places["learner and generator on two GPUs"] = ("cuda:0", "cuda:1")
    for what, devices in places.items() if kind == "cuda" else [("gloo, on the CPU", ())]:

        def synced(devices: tuple[str, ...] = tuple(devices)) -> str:
            config = bench.config(steps=FEW, **processes(bench, *devices))
            _, metrics, _ = bench.trained(config)
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
        every = {**FLOAT32, "observe": {"checkpoint_every": 1}}
        steps = 2 * FEW
        straight, same = (bench.trained(bench.config(**every, steps=steps))[0] for _ in range(2))
        _, _, run = bench.trained(bench.config(**every, steps=FEW))
        api.resume(run, progress=Progress(), steps=steps)
        files = (run / "model").glob("*.safetensors")
        resumed = {n: t for f in files for n, t in load_file(f).items()}
        return (
            f"resumed half-way and straight: {largest_gap(straight, resumed)}; "
            f"twice the same: {largest_gap(straight, same)}"
        )

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
                found, step_s = rows * a.new_tokens / seconds, seconds / a.new_tokens
                return (
                    f"{found:,.0f} tokens/s, {found / limit:.0%} of the bandwidth's limit; "
                    f"{1e3 * step_s:.2f} ms a step"
                )

            def theirs(model: Any = model, rows: int = rows, size: str = size) -> str:
                prompts = [r.prompt.tokens for r in bench.rollouts(rows, size)]
                ids, few = torch.tensor(prompts, device=bench.device), min(a.new_tokens, 32)
                more = {"max_new_tokens": few, "min_new_tokens": few}
                call = partial(
                    model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=True, **more
                )
                with torch.inference_mode():
                    bench.seconds(call)  # a rehearsal
                    seconds = bench.seconds(call)
                return f"{rows * few / seconds:,.0f} tokens/s"

            yield attempt(f"decode, {size}B, {rows} rows: Stretto", ours)
            if rows == a.rows[-1]:  # it takes as long with fewer
                yield attempt(f"decode, {size}B, {rows} rows: transformers", theirs)
        del model


def kernels(bench: Bench) -> Iterator[Row]:
    """Where the GPU's time goes in decode steps: kernels by time, and their number."""
    if bench.device.type == "cpu":
        yield Row("kernels", "left out", "no GPU")
        return
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    size, rows, few = bench.smallest, bench.args.rows[-1], 16
    model = bench.model(size)
    engine, made = bench.engine(model, rows), bench.rollouts(rows, size)
    contracts.decoded(engine, bench.rollouts(rows, size), bench.args.new_tokens)
    engine.admit([r.response() for r in made])
    engine.decode(4)
    bench.wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        seconds = bench.seconds(lambda: engine.decode(few))
    found = [e for e in profiler.key_averages() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in found) / 1e6
    yield Row(
        f"a decode step, {size}B, {rows} rows",
        "ok",
        f"{1e3 * seconds / few:.2f} ms, of which kernels {1e3 * busy / few:.2f} ms; "
        f"{sum(e.count for e in found) / few:.0f} kernels",
    )
    for e in found[:14]:
        each = e.self_device_time_total / few
        yield Row(e.key[:60].replace("|", "/"), "ok", f"{each:.0f} us a step, {e.count / few:.1f}")


def rates(bench: Bench) -> Iterator[Row]:
    """Rates that plans are made by: products, copies, prefills, passes, updates, swaps."""
    if bench.device.type == "cpu":
        yield Row("rates", "left out", "no GPU")
        return
    sizes = WorkSizes.of(bench.device)
    name = f"Qwen/Qwen2.5-{bench.smallest}B-Instruct"
    model = MeasuredModel(name, bench.config(), bench.device, bench.dtype)
    points = (
        peaks(bench.device, bench.dtype, sizes),
        prefills(model, sizes),
        trainings(model, sizes),
        swaps(bench.device, sizes),
    )
    for point in chain.from_iterable(points):
        work = f", {point.flops / point.seconds / 1e12:.0f} TFLOP/s" if point.flops else ""
        work += f", {point.size / point.seconds / 1e9:,.0f} GB/s" if point.size else ""
        yield Row(f"{point.kind}: {point.what}", "ok", f"{1e3 * point.seconds:.2f} ms{work}")


def timed(bench: Bench, config: Config, overrides: Overrides) -> str:
    """The median step and its parts, without the first step, which is a rehearsal, and the last,
    in which asynchronous presets decode nothing; on a GPU also its memory, found and planned.
    """
    gpu = bench.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    steps_s, phases = ppo_step.timed(config, overrides)
    counted = phases[1:-1] or phases
    names = sorted({n for found in counted for n in found if not n.startswith("driver")})
    means = {n: fmean(found.get(n, 0.0) for found in counted) for n in names}
    parts = ", ".join(f"{n} {s:.2f}" for n, s in means.items() if s >= 0.005)
    shown = f"{median(steps_s[1:-1] or steps_s):.2f} s ({parts})"
    if not gpu:
        return shown
    found = torch.cuda.max_memory_allocated(bench.device) / 1e9
    loads = fitting.RunMemory(config).planned(places(config, 1, 1), fitting.width(config.model))
    planned = max((load.phase(load.fullest).total() for load in loads), default=0) / 1e9
    return f"{shown}; {found:.1f} GB, planned {planned:.1f} GB"


def ppo(bench: Bench) -> Iterator[Row]:
    bench = replace(bench, size=bench.smallest)
    entries = bench.shape(bench.size)["vocab_size"]
    # Random weights draw nearly evenly. With so many end tokens, lengths are geometric with a mean
    # of a quarter of the limit, so that some responses come late.
    ends = range(max(4 * entries // bench.args.new_tokens, 1))
    tail = {"long tail": ends, "one length": ()}
    variants: dict[str, dict[str, Any]] = {
        preset: {"schedule": {"preset": preset}}
        for preset in PRESETS
        if not PRESETS[preset].several_engines
    }
    eager = {"rollout": {"engine_args": {"cuda_graphs": False}}}
    again = {"model": {"gradient_checkpointing": "on"}}
    cudnn = {"model": {"cudnn_attention": True}}
    work: list[tuple[str, dict[str, Any], str]] = [
        ("sync", {}, "one length"),
        *((what, sections, "long tail") for what, sections in variants.items()),
        ("sync, LoRA", {"model": {"lora_rank": 16}}, "one length"),
        ("sync, recomputing", again, "one length"),
        ("sync, without CUDA graphs", eager, "one length"),
        ("sync, cuDNN's attention", cudnn, "one length"),  # the last, as it stays on
    ]
    if bench.device.type == "cuda" and is_installed("liger_kernel"):
        liger = {"model": {"use_liger_kernel": True}}
        work.insert(1, ("sync, Liger's kernels", liger, "one length"))
    for what, sections, lengths in work:
        overrides = Overrides(end_tokens=frozenset(tail[lengths]))
        yield attempt(
            f"{what}, {lengths}", partial(timed, bench, bench.config(**sections), overrides)
        )


def large(bench: Bench) -> Iterator[Row]:
    """The largest model with adapters, as an object: its files would take minutes."""
    size = str(bench.args.sizes[-1])
    bench = replace(bench, size=bench.smallest)  # for the settings and the tokenizer

    def step() -> str:
        model = bench.model(size)
        given = Overrides(actor=model, tokenizer=byte_tokenizer(), end_tokens=frozenset())
        return timed(bench, bench.config(model={"lora_rank": 16}), given)

    yield attempt(f"PPO step, {size}B, LoRA", step)


def peer(bench: Bench) -> Iterator[Row]:
    """TRL's PPO with the same model, prompts of another task, and as many tokens."""
    if not is_installed("trl"):
        yield Row("TRL's PPO", "left out", "TRL is not installed")
        return
    bench, a = replace(bench, size=bench.smallest), bench.args
    program = Path(__file__).parent / "peers/trl_ppo.py"
    rows = bench.folder / "questions.jsonl"
    row = json.dumps({"question": "x" * max(a.prompt_tokens - 8, 1)})
    rows.write_text(f"{row}\n" * a.batch * a.steps)
    options = {
        "--model": bench.config().model.name,
        "--data": rows,
        "--steps": max(a.steps, 2),
        "--prompts-per-step": a.batch,
        "--micro-batch": min(a.batch, 8),
        "--response-tokens": a.new_tokens,
        "--dtype": str(bench.dtype).removeprefix("torch."),
    }
    words = [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(
        [sys.executable, str(program), *words], stdout=subprocess.PIPE, text=True, check=False
    )

    def shown() -> str:
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}; the log says why")
        steps_s = json.loads(done.stdout.splitlines()[-1])["step_s"]
        return f"{median(steps_s[1:]):.2f} s"

    yield attempt("TRL's PPO step, one length", shown)


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
    "decode": decode,
    "ppo": ppo,
    "kernels": kernels,
    "sync": sync,
    "offload": offload,
    "rates": rates,
    "sharded": sharded,
    "large": large,
    "peer": peer,
    "resume": resume,
    "overlap": overlap,
    "vllm": vllm,
}
"""In the order of risk and of use, as the last ones are left out if time runs out."""


def hang(bench: Bench) -> Iterator[Row]:
    """Shows that the limits are kept, and where the stack of a part that hangs is printed."""
    yield Row("a part that never ends", "ok", "")
    Event().wait()


ALL = {**PARTS, "hang": hang}


# -- the command ---------------------------------------------------------------------------------


def work(part: str, args: argparse.Namespace, rows: Path) -> None:
    """Do a part, and add its rows to a file as they come; in a process of its own."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    # The stacks of a part that hangs, just before it is killed.
    faulthandler.dump_traceback_later(max(args.limit_s - 3, 1), file=2)
    with tempfile.TemporaryDirectory() as folder, rows.open("a") as out:

        def add(row: Row) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{part}: {row.what}: {row.result}: {row.figure}", flush=True)

        try:
            for row in ALL[part](Bench(args, device, Path(folder))):
                add(row)
        except Exception as error:
            traceback.print_exc()
            add(Row("the rest", "FAILED", f"{type(error).__name__}: {first_line(error)}"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        kind = "the process's memory"
        if gpu:
            peak, kind = torch.cuda.max_memory_allocated(device), "memory on the GPU"
        add(Row(f"peak of {kind}", "", f"{peak / 1e9:.2f} GB"))


def run(part: str, args: argparse.Namespace, rows: Path, limit_s: float) -> list[Row]:
    """Have a process do a part within its time; the rows that it has left."""
    args = argparse.Namespace(**{**vars(args), "limit_s": limit_s})
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
    parser.add_argument("--parts", nargs="+", choices=ALL, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", default=["0.5", "7"], help="of Qwen2.5, in B")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64], help="decoded at a time")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="responses of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a part")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file; gpu.md by default")
    args = parse(parser, SMOKE)
    until_s = time.monotonic() + 60 * args.minutes
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
            left_s = until_s - time.monotonic()
            if left_s < LEAST_S:
                found = [Row("all of it", "left out", "no time is left")]
            else:
                rows = Path(scratch) / f"{part}.jsonl"
                rows.touch()
                limit_s = min(LONGER.get(part, 1) * args.limit_s, left_s)
                found = run(part, args, rows, limit_s)
            failed += sum(row.result == "FAILED" for row in found)
            lines += [f"| {part} | {' | '.join(row)} |" for row in found]
            out.write_text("\n".join(lines) + "\n")
        print(out.read_text() if args.smoke else f"{out}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
