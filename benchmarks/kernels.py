"""Times the kernels on a GPU against the copy bandwidth and the matrix throughput measured in the same run.

`python benchmarks/kernels.py --output kernels.json`. Needs a CUDA GPU, torch and triton; no TensorRT, no model.
The experts are those of one layer of V4-Flash (12.9 GB of weights, 3.4 GB in FP4), for batch * nodes tokens that choose at random.
Goals: >= 75 % of the copy bandwidth where memory-bound, >= 50 % of the matrix ceiling where compute-bound, and 8 nodes at no more
than 1.5 times the cost of one at batch 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins"))

BATCHES, CONTEXTS, NODES = (1, 8, 32), (2048, 32768, 262144), (1, 6, 8, 16)
PREFILL = 128
"""Nodes of a prefill chunk, of which the experts alone are timed."""
EXPERTS, EXPERT_TOPK, HIDDEN, INNER, LIMIT = 256, 6, 4096, 2048, 10.0
WINDOW, TOPK, DIM, ROPE, INDEX_HEADS, INDEX_DIM = 128, 512, 512, 64, 64, 128


@dataclass(frozen=True)
class Work:
    """Least bytes moved and floating-point operations of one launch (bf16 activations)."""

    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Row:
    """One measurement: seconds, the shares of both ceilings, and which of them binds."""

    kernel: str
    batch: int
    context: int
    nodes: int
    seconds: float
    bandwidth_share: float
    matrix_share: float
    bound: str


def attention_work(kind: str, heads: int, batch: int, context: int, nodes: int) -> Work:
    """Keys are read once per sequence (CSA: at most `nodes` selections of TOPK); 2 products of 2 DIM per pair."""
    far = {"swa": 0, "csa": min(TOPK, context // 4), "hca": context // 128}[kind]
    distinct = min(nodes * far, context // 4) if kind == "csa" else far
    keys, read = WINDOW + nodes + far, WINDOW + nodes + distinct
    num_bytes = 2 * batch * (read * DIM + 2 * nodes * heads * DIM)
    return Work(num_bytes, 4 * batch * nodes * heads * keys * DIM)


def score_work(batch: int, context: int, nodes: int) -> Work:
    """Every entry read once per sequence, every score written in fp32."""
    entries = context // 4
    num_bytes = batch * (2 * entries * INDEX_DIM + 2 * nodes * INDEX_HEADS * INDEX_DIM + 8 * nodes * entries)
    return Work(num_bytes, 2 * batch * nodes * INDEX_HEADS * entries * INDEX_DIM)


def experts_work(pairs: int, used: int, fp4: bool) -> Work:
    """Weights of the experts that any token chose, read once; 3 products per pair of a token and an expert."""
    weights = 3 * HIDDEN * INNER
    moved = 2 * pairs * (HIDDEN + 2 * INNER) + 8 * pairs * HIDDEN
    return Work(used * (weights // 2 + weights // 32 if fp4 else 2 * weights) + moved, 2 * pairs * weights)


def rate(work: Work, seconds: float, bandwidth: float, matrix: float) -> tuple[float, float, str]:
    """(share of the bandwidth, share of the matrix ceiling, which of the two bounds the work)."""
    bound = "memory" if work.num_bytes / bandwidth >= work.flops / matrix else "compute"
    return work.num_bytes / seconds / bandwidth, work.flops / seconds / matrix, bound


def ceilings() -> tuple[float, float]:
    """Measured copy bandwidth (bytes read and written per second) and bf16 matrix throughput (FLOP/s)."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / (do_bench(lambda: target.copy_(source)) * 1e-3)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copy, 2 * 8192**3 / (do_bench(lambda: a @ a) * 1e-3)


