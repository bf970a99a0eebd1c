"""`v4tree inspect --config`: what an engine of a config would be, from the config alone."""

from __future__ import annotations

import dataclasses
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_v4tree.accounting import (
    FORMATS,
    CacheFormat,
    checkpoint_bytes,
    compressor_bytes,
    num_parameters,
    pool_bytes,
    raw_compressor_bytes,
    state_bytes,
    window_bytes,
)
from trtllm_v4tree.cli.output import print_json, printable
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

if TYPE_CHECKING:
    from trtllm_v4tree.compiler.dry import DryBuild

KINDS = {
    "fp4": "FP4 experts, two values a byte",
    "fp8": "FP8 linears",
    "ue8m0": "ue8m0 scales of both",
    "bf16": "bf16 norms, compressors, embedding, head",
    "fp32": "fp32 hyper-connections, sinks, biases",
    "int64": "int64 hash tables",
}


@dataclass(frozen=True)
class Dry:
    """A traced config and what tracing took: seconds, and the peak memory of the process in bytes."""

    name: str
    config: ModelConfig
    sizes: EngineSizes
    built: DryBuild
    seconds: float
    peak_bytes: int


def inspect_config(name: str, limits: dict[str, int | None], as_json: bool) -> None:
    """Prints the dry build of `name`: flash, pro, a config.json or its directory."""
    dry = trace(name, limits)
    if as_json:
        print_json(facts(dry))
    else:
        show(dry)


def trace(name: str, limits: dict[str, int | None]) -> Dry:
    """Limits that are None are those of a whole context and one sequence."""
    from trtllm_v4tree.compiler.dry import dry_build

    started, config = time.monotonic(), _config(name)
    chosen = {
        "max_batch_size": 1,
        "max_seq_len": config.max_position_embeddings,
        "max_verify_tokens": 16,
        **{option: value for option, value in limits.items() if value is not None},
    }
    sizes = EngineSizes.make(config, **chosen, has_mtp=config.num_mtp_layers > 0)
    built = dry_build(config, sizes)
    return Dry(name, config, sizes, built, time.monotonic() - started, _peak_memory())


