"""`v4tree build`: checkpoint directory in, engine directory out."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler import native_ops, region, rtx, rtx_build, tensorrt_build, tensorrt_plan
from trtllm_v4tree.compiler.draft_vocab import parse_draft_vocab
from trtllm_v4tree.compiler.fuse import fuse
from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.compiler.ort_ops import OnnxRuntimeOps
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import (
    LATENCY_FILE,
    MANIFEST,
    WEIGHTS_FILE,
    Manifest,
    Shapes,
    graph_stems,
    replacing,
    sha256,
)
from trtllm_v4tree.errors import CheckpointError, ConfigError
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import V4TreeOps
from trtllm_v4tree.sizes import EngineSizes
from trtllm_v4tree.tokenizer import load_tokenizer

TARGETS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
DTYPES = ("float32", "float16", "bfloat16", "int8")
DRAFT_DTYPES = ("auto", "float32", "bfloat16", "int8")
CPU_KERNELS = ("auto", "native", "onnxruntime")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MAX_DRAFT = 16
Report = Callable[[str, float], None]
"""Progress: a line of what is being done, and the fraction done so far."""
Measure = Callable[[Path, Manifest], str]
"""Times a finished engine and returns its latency table as JSON; given by the caller, since it needs a runtime."""
Models = dict[str, ir.Model]
"""Graphs by file stem."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of `v4tree build`; `draft_shapes` are the (steps, topk) draft rounds to compile, None for the default.

    `compute_capabilities` (SM89, ...) are what tensorrt-rtx compiles for, None for its default; tensorrt takes the one of the GPU
    it builds on, or None. `weight_streaming` and `timing_cache` (a file to read and write) are for tensorrt alone.

    `cpu_kernels` are the operators of target onnxruntime: the native library, where it was compiled and takes the model's widths, or
    ONNX Runtime's own; auto takes the faster that is there.

    `dtype` bfloat16 (native operators): linears round their inputs to bfloat16 and sum in float32, which is what a GPU does. With int8
    (native operators) they round weights and inputs to 8 bits, a scale for each output and for each token, and sum whole numbers.

    `draft_dtype` of the drafter's linears: bfloat16 and int8 likewise; auto is int8 if `dtype` is, else bfloat16 where it can be, else
    float32. It changes how much is accepted, but no text. Nor does `draft_vocab`, the tokens that may be proposed (text of
    `parse_draft_vocab`), None for all.

    Raises ConfigError for what no build can do; what depends on the model is checked by `build`.
    """

    target: str = "onnxruntime"
    dtype: str = "float32"
    max_batch_size: int = 16
    max_seq_len: int = 2048
    max_verify_tokens: int = 16
    prefill_chunk: int = 128
    num_pages: int | None = None
    draft_dtype: str = "auto"
    draft_shapes: Shapes | None = None
    draft_vocab: str | None = None
    compute_capabilities: tuple[str, ...] | None = None
    cpu_kernels: str = "auto"
    weight_streaming: bool = False
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"target {self.target!r} is unknown: choose one of {', '.join(TARGETS)}.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown: choose one of {', '.join(DTYPES)}.")
        if self.draft_dtype not in DRAFT_DTYPES:
            raise ConfigError(f"draft_dtype {self.draft_dtype!r} is unknown: choose one of {', '.join(DRAFT_DTYPES)}.")
        if self.cpu_kernels not in CPU_KERNELS:
            raise ConfigError(f"cpu_kernels {self.cpu_kernels!r} is unknown: choose one of {', '.join(CPU_KERNELS)}.")
        self._check_target()
        self._check_integers()
        for steps, topk in self.draft_shapes or ():
            if not (1 <= steps <= MAX_DRAFT and 1 <= topk <= MAX_DRAFT):
                raise ConfigError(
                    f"draft shape s{steps}_k{topk} is out of range: steps and topk go from 1 to {MAX_DRAFT}."
                )

    def _check_target(self) -> None:
        """What each target lacks."""
        if self.target != "onnxruntime" and self.cpu_kernels != "auto":
            raise ConfigError(f"cpu_kernels is for --target onnxruntime, not {self.target}: leave it out.")
        if self.target == "tensorrt":
            if self.timing_cache is not None and (self.timing_cache.is_dir() or not self.timing_cache.parent.is_dir()):
                raise ConfigError(f"timing_cache {self.timing_cache} is no file in a directory that exists: give one.")
            tensorrt_plan.check_options(self.compute_capabilities, self.dtype, self.draft_dtype, self.max_verify_tokens)
            return
        if self.weight_streaming or self.timing_cache is not None:
            raise ConfigError("weight_streaming and timing_cache are for --target tensorrt: leave them out.")
        if self.target == "tensorrt-rtx":
            rtx.check_options(
                self.capabilities, self.dtype, "float32" if self.draft_dtype == "auto" else self.draft_dtype
            )
        elif self.compute_capabilities is not None:
            raise ConfigError(
                f"compute_capability is for --target tensorrt-rtx or tensorrt, not {self.target}: leave it out."
            )
        elif self.dtype == "float16":
            raise ConfigError(
                "target onnxruntime computes in float32, bfloat16 or int8, not float16: build with one of these."
            )

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What plans are compiled for; empty for a target without plans, and for tensorrt until it knows the GPU."""
        if self.target != "tensorrt-rtx":
            return self.compute_capabilities or ()
        return rtx.DEFAULT_CAPABILITIES if self.compute_capabilities is None else self.compute_capabilities

    def chosen_kernels(self, config: ModelConfig) -> str:
        """`native` or `onnxruntime`; none for another target. Raises ConfigError where native operators are asked for and cannot be."""
        if self.target != "onnxruntime":
            return ""
        reason = native_ops.why_not(config)
        if self.cpu_kernels == "native" and reason:
            raise ConfigError(f"--cpu_kernels native is not possible: {reason}.")
        return "onnxruntime" if reason or self.cpu_kernels == "onnxruntime" else "native"

    def with_draft_dtype(self, bfloat16: bool) -> BuildOptions:
        """With the dtype that auto stands for; `bfloat16`: whether linears in it are possible."""
        if self.draft_dtype != "auto" or self.target == "tensorrt":
            return self
        best = "int8" if self.dtype == "int8" else "bfloat16" if bfloat16 else "float32"
        return dataclasses.replace(self, draft_dtype=best)

    def _check_integers(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "max_verify_tokens", "prefill_chunk", "num_pages"):
            value = getattr(self, name)
            if type(value) is not int and (name, value) != ("num_pages", None):
                raise ConfigError(f"{name} is {value!r}: give an integer.")

    def sizes(self, config: ModelConfig, has_mtp: bool) -> EngineSizes:
        return EngineSizes.make(
            config,
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_verify_tokens=self.max_verify_tokens,
            prefill_chunk=self.prefill_chunk,
            num_pages=self.num_pages,
            has_mtp=has_mtp,
        )

    def shapes(self, config: ModelConfig, has_mtp: bool) -> Shapes:
        """The draft rounds to compile, each once; none for a checkpoint without a drafter."""
        if self.draft_shapes is None:
            default = default_draft_shapes if self.target == "onnxruntime" else rtx.default_draft_shapes
            return default(self.max_verify_tokens) if has_mtp else ()
        if self.draft_shapes and not has_mtp:
            raise ConfigError(
                "draft_shapes were given, but the checkpoint has no mtp tensors: leave them out or give --mtp_weights."
            )
        widest = max((topk for _, topk in self.draft_shapes), default=1)
        if widest > config.vocab_size:
            raise ConfigError(f"draft shape k{widest} is wider than the vocabulary: use k{config.vocab_size} or less.")
        return tuple(dict.fromkeys(self.draft_shapes))

    def vocab(self, config: ModelConfig, shapes: Shapes) -> tuple[int, ...] | None:
        """The tokens that may be proposed, ascending; None is all."""
        if self.draft_vocab is None:
            return None
        if not shapes:
            raise ConfigError("draft_vocab was given, but no draft round is compiled: leave it out.")
        return parse_draft_vocab(self.draft_vocab, config.vocab_size)


