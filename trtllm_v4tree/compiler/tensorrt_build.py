"""From a checkpoint to the files of a TensorRT engine: typed networks with plugin nodes, a plan each, and the commit kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from trtllm_v4tree import contract
from trtllm_v4tree.compiler.plugin_ops import PluginOps, takes_fp4
from trtllm_v4tree.compiler.rtx import Report, graph_profiles
from trtllm_v4tree.compiler.rtx_jobs import Done, Workers
from trtllm_v4tree.compiler.tensorrt_commit import compile_kernels
from trtllm_v4tree.compiler.tensorrt_jobs import COMMAND, TensorRtJob
from trtllm_v4tree.compiler.tensorrt_plan import PlanOptions, check_model
from trtllm_v4tree.compiler.typed import retype
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import COMMIT_KERNELS, WEIGHTS_FILE, Shapes, kernels_to_json
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.weight import TensorSource
from trtllm_v4tree.sizes import EngineSizes

TIMING_CACHE = "timing.cache"
LONG, SPLITS = 4096, 8
"""Engines for sequences longer than this attend in so many parts and combine them, else one row of blocks would walk all keys."""


@dataclass(frozen=True)
class TensorRtTarget:
    """What the plans are for: activations, chip, and how they are built; `draft_vocab` None drafts from all tokens."""

    dtype: str
    capability: str
    weight_streaming: bool = False
    timing_cache: Path | None = None
    draft_vocab: Sequence[int] | None = None


def trace_all(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Shapes,
    dtype: str,
    capability: str,
    vocab: Sequence[int] | None = None,
    fp4: tuple[bool, bool] = (False, False),
) -> Iterator[tuple[GraphContract, ir.Model]]:
    """Typed contract and network of every graph but the commit, which is kernels.

    `fp4`: whether the experts of trunk and drafter are stored in FP4; each stay so where the kernels take it.
    """
    splits, chip = SPLITS if sizes.max_seq_len > LONG else 1, int(capability.removeprefix("SM"))
    kept = takes_fp4(config, chip, dtype)
    trunk, drafter = (PluginOps(chip, splits, dtype, stored and kept) for stored in fp4)
    specs = [contract.target_step(config, sizes)]
    models = [graphs.target_step(config, sizes, trunk)]
    for steps, topk in ((0, 1), *shapes) if sizes.has_mtp else ():
        specs.append(contract.draft_round(config, sizes, steps, topk))
        models.append(graphs.draft_round(config, sizes, drafter, steps, topk, vocab))
    for spec, model in zip(specs, models, strict=True):
        typed = contract.typed(spec, dtype)
        retype(model, typed, dtype)
        yield typed, model


def build_files(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Shapes,
    source: TensorSource,
    scratch: Path,
    target: TensorRtTarget,
    report: Report = lambda line, done: None,
) -> list[Done]:
    """Writes `<stem>.plan` files, weights inside, and `commit.json` to `scratch`; leaves no other file there.

    Raises CompileError with the node that TensorRT refused.
    """
    check_model(config)
    report("compiling the commit kernels", 0.0)
    kernels = compile_kernels(config, sizes, target.dtype, target.capability)
    (scratch / COMMIT_KERNELS).write_text(kernels_to_json(kernels), encoding="utf-8")
    report("reading weights", 0.0)
    fp4 = source.has_fp4_experts(drafter=False), source.has_fp4_experts(drafter=True)
    traced = trace_all(config, sizes, shapes, target.dtype, target.capability, target.draft_vocab, fp4)
    jobs = _jobs(list(traced), sizes, source, scratch, target)
    done = _compile(jobs, report)
    for path in (scratch / WEIGHTS_FILE, scratch / TIMING_CACHE, *(job.path("onnx") for job in jobs)):
        path.unlink(missing_ok=True)
    return done


def _jobs(
    traced: list[tuple[GraphContract, ir.Model]],
    sizes: EngineSizes,
    source: TensorSource,
    scratch: Path,
    target: TensorRtTarget,
) -> list[TensorRtJob]:
    """The networks as files, their weights in one file beside them, and a job for each."""
    weights = WeightPlan(model for _, model in traced)
    weights.write(scratch / WEIGHTS_FILE, source, lambda name, size: None)
    options = PlanOptions(target.timing_cache or scratch / TIMING_CACHE, target.weight_streaming)
    jobs = []
    for spec, model in traced:
        weights.attach(model)
        ir.save(model, scratch / f"{spec.name}.onnx")
        ranges = graph_profiles(spec.name, sizes)
        jobs.append(TensorRtJob(spec, ranges, (target.capability,), target.dtype, scratch, options))
    return jobs


def _compile(jobs: Iterable[TensorRtJob], report: Report) -> list[Done]:
    """One after the other, since tactics are timed."""
    waiting = list(jobs)
    done: list[Done] = []
    with Workers(count=1, command=COMMAND) as workers:
        for job in waiting:
            report(f"TensorRT compiles {job.stem}", len(done) / len(waiting))
            done.append(workers.compile(job))
    return done
