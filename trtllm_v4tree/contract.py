"""The step contract: every input and output of every engine graph with its shape, dtype and meaning.

The one list that graph builders, executors and `v4tree inspect` read. Symbols: B sequences, N nodes, W window rows gathered,
E/F committed CSA/HCA entries gathered, M/Q CSA/HCA boundary nodes, A accepted rows, X/Y emitted entries, S catch-up rows, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

Dim = int | str
NULL_SCORE = -1e30
"""Score of a pooled row that does not exist: finite, so that a pool of nothing but such rows stays finite."""


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output: dtype is `float32` or `int64` (an activation dtype where `typed`); role is state, table, scratch or result."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    role: str
    meaning: str


@dataclass(frozen=True)
class GraphContract:
    """Inputs and outputs of one graph, in order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def _state(name: str, shape: tuple[Dim, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name, "float32", shape, "state", meaning)


def _scratch(name: str, shape: tuple[Dim, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name, "float32", shape, "scratch", meaning)


def _table(name: str, shape: tuple[Dim, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name, "int64", shape, "table", meaning)


def _mask(name: str, shape: tuple[Dim, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name, "float32", shape, "table", meaning + " (0 visible, -inf not)")


def states(config: ModelConfig, sizes: EngineSizes) -> tuple[TensorSpec, ...]:
    """Everything that outlives a pass. Pools stack their layers: layer l starts at row l * rows-per-layer."""
    c, s = config, sizes
    out = [
        _state("window_kv", (s.num_layers * s.window_rows, c.head_dim), "window rows: zero row, then slot-major rings")
    ]
    if s.num_csa:
        out.append(
            _state("csa_state", (s.num_csa * s.num_slots, 3, 2 * c.head_dim), "prev A, cur A, cur B as (score | kv)")
        )
        out.append(_state("csa_entries", (s.num_csa * s.csa_rows, c.head_dim), "CSA entries: zero row, then pages"))
    if s.num_csa and s.sparse:
        out.append(_state("idx_state", (s.num_csa * s.num_slots, 3, 2 * c.index_head_dim), "indexer compressor states"))
        out.append(
            _state("idx_entries", (s.num_csa * s.csa_rows, c.index_head_dim), "indexer entries, paged as csa_entries")
        )
    if s.num_hca:
        out.append(_state("hca_state", (s.num_hca * s.num_slots, 1, 2 * c.head_dim), "open HCA window as (score | kv)"))
        out.append(_state("hca_entries", (s.num_hca * s.hca_rows, c.head_dim), "HCA entries: zero row, then pages"))
    if s.has_mtp:
        out.append(_state("mtp_window_kv", (s.window_rows, c.head_dim), "window rows of the drafter"))
        out.append(
            _state("streams", (s.stream_rows, c.hc_mult * c.hidden_size), "accepted streams the drafter has not read")
        )
    return tuple(out)


def _scratches(config: ModelConfig, sizes: EngineSizes) -> list[TensorSpec]:
    c, s = config, sizes
    out = [_scratch("window_scratch", (s.num_layers, "B", "N", c.head_dim), "window row of every node")]
    if s.num_csa:
        out.append(
            _scratch("csa_raw", (s.num_csa, "B", "N", 4 * c.head_dim), "raw compressor rows, (score | kv) of A, of B")
        )
        out.append(
            _scratch("csa_branch", (s.num_csa, "B", "M", c.head_dim), "entry that each boundary node would emit")
        )
    if s.num_csa and s.sparse:
        out.append(_scratch("idx_raw", (s.num_csa, "B", "N", 4 * c.index_head_dim), "raw rows of the indexer"))
        out.append(
            _scratch("idx_branch", (s.num_csa, "B", "M", c.index_head_dim), "indexer entry of each boundary node")
        )
    if s.num_hca:
        out.append(_scratch("hca_raw", (s.num_hca, "B", "N", 2 * c.head_dim), "raw compressor rows (score | kv)"))
        out.append(
            _scratch("hca_branch", (s.num_hca, "B", "Q", c.head_dim), "entry that each boundary node would emit")
        )
    return out


def target_step(config: ModelConfig, sizes: EngineSizes) -> GraphContract:
    """`(committed state, tree) -> (logits, streams, scratch)`."""
    s = sizes
    inputs = [
        _table("token_ids", ("B", "N"), "token of each node"),
        _table("positions", ("B", "N"), "absolute position of each node"),
        _table("logit_nodes", ("B", "R"), "nodes whose logits are wanted"),
        _table("slots", ("B",), "slot of each sequence"),
        _table("window_rows", ("B", "W"), "rows of the window pool; the first is the zero row of the sink"),
        _mask("node_mask", ("B", "N", "W+N"), "what a node sees of [window rows | nodes]"),
    ]
    if s.num_csa:
        inputs += [
            _table("csa_rows", ("B", "E"), "rows of the CSA entry pool"),
            _table(
                "csa_pool_table",
                ("B", "M", 2 * s.csa_ratio),
                "rows pooled by each boundary node: 3 states, null, 4 + 2 n + half",
            ),
            _table("csa_entry_positions", ("B", "M"), "position that rotates each branch entry (its window's first)"),
            _mask("csa_mask", ("B", "N", "E+M"), "what a node sees of [entries | branch entries]"),
        ]
    if s.num_hca:
        inputs += [
            _table("hca_rows", ("B", "F"), "rows of the HCA entry pool"),
            _table("hca_pool_table", ("B", "Q", "T"), "rows pooled by each boundary node: state, null, 2 + n"),
            _table("hca_entry_positions", ("B", "Q"), "position that rotates each branch entry"),
            _mask("hca_mask", ("B", "N", "F+Q"), "what a node sees of [entries | branch entries]"),
        ]
    read = [t for t in states(config, sizes) if t.name not in ("mtp_window_kv", "streams")]
    outputs = [
        TensorSpec("logits", "float32", ("B", "R", config.vocab_size), "result", "logits of the wanted nodes"),
        _scratch("streams_scratch", ("B", "N", config.hc_mult * config.hidden_size), "streams after the last layer"),
        *_scratches(config, sizes),
    ]
    return GraphContract("target_step", (*read, *inputs), tuple(outputs))


def draft_round(config: ModelConfig, sizes: EngineSizes, steps: int, topk: int) -> GraphContract:
    """`(drafter state, accepted rows) -> (candidates, drafter rows)`; without steps it only catches up."""
    read = [t for t in states(config, sizes) if t.name in ("mtp_window_kv", "streams")]
    inputs = [
        _table("stream_rows", ("B", "S"), "rows of the streams pool, oldest first"),
        _table("next_tokens", ("B", "S"), "token that follows each row"),
        _table("positions", ("B", "S"), "position of each row"),
        _table("mtp_window_rows", ("B", "W"), "rows of the drafter's window; the first is the zero row of the sink"),
        _mask("catchup_mask", ("B", "S", "W+S"), "what a row sees of [window rows | rows]"),
    ]
    outputs = [_scratch("mtp_scratch", ("B", "S", config.head_dim), "window row of every accepted row")]
    if steps:
        inputs += [
            _table("last_row", ("B", 1), "index of the newest accepted row"),
            _table("root_position", ("B", 1), "position of the tree's root, the newest token"),
            _mask(
                "level_mask", ("B", steps - 1, "W+S"), "what the rows of level 2, 3, ... see of [window rows | rows]"
            ),
        ]
        outputs += [
            TensorSpec("draft_tokens", "int64", ("B", "C"), "result", "candidates, by level"),
            TensorSpec("draft_parents", "int64", ("B", "C"), "result", "candidate that each extends; -1 is the root"),
            TensorSpec("draft_scores", "float32", ("B", "C"), "result", "cumulative log-probability"),
        ]
    if steps == 1:
        inputs.pop()
    return GraphContract(f"draft_s{steps}_k{topk}" if steps else "draft_catchup", (*read, *inputs), tuple(outputs))


def commit(config: ModelConfig, sizes: EngineSizes) -> GraphContract:
    """`(committed state, scratch, accepted rows) -> committed state`; the only writer."""
    s = sizes
    inputs = list(_scratches(config, sizes))
    inputs += [
        _table("slots", ("B",), "slot of each sequence; 0 for one that must not change"),
        _table("accepted", ("A",), "accepted nodes, b * N + n"),
        _table("window_dst", ("A",), "row of the window pool for each"),
    ]
    if s.num_csa:
        inputs += [
            _table("csa_fold_table", ("B", 3, "P"), "rows folded into each new state"),
            _table("csa_emitted", ("X",), "accepted boundary nodes, b * M + m"),
            _table("csa_dst", ("X",), "row of the entry pool for each"),
        ]
    if s.num_hca:
        inputs += [
            _table("hca_fold_table", ("B", 1, "O"), "rows folded into the new state"),
            _table("hca_emitted", ("Y",), "accepted boundary nodes, b * Q + q"),
            _table("hca_dst", ("Y",), "row of the entry pool for each"),
        ]
    if s.has_mtp:
        inputs += [
            _scratch(
                "streams_scratch", ("B", "N", config.hc_mult * config.hidden_size), "streams after the last layer"
            ),
            _table("stream_dst", ("A",), "row of the streams pool for each accepted node"),
            _scratch("mtp_scratch", ("D", "S", config.head_dim), "drafter rows of the last draft round"),
            _table("mtp_accepted", ("Z",), "drafter rows to keep, d * S + s"),
            _table("mtp_dst", ("Z",), "row of the drafter's window for each"),
        ]
    pools = states(config, sizes)
    return GraphContract("commit", (*pools, *inputs), pools)


def typed(graph: GraphContract, dtype: str) -> GraphContract:
    """The same graph with activations of `dtype`: window rows, entries, streams and scratch. What is pooled over (compressor
    states), masks, logits and scores stay float32."""

    def of(tensor: TensorSpec) -> TensorSpec:
        kept = tensor.dtype != "float32" or tensor.role not in ("state", "scratch") or tensor.name.endswith("_state")
        return tensor if kept else replace(tensor, dtype=dtype)

    return GraphContract(graph.name, tuple(map(of, graph.inputs)), tuple(map(of, graph.outputs)))
