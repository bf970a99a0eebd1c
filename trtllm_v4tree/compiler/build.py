"""`v4tree build`: checkpoint directory in, engine directory out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler.ort_ops import OnnxRuntimeOps
from trtllm_v4tree.compiler.weights import WEIGHTS_FILE, WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import MANIFEST, Manifest, replacing, sha256
from trtllm_v4tree.errors import CheckpointError, ConfigError
from trtllm_v4tree.network import graphs
from trtllm_v4tree.sizes import EngineSizes

TARGETS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
DTYPES = ("float32", "float16", "bfloat16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
Report = Callable[[str, float], None]
"""Progress: a line of what is being done, and the fraction done so far."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of `v4tree build`; `draft_shapes` are the (steps, topk) draft rounds to compile."""

    target: str = "onnxruntime"
    dtype: str = "float32"
    max_batch_size: int = 16
    max_seq_len: int = 2048
    max_verify_tokens: int = 16
    prefill_chunk: int = 128
    num_pages: int | None = None
    draft_shapes: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"target {self.target!r} is unknown: choose one of {', '.join(TARGETS)}.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown: choose one of {', '.join(DTYPES)}.")
        if self.target != "onnxruntime":
            raise ConfigError(f"target {self.target!r} is not available in this version: build with --target onnxruntime.")
        if self.dtype != "float32":
            raise ConfigError(f"target onnxruntime computes in float32, not {self.dtype}: build with --dtype float32.")
        for steps, topk in self.draft_shapes or ():
            if not (1 <= steps <= 16 and 1 <= topk <= 16):
                raise ConfigError(f"draft shape s{steps}_k{topk} is out of range: steps and topk go from 1 to 16.")


def default_draft_shapes(max_verify_tokens: int) -> tuple[tuple[int, int], ...]:
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
) -> Manifest:
    """Compiles a checkpoint; raises InputError subclasses, and leaves `output_dir` as it was if anything fails."""
    config = ModelConfig.from_pretrained(checkpoint_dir)
    source = Checkpoint.open(checkpoint_dir, config, mtp_weights)
    _check_tokenizer(checkpoint_dir)
    sizes = EngineSizes.make(
        config,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        max_verify_tokens=options.max_verify_tokens,
        prefill_chunk=options.prefill_chunk,
        num_pages=options.num_pages,
        has_mtp=source.has_mtp,
    )
    with replacing(output_dir) as scratch:
        manifest = _write(scratch, checkpoint_dir, source, config, sizes, options, report)
    return manifest


def _check_tokenizer(checkpoint_dir: Path) -> None:
    path = checkpoint_dir / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(path))
        except Exception as error:
            raise CheckpointError(f"{path} is not a readable tokenizer ({error}): replace it or remove it.") from error


def trace_all(config: ModelConfig, sizes: EngineSizes, shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, ir.Model]]:
    """The graphs of an engine by file stem."""
    ops = OnnxRuntimeOps()
    yield "target_step", graphs.target_step(config, sizes, ops)
    yield "commit", graphs.commit(config, sizes, ops)
    if sizes.has_mtp:
        yield "draft_catchup", graphs.draft_round(config, sizes, ops, 0, 1)
        for steps, topk in shapes:
            yield f"draft_s{steps}_k{topk}", graphs.draft_round(config, sizes, ops, steps, topk)


def _write(
    scratch: Path,
    checkpoint_dir: Path,
    source: Checkpoint,
    config: ModelConfig,
    sizes: EngineSizes,
    options: BuildOptions,
    report: Report,
) -> Manifest:
    shapes = options.draft_shapes if options.draft_shapes is not None else default_draft_shapes(sizes.max_verify_tokens)
    shapes = shapes if sizes.has_mtp else ()
    total = 3 + len(shapes)
    models: dict[str, ir.Model] = {}
    for count, (stem, model) in enumerate(trace_all(config, sizes, shapes)):
        report(f"traced {stem}: {len(model.graph)} nodes", 0.5 * count / total)
        models[stem] = model
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
    for name in TOKENIZER_FILES:
        if (checkpoint_dir / name).is_file():
            shutil.copyfile(checkpoint_dir / name, scratch / name)
    files = {path.name: sha256(path) for path in sorted(scratch.iterdir())}
    versions = {name: metadata.version(name) for name in ("onnxruntime", "onnxscript")}
    manifest = Manifest(options.target, options.dtype, config, sizes, shapes, files, versions)
    (scratch / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
