"""`v4tree inspect`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_v4tree.accounting import StateBytes, pool_bytes, state_bytes
from trtllm_v4tree.cli.generate import check_one_given
from trtllm_v4tree.cli.inspect_config import inspect_config
from trtllm_v4tree.cli.output import print_json, printable
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import Manifest, graph_files, graph_stems
from trtllm_v4tree.errors import RequestError

CONFIG = "Instead of an engine: flash, pro, a config.json or its directory; a dry build without weights."
CONTRACT = "List every input and output of an engine's graphs."
LIMIT = "With --config: as of `v4tree build`; default: one sequence of the model's whole context, 16 nodes."


def inspect(
    engine_dir: Annotated[Path | None, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")] = None,
    config: Annotated[str | None, typer.Option("--config", help=CONFIG)] = None,
    contract: Annotated[bool, typer.Option("--contract", help=CONTRACT)] = False,
    max_batch_size: Annotated[int | None, typer.Option("--max_batch_size", help=LIMIT)] = None,
    max_seq_len: Annotated[int | None, typer.Option("--max_seq_len", help=LIMIT)] = None,
    max_verify_tokens: Annotated[int | None, typer.Option("--max_verify_tokens", help=LIMIT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show what an engine is, or what one of a config would be: sizes, state and scratch bytes, graphs, step contract."""
    limits = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "max_verify_tokens": max_verify_tokens}
    check_one_given(engine_dir=engine_dir, config=config)
    if config is not None:
        _refuse("--engine_dir", {"contract": contract or None})
        inspect_config(config, limits, as_json)
        return
    _refuse("--config", limits)
    assert engine_dir is not None
    inspect_engine(engine_dir, contract, as_json)


def _refuse(needed: str, given: Mapping[str, object]) -> None:
    """Options that only the other form has."""
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if named:
        raise RequestError(f"{', '.join(named)} goes with {needed} only: leave it out.")


def inspect_engine(engine_dir: Path, contract: bool, as_json: bool) -> None:
    """Prints what is stored in an engine directory, after a check of its hashes."""
    manifest = Manifest.read(engine_dir)
    manifest.verify(engine_dir)
    if as_json:
        print_json(_facts(manifest, contract))
        return
    console = Console()
    console.print(_summary(engine_dir, manifest))
    if contract:
        for graph in _contracts(manifest):
            console.print(_contract_table(graph))


def _facts(manifest: Manifest, contract: bool) -> dict[str, Any]:
    """What `--json` prints."""
    facts = {
        "target": manifest.target,
        "dtype": manifest.dtype,
        "draft_dtype": manifest.draft_dtype,
        "draft_vocab_size": manifest.draft_vocab_size or manifest.config.vocab_size,
        "cpu_kernels": manifest.cpu_kernels,
        "config": manifest.config.to_dict(),
        "sizes": manifest.sizes.to_dict(),
        "state_bytes": dataclasses.asdict(state_bytes(manifest.config, manifest.sizes)),
        "pool_bytes": pool_bytes(manifest.config, manifest.sizes),
        "draft_shapes": [f"s{s}_k{k}" for s, k in manifest.draft_shapes],
        "files": manifest.files,
        "built_with": manifest.built_with,
        "compute_capabilities": list(manifest.compute_capabilities),
    }
    return facts | ({"contract": [dataclasses.asdict(graph) for graph in _contracts(manifest)]} if contract else {})


def _summary(engine_dir: Path, manifest: Manifest) -> Table:
    table = Table(title=escape(printable(str(engine_dir))), show_header=False, title_justify="left")
    for name, value in (*_limits(manifest), *_bytes(manifest), *_contents(engine_dir, manifest)):
        table.add_row(name, escape(value))
    return table


def _limits(manifest: Manifest) -> list[tuple[str, str]]:
    s, c = manifest.sizes, manifest.config
    kinds = ", ".join(f"{len(c.layers_of(kind))} {kind.upper()}" for kind in ("swa", "csa", "hca"))
    entries = s.max_seq_len // s.csa_ratio
    plans = [("plans for", ", ".join(manifest.compute_capabilities))] if manifest.compute_capabilities else []
    some = 0 < manifest.draft_vocab_size < c.vocab_size
    drafts = [("drafts from", f"{manifest.draft_vocab_size} of {c.vocab_size} tokens")] if some else []
    return [
        ("target, dtype", f"{manifest.target}, {manifest.dtype}, drafter {manifest.draft_dtype}"),
        *drafts,
        *plans,
        *([("kernels", manifest.cpu_kernels)] if manifest.cpu_kernels else []),
        ("layers", f"{c.num_layers} ({kinds}), {'1 MTP' if s.has_mtp else 'no MTP'}"),
        ("limits", f"{s.max_batch_size} sequences of {s.max_seq_len} tokens, {s.max_verify_tokens} verified nodes"),
        ("prefill chunk", f"{s.prefill_chunk} tokens"),
        ("entry pages", f"{s.num_pages - 1} of {s.page_tokens} tokens"),
        ("CSA selection", f"top {c.index_topk} of up to {entries}" if s.sparse else "none needed: all fit the top-k"),
    ]


def _bytes(manifest: Manifest) -> list[tuple[str, str]]:
    held: StateBytes = state_bytes(manifest.config, manifest.sizes)
    return [
        ("state per token", f"{held.per_token:,.2f} bytes"),
        ("state per sequence", f"{held.per_sequence:,} bytes"),
        ("state pools", f"{pool_bytes(manifest.config, manifest.sizes):,} bytes for all sequences and pages"),
        ("scratch per node", f"{held.per_node:,} bytes"),
        ("  at a CSA boundary", f"+ {held.per_csa_boundary:,} bytes"),
        ("  at an HCA boundary", f"+ {held.per_hca_boundary:,} bytes"),
        ("scratch per drafter row", f"{held.per_drafter_row:,} bytes"),
    ]


def _contents(engine_dir: Path, manifest: Manifest) -> list[tuple[str, str]]:
    graphs = graph_files(manifest.target, graph_stems(manifest.sizes.has_mtp, manifest.draft_shapes))
    size = sum((engine_dir / name).stat().st_size for name in graphs) / 1e6
    return [
        ("graphs and weights", f"{len(graphs)} files, {size:,.1f} MB"),
        ("draft shapes", ", ".join(f"s{a}_k{b}" for a, b in manifest.draft_shapes) or "none"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.built_with.items())),
    ]


def _contracts(manifest: Manifest) -> list[GraphContract]:
    """Target step, commit and one draft round; the others differ in the number of levels."""
    graphs = manifest.contracts()
    return graphs[:2] + (graphs[-1:] if manifest.draft_shapes else [])


def _contract_table(graph: GraphContract) -> Table:
    table = Table(title=f"graph {graph.name}", title_justify="left")
    for column in ("direction", "name", "role", "dtype", "shape", "meaning"):
        table.add_column(column)
    for direction, specs in (("in", graph.inputs), ("out", graph.outputs)):
        for t in specs:
            cells = (direction, t.name, t.role, t.dtype, ", ".join(map(str, t.shape)), t.meaning)
            table.add_row(*map(escape, cells))
    return table
