"""Compiles one graph for TensorRT in a process of its own (see `rtx_jobs`); tactics are timed, so one at a time."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from trtllm_v4tree.compiler import rtx_jobs
from trtllm_v4tree.compiler.rtx_jobs import Done, Job
from trtllm_v4tree.compiler.tensorrt_plan import PlanOptions, TensorRtBuilder

COMMAND = (sys.executable, "-m", "trtllm_v4tree.compiler.tensorrt_jobs")


@dataclass(frozen=True)
class TensorRtJob(Job):
    """A job with the options of its plan."""

    options: PlanOptions


def compile_here(job: Job) -> Done:
    """In this process; raises CompileError."""
    assert isinstance(job, TensorRtJob)
    plan = TensorRtBuilder(job.options).compile(job.path("onnx"), job.spec, job.ranges)
    job.path("plan").write_bytes(plan.data)
    return Done(job.stem, plan.layers, plan.seconds)


if __name__ == "__main__":
    rtx_jobs.main(compile_here)