def default_draft_shapes(max_verify_tokens: int) -> Shapes:
    """Chains up to D - 1 = 7 steps and trees of 2 to 7 steps with top-k 2 to 4, as far as D allows."""
    deepest = min(7, max_verify_tokens - 1)
    chains = [(n, 1) for n in range(1, deepest + 1)]
    trees = [(n, k) for k in (2, 3, 4) for n in range(2, deepest + 1)]
    return tuple(chains + trees)


def build(
    checkpoint_dir: Path,
    output_dir: Path,
    options: BuildOptions,
    mtp_weights: Path | None = None,
    report: Report = lambda line, done: None,
    measure: Measure | None = None,
) -> Manifest:
    """Compiles a checkpoint, and times the engine if `measure` is given and the engine runs here.

    Raises InputError subclasses; leaves `output_dir` as it was if anything fails.
    """
    options = _for_this_machine(options)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    source = Checkpoint.open(checkpoint_dir, config, mtp_weights)
    check_tokenizer(checkpoint_dir, config)
    sizes = options.sizes(config, source.has_mtp)
    shapes = options.shapes(config, source.has_mtp)
    vocab = options.vocab(config, shapes)
    kernels = options.chosen_kernels(config)
    options = options.with_draft_dtype(kernels == "native" and source.is_bfloat16_exact)
    draft_dtype = options.dtype if options.target == "tensorrt" else options.draft_dtype
    with replacing(output_dir) as scratch:
        versions = _compile(scratch, source, sizes, shapes, vocab, options, kernels, report)
        _copy_tokenizer(checkpoint_dir, scratch)
        manifest = Manifest(
            options.target, options.dtype, draft_dtype, config, sizes, shapes, {}, versions, options.capabilities, kernels,
            config.vocab_size if vocab is None else len(vocab),
        )  # fmt: skip
        if measure is not None and options.target in ("onnxruntime", "tensorrt"):
            (scratch / LATENCY_FILE).write_text(measure(scratch, manifest), encoding="utf-8")
        manifest = dataclasses.replace(manifest, files={path.name: sha256(path) for path in sorted(scratch.iterdir())})
        (scratch / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        assert Manifest.read(scratch) == manifest
    return manifest


def _for_this_machine(options: BuildOptions) -> BuildOptions:
    """The options with what the machine decides; ConfigError where the target's compiler or its GPU is missing."""
    if options.target == "tensorrt-rtx":
        rtx.load_tensorrt_rtx()
    if options.target != "tensorrt":
        return options
    tensorrt_plan.load_tensorrt()
    return dataclasses.replace(
        options, compute_capabilities=(tensorrt_plan.local_capability(options.compute_capabilities),)
    )


def _compile(
    scratch: Path,
    source: Checkpoint,
    sizes: EngineSizes,
    shapes: Shapes,
    vocab: Sequence[int] | None,
    options: BuildOptions,
    kernels: str,
    report: Report,
) -> dict[str, str]:
    """Writes graphs and weights; returns the versions of what made them."""
    config, versions = source.config, {"onnxscript": metadata.version("onnxscript")}
    if options.target == "tensorrt-rtx":
        rtx_build.build_plans(
            config, sizes, shapes, source, scratch, options.capabilities, options.dtype, report, vocab
        )
        return {"tensorrt-rtx": rtx.load_tensorrt_rtx().__version__, **versions}
    if options.target == "tensorrt":
        target = tensorrt_build.TensorRtTarget(
            options.dtype, options.capabilities[0], options.weight_streaming, options.timing_cache, vocab
        )
        tensorrt_build.build_files(config, sizes, shapes, source, scratch, target, report)
        return {"tensorrt": tensorrt_plan.load_tensorrt().__version__, **versions}
    models = _trace(config, sizes, shapes, vocab, lowerings(options, kernels, source), report)
    _write_weights(scratch, models, source, report)
    return {"onnxruntime": metadata.version("onnxruntime"), **versions}


def check_tokenizer(checkpoint_dir: Path, config: ModelConfig) -> None:
    """A `tokenizer.json`, if there is one, must load and give no token that the model lacks."""
    path = checkpoint_dir / "tokenizer.json"
    if not path.is_file():
        return
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a readable tokenizer ({error}): replace it or remove it.") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= config.vocab_size:
        raise CheckpointError(
            f"{path} has token id {highest}, but the config's vocab_size is {config.vocab_size}: "
            "it belongs to another model; replace it or remove it."
        )


def lowerings(options: BuildOptions, kernels: str, source: Checkpoint) -> tuple[V4TreeOps, V4TreeOps]:
    """Operators of the target step and of the drafter; native ones store weights in bfloat16 where that loses nothing."""
    if options.dtype == "int8" and kernels != "native":
        raise ConfigError("dtype int8 needs native operators: build with float32, or with --draft_dtype int8 alone.")
    half = kernels == "native" and source.is_bfloat16_exact
    if not half and "bfloat16" in (options.dtype, options.draft_dtype):
        raise ConfigError(
            "dtype and draft_dtype bfloat16 need native operators and a checkpoint whose weights bfloat16 holds: build with float32."
        )

    def of(dtype: str) -> V4TreeOps:
        return NativeOps(half, dtype) if kernels == "native" else OnnxRuntimeOps(int8=dtype == "int8")

    return of(options.dtype), of(options.draft_dtype)


def trace_all(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Shapes,
    ops: tuple[V4TreeOps, V4TreeOps],
    vocab: Sequence[int] | None = None,
) -> Iterator[ir.Model]:
    """The graphs of an engine in the order of `graph_stems`; ops of the target step and of the drafter."""
    target, drafter = ops
    yield _fused(graphs.target_step(config, sizes, target), target)
    yield graphs.commit(config, sizes, target)
    if sizes.has_mtp:
        for steps, topk in ((0, 1), *shapes):
            yield _fused(graphs.draft_round(config, sizes, drafter, steps, topk, vocab), drafter)


def _fused(model: ir.Model, ops: V4TreeOps) -> ir.Model:
    if isinstance(ops, NativeOps):
        fuse(model)
        region.join(model)
    return model


def _trace(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Shapes,
    vocab: Sequence[int] | None,
    ops: tuple[V4TreeOps, V4TreeOps],
    report: Report,
) -> Models:
    """The first half of the work."""
    models: Models = {}
    stems = graph_stems(sizes.has_mtp, shapes)
    for stem, model in zip(stems, trace_all(config, sizes, shapes, ops, vocab), strict=True):
        models[stem] = model
        report(f"traced {stem}: {len(model.graph)} nodes", 0.5 * len(models) / len(stems))
    return models


def _write_weights(scratch: Path, models: Models, source: Checkpoint, report: Report) -> None:
    """The second half: the weights, each once, and the graphs that point to them."""
    plan = WeightPlan(models.values())
    done = 0

    def progress(name: str, size: int) -> None:
        nonlocal done
        done += size
        report(f"wrote {name}", 0.5 + 0.5 * done / plan.num_bytes)

    plan.write(scratch / WEIGHTS_FILE, source, progress)
    for stem, model in models.items():
        plan.attach(model)
        ir.save(model, scratch / f"{stem}.onnx")


def _copy_tokenizer(checkpoint_dir: Path, scratch: Path) -> None:
    for name in TOKENIZER_FILES:
        if (checkpoint_dir / name).is_file():
            shutil.copyfile(checkpoint_dir / name, scratch / name)