def _peak_memory() -> int:
    """Bytes of this program at most; where the kernel does not say, ru_maxrss, which begins with the memory of what started it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * (peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _config(name: str) -> ModelConfig:
    from trtllm_v4tree.bench.published import NAMES, published

    if name in NAMES:
        return published(name)
    path = Path(name)
    return ModelConfig.from_file(path) if path.is_file() else ModelConfig.from_pretrained(path)


def facts(dry: Dry) -> dict[str, Any]:
    """What `--json` prints; all sizes in bytes."""
    config, sizes = dry.config, dry.sizes
    return {
        "config": config.to_dict(),
        "sizes": sizes.to_dict(),
        "parameters": dict(zip(("trunk", "drafter"), num_parameters(config), strict=True)),
        "nodes": dry.built.nodes,
        "experts_per_token": {"tensorrt": config.num_experts_per_tok, "tensorrt-rtx": config.num_experts},
        "weights": {
            "checkpoint": {kind: dataclasses.asdict(stored) for kind, stored in checkpoint_bytes(config).items()},
            "engine_float32": dry.built.weight_bytes(4),
            "engine_bfloat16": dry.built.weight_bytes(2),
            "engine_bfloat16_fp4_experts": _fp4_bytes(dry),
        },
        "state": {cache.name: _state_facts(config, sizes, cache) for cache in FORMATS},
        "compressor_states": {"engine": compressor_bytes(config, sizes), "raw_rows": raw_compressor_bytes(config)},
        "seconds": round(dry.seconds, 2),
        "peak_memory": dry.peak_bytes,
    }


def _state_facts(config: ModelConfig, sizes: EngineSizes, cache: CacheFormat) -> dict[str, float]:
    return {
        "row": cache.row(config),
        "index_key": cache.index_key(config),
        **dataclasses.asdict(state_bytes(config, sizes, cache)),
        "window": window_bytes(config, sizes, cache),
        "pools": pool_bytes(config, sizes, cache),
    }


def show(dry: Dry) -> None:
    c, s, console = dry.config, dry.sizes, Console(highlight=False)
    kinds = ", ".join(f"{len(c.layers_of(kind))} {kind.upper()}" for kind in ("swa", "csa", "hca"))
    trunk, drafter = (f"{_size(count).removesuffix('B')}" for count in num_parameters(c))
    console.print(f"[bold]{escape(printable(dry.name))}[/]: {trunk} parameters, and {drafter} of the drafter")
    console.print(f"layers: {c.num_layers} ({kinds}), {'1 MTP' if s.has_mtp else 'no MTP'}; {c.num_experts} experts")
    console.print(
        f"limits: {s.max_batch_size} x {s.max_seq_len:,} tokens, {s.max_verify_tokens} verified nodes, "
        f"prefill in chunks of {s.prefill_chunk}\n"
    )
    for table in (_nodes(dry), _weights(dry), _state(dry)):
        console.print(table)
    console.print(_experts(c))
    console.print(
        f"dry build: no weight was read, {dry.seconds:.1f} s, peak memory of the process {_size(dry.peak_bytes)}"
    )


def _experts(config: ModelConfig) -> str:
    """Which targets multiply a token with more experts than it chose."""
    chosen, count = config.num_experts_per_tok, config.num_experts
    return (
        f"experts: a token is multiplied with the {chosen} of {count} that it chose, in tensorrt-rtx, which has no plugins, with "
        f"all of them ({count / chosen:.3g} times the work)"
    )


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _nodes(dry: Dry) -> Table:
    nodes = dry.built.nodes
    table = _table("Nodes", "graph", *(f"{name} {'operators' if name == 'v4tree' else ''}".strip() for name in nodes))
    for graph in next(iter(nodes.values())):
        table.add_row(graph, *(f"{count[graph]:,}" for count in nodes.values()))
    return table


def _weights(dry: Dry) -> Table:
    table, stored = _table("Weights", "kept as", "tensors", "bytes", ""), checkpoint_bytes(dry.config)
    for kind, meaning in KINDS.items():
        if kind in stored:
            table.add_row(meaning, f"{stored[kind].tensors:,}", *_sized(stored[kind].num_bytes))
    tensors, total = (sum(column) for column in zip(*map(dataclasses.astuple, stored.values()), strict=True))
    table.add_row("[bold]checkpoint as published", f"[bold]{tensors:,}", *_sized(total, "[bold]"))
    table.add_section()
    for name, size in (("float32", 4), ("bfloat16", 2)):
        table.add_row(f"engine, {name}", "", *_sized(dry.built.weight_bytes(size)))
    table.add_row("of tensorrt from FP4 experts, bfloat16", "", *_sized(_fp4_bytes(dry)))
    return table


def _fp4_bytes(dry: Dry) -> int:
    """An engine that keeps its experts in FP4, as target tensorrt does with 16-bit activations."""
    values = 2 * checkpoint_bytes(dry.config)["fp4"].num_bytes
    return dry.built.weight_bytes(2) - 2 * values + values // 2 + values // 32


def _state(dry: Dry) -> Table:
    c, s = dry.config, dry.sizes
    table = _table("State and scratch, bytes", "", *(cache.name for cache in FORMATS))
    held = [state_bytes(c, s, cache) for cache in FORMATS]
    windows = [window_bytes(c, s, cache) for cache in FORMATS]
    rows: tuple[tuple[str, list[float]], ...] = (
        ("state per token", [h.per_token for h in held]),
        ("state per sequence", [h.per_sequence for h in held]),
        ("  window rings", list(windows)),
        (f"  compressor states (raw rows: {raw_compressor_bytes(c):,})", [compressor_bytes(c, s)] * len(FORMATS)),
        ("  streams the drafter has not read", [_streams(dry, cache) for cache in FORMATS]),
        ("all pools", [pool_bytes(c, s, cache) for cache in FORMATS]),
        ("scratch per node", [h.per_node for h in held]),
        ("  at a CSA boundary, more", [h.per_csa_boundary for h in held]),
        ("  at an HCA boundary, more", [h.per_hca_boundary for h in held]),
        ("scratch per drafter row", [h.per_drafter_row for h in held]),
    )
    for name, values in rows:
        table.add_row(name, *(f"{value:,.2f}".removesuffix(".00") for value in values))
    return table


def _streams(dry: Dry, cache: CacheFormat) -> int:
    """What is left of a sequence's state."""
    c, s = dry.config, dry.sizes
    return state_bytes(c, s, cache).per_sequence - window_bytes(c, s, cache) - compressor_bytes(c, s)


def _sized(count: int, style: str = "") -> tuple[str, str]:
    return f"{style}{count:,}", f"{style}{_size(count)}"


def _size(count: float) -> str:
    """Decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