def attention_launch(kind: str, heads: int, batch: int, context: int, nodes: int) -> Callable[[], object]:
    """A chain of nodes behind `context` tokens with random rows of the pools; CSA with a selection per node."""
    import torch
    from v4tree_plugins import aot
    from v4tree_plugins.tree_attention import tree_attention

    def rows(*shape: int, top: int) -> torch.Tensor:
        return torch.randint(1, top, shape, device="cuda")

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    far = {"swa": 0, "csa": min(TOPK, context // 4), "hca": context // 128}[kind]
    pool = 1 + batch * max(1, context // (4 if kind == "csa" else 128))
    entry_rows = rows(batch, nodes, far, top=pool) if kind == "csa" else rows(batch, far, top=max(2, pool))
    chain = torch.full((nodes, nodes), float("-inf"), device="cuda").triu(1).expand(batch, -1, -1)
    node_mask = torch.cat([torch.zeros(batch, nodes, WINDOW, device="cuda"), chain], 2).contiguous()
    operands = (
        values(batch, nodes, heads, DIM), values(1 + batch * WINDOW, DIM), rows(batch, WINDOW, top=1 + batch * WINDOW),
        values(batch, nodes, DIM), node_mask, values(pool, DIM), entry_rows, values(batch, 0, DIM),
        torch.zeros(batch, nodes, far, device="cuda"), values(heads, dtype=torch.float32),
        values(batch, nodes, ROPE // 2, dtype=torch.float32), values(batch, nodes, ROPE // 2, dtype=torch.float32),
    )  # fmt: skip
    tile = aot.attention_tiles("bf16", chip())[0]
    blocks = -(-(WINDOW + nodes) // tile.block_k) + -(-far // tile.block_k)
    tiles = batch * -(-nodes * heads // tile.block_m)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = max(1, min(16, blocks, 2 * processors // tiles))
    options = {
        "block_m": tile.block_m,
        "block_k": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return lambda: tree_attention(*operands, scale=DIM**-0.5, splits=splits, **options)


def score_launch(batch: int, context: int, nodes: int) -> Callable[[], object]:
    import torch
    from v4tree_plugins.tree_index_score import tree_index_score

    entries = context // 4
    query = torch.randn(batch, nodes, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(batch, nodes, INDEX_HEADS, device="cuda", dtype=torch.bfloat16)
    pool = torch.randn(1 + batch * entries, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    rows = 1 + torch.arange(batch * entries, device="cuda").view(batch, entries)
    branch, mask = query.new_empty(batch, 0, INDEX_DIM), torch.zeros(batch, nodes, entries, device="cuda")
    return lambda: tree_index_score(query, weights, pool, rows, branch, mask)


def expert_weights(fp4: bool) -> dict[str, object]:
    """fc1 and fc2 of a layer, and their scales."""
    import torch

    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    if not fp4:
        fc1, fc2 = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02) for shape in shapes)
        return {"fc1": fc1, "fc2": fc2}

    def codes(width: int, low: int, high: int) -> list[torch.Tensor]:
        return [torch.randint(low, high, (*rows, n // width), device="cuda", dtype=torch.uint8) for *rows, n in shapes]

    fc1, fc2 = codes(2, 0, 256)
    return {"fc1": fc1, "fc2": fc2, "scales": tuple(codes(32, 118, 122))}


def experts_launch(tokens: int, weights: dict[str, object], fp4: bool) -> tuple[Callable[[], object], int]:
    """The sort, both products and the sum of a layer, and how many experts the tokens chose."""
    import torch
    from v4tree_plugins import aot
    from v4tree_plugins.grouped_moe import grouped_moe

    x, base = (torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(EXPERT_TOPK).indices.contiguous()
    shares = torch.rand(tokens, EXPERT_TOPK, device="cuda") + 0.1
    options = {"limit": LIMIT, **weights, **asdict(aot.expert_tiles("bf16", fp4)[0])}
    return lambda: grouped_moe(x, base, ids, shares, **options), ids.unique().numel()


def chip() -> int:
    """The nearest compute capability that the tile tables know."""
    import torch
    from v4tree_plugins import aot

    major, minor = torch.cuda.get_device_capability()
    return max(c for c in aot.CAPABILITIES if c <= 10 * major + minor)


def measurements(heads: int) -> Iterator[tuple[str, Work, Callable[[], object], tuple[int, int, int]]]:
    for batch in BATCHES:
        for context in CONTEXTS:
            for nodes in NODES:
                at = (batch, context, nodes)
                for kind in ("csa", "hca"):
                    yield (
                        f"tree_attention_{kind}",
                        attention_work(kind, heads, *at),
                        attention_launch(kind, heads, *at),
                        at,
                    )
                yield "tree_index_score", score_work(*at), score_launch(*at), at
    for fp4 in (False, True):
        experts = expert_weights(fp4)
        for batch in BATCHES:
            for nodes in (*NODES, PREFILL):
                launch, used = experts_launch(batch * nodes, experts, fp4)
                name = "grouped_moe_fp4" if fp4 else "grouped_moe"
                yield name, experts_work(batch * nodes * EXPERT_TOPK, used, fp4), launch, (batch, 0, nodes)


def run(heads: int) -> dict[str, object]:
    from triton.testing import do_bench

    bandwidth, matrix = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix {matrix / 1e12:.0f} TFLOP/s")
    rows = []
    for name, work, launch, (batch, context, nodes) in measurements(heads):
        seconds = do_bench(launch) * 1e-3
        rows.append(Row(name, batch, context, nodes, seconds, *rate(work, seconds, bandwidth, matrix)))
        r = rows[-1]
        shares = f"{100 * r.bandwidth_share:5.1f} % bytes/s {100 * r.matrix_share:5.1f} % FLOP/s"
        print(
            f"{name:20} batch {batch:3} context {context:7} nodes {nodes:3} {1e6 * seconds:9.1f} us {shares} {r.bound}",
            flush=True,
        )
    return {
        "copy_bytes_per_s": bandwidth,
        "matrix_flops": matrix,
        "heads": heads,
        "rows": [asdict(row) for row in rows],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, choices=(64, 128), default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a CUDA GPU: none is visible to torch here.", file=sys.stderr)
        return 2
    result = run(args.heads)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
