"""`v4tree inspect`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_v4tree import contract as contracts
from trtllm_v4tree.accounting import StateBytes, pool_bytes, state_bytes
from trtllm_v4tree.cli.output import print_json, printable
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import Manifest


def inspect(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")],
    contract: Annotated[bool, typer.Option("--contract", help="List every input and output of the graphs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show what an engine is: sizes, state and scratch bytes, graphs, and the step contract."""
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
        "config": manifest.config.to_dict(),
        "sizes": manifest.sizes.to_dict(),
        "state_bytes": dataclasses.asdict(state_bytes(manifest.config, manifest.sizes)),
        "pool_bytes": pool_bytes(manifest.config, manifest.sizes),
        "draft_shapes": [f"s{s}_k{k}" for s, k in manifest.draft_shapes],
        "files": manifest.files,
        "built_with": manifest.built_with,
    }
    return facts | ({"contract": [dataclasses.asdict(graph) for graph in _contracts(manifest)]} if contract else {})


def _summary(engine_dir: Path, manifest: Manifest) -> Table:
    table = Table(title=escape(printable(str(engine_dir))), show_header=False, title_justify="left")
    for name, value in (*_limits(manifest), *_bytes(manifest), *_contents(manifest)):
        table.add_row(name, escape(value))
    return table


def _limits(manifest: Manifest) -> list[tuple[str, str]]:
    s, c = manifest.sizes, manifest.config
    kinds = ", ".join(f"{len(c.layers_of(kind))} {kind.upper()}" for kind in ("swa", "csa", "hca"))
    entries = s.max_seq_len // s.csa_ratio
    return [
        ("target, dtype", f"{manifest.target}, {manifest.dtype}, drafter {manifest.draft_dtype}"),
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


def _contents(manifest: Manifest) -> list[tuple[str, str]]:
    return [
        ("draft shapes", ", ".join(f"s{a}_k{b}" for a, b in manifest.draft_shapes) or "none"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.built_with.items())),
    ]


def _contracts(manifest: Manifest) -> list[GraphContract]:
    c, s = manifest.config, manifest.sizes
    graphs = [contracts.target_step(c, s), contracts.commit(c, s)]
    if manifest.draft_shapes:
        graphs.append(contracts.draft_round(c, s, *manifest.draft_shapes[-1]))
    return graphs


def _contract_table(graph: GraphContract) -> Table:
    table = Table(title=f"graph {graph.name}", title_justify="left")
    for column in ("direction", "name", "role", "dtype", "shape", "meaning"):
        table.add_column(column)
    for direction, specs in (("in", graph.inputs), ("out", graph.outputs)):
        for t in specs:
            cells = (direction, t.name, t.role, t.dtype, ", ".join(map(str, t.shape)), t.meaning)
            table.add_row(*map(escape, cells))
    return table
