"""`v4tree inspect`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trtllm_v4tree import contract as contracts
from trtllm_v4tree.accounting import StateBytes, state_bytes
from trtllm_v4tree.cli.output import print_json
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
    held = state_bytes(manifest.config, manifest.sizes)
    if as_json:
        print_json(
            {
                "target": manifest.target,
                "dtype": manifest.dtype,
                "sizes": manifest.sizes.to_dict(),
                "state_bytes": dataclasses.asdict(held),
                "draft_shapes": [f"s{s}_k{k}" for s, k in manifest.draft_shapes],
                "files": manifest.files,
            }
        )
        return
    console = Console()
    console.print(_summary(engine_dir, manifest, held))
    if contract:
        for graph in _contracts(manifest):
            console.print(_contract_table(graph))


def _summary(engine_dir: Path, manifest: Manifest, held: StateBytes) -> Table:
    s, c = manifest.sizes, manifest.config
    kinds = ", ".join(f"{len(c.layers_of(k))} {k.upper()}" for k in ("swa", "csa", "hca"))
    table = Table(title=str(engine_dir), show_header=False, title_justify="left")
    selection = f"top {c.index_topk} of up to {s.max_seq_len // s.csa_ratio}" if s.sparse else "none needed (all entries fit the top-k)"
    rows = (
        ("target, dtype", f"{manifest.target}, {manifest.dtype}"),
        ("layers", f"{c.num_layers} ({kinds}), {'1 MTP' if s.has_mtp else 'no MTP'}"),
        ("limits", f"{s.max_batch_size} sequences of {s.max_seq_len} tokens, {s.max_verify_tokens} verified nodes, prefill chunk {s.prefill_chunk}"),
        ("entry pages", f"{s.num_pages - 1} of {s.page_tokens} tokens"),
        ("CSA selection", selection),
        ("state per token", f"{held.per_token:,.2f} bytes"),
        ("state per sequence", f"{held.per_sequence:,} bytes"),
        ("scratch per node", f"{held.per_node:,} bytes, + {held.per_csa_boundary:,} at a CSA and + {held.per_hca_boundary:,} at an HCA boundary"),
        ("draft shapes", ", ".join(f"s{a}_k{b}" for a, b in manifest.draft_shapes) or "none"),
        ("built with", ", ".join(f"{k} {v}" for k, v in manifest.built_with.items())),
    )
    for row in rows:
        table.add_row(*row)
    return table


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
            table.add_row(direction, t.name, t.role, t.dtype, ", ".join(map(str, t.shape)), t.meaning)
    return table
