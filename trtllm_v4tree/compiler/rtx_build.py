"""From a checkpoint to TensorRT-RTX plans: traces the graphs, writes their weights, has each compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from trtllm_v4tree.compiler.rtx import DEFAULT_CAPABILITIES, Report, check_options, graph_profiles, trace_all
from trtllm_v4tree.compiler.rtx_jobs import Done, Job, Workers
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import WEIGHTS_FILE
from trtllm_v4tree.network.weight import TensorSource
from trtllm_v4tree.sizes import EngineSizes


def build_plans(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Iterable[tuple[int, int]],
    source: TensorSource,
    scratch: Path,
    capabilities: Sequence[str] = DEFAULT_CAPABILITIES,
    dtype: str = "float32",
    report: Report = lambda line, done: None,
    vocab: Sequence[int] | None = None,
) -> list[Done]:
    """Compiles every graph of an engine and writes `<stem>.plan` files to `scratch`, weights inside; leaves no other file there.

    The time goes by graph and optimisation profile; how many capabilities a plan holds code for hardly counts.
    """
    check_options(capabilities, dtype)
    jobs, costs = [], {}
    for spec, model in _with_weights(config, sizes, shapes, vocab, source, scratch, report):
        ir.save(model, scratch / f"{spec.name}.onnx")
        jobs.append(Job(spec, graph_profiles(spec.name, sizes), tuple(capabilities), dtype, scratch))
        costs[spec.name] = len(model.graph) * len(jobs[-1].ranges)
    jobs.sort(key=lambda job: -costs[job.stem])
    done: list[Done] = []
    report(f"this target multiplies every token with all {config.num_experts} experts: it has no plugins", 0.0)
    report(f"compiling {len(jobs)} graphs for {', '.join(capabilities)}", 0.0)
    with Workers() as workers:
        for result in workers.run(jobs):
            done.append(result)
            share = sum(costs[d.stem] for d in done) / sum(costs.values())
            report(f"compiled {result.stem}: {result.layers} layers in {result.seconds:.0f} s", share)
    for path in (scratch / WEIGHTS_FILE, *(job.path("onnx") for job in jobs)):
        path.unlink()
    return done


def _with_weights(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Iterable[tuple[int, int]],
    vocab: Sequence[int] | None,
    source: TensorSource,
    scratch: Path,
    report: Report,
) -> list[tuple[GraphContract, ir.Model]]:
    """Every graph, its weights in a file beside it that all share."""
    report("reading weights", 0.0)
    traced = list(trace_all(config, sizes, shapes, vocab))
    weights = WeightPlan(model for _, model in traced)
    weights.write(scratch / WEIGHTS_FILE, source, lambda name, size: None)
    for _, model in traced:
        weights.attach(model)
    return traced
