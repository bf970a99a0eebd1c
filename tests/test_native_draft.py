"""The native operators of a draft level: the bits of the nodes that they stand for, the reference bodies of `V4TreeOps`, loops in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.test_native import DIMS, Arrays, key_feeds, normal, rope_of, run
from trtllm_v4tree.compiler.fuse import fuse
from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.network.ops import (
    DOMAIN,
    DraftLevel,
    Frontier,
    HyperGains,
    KeySources,
    NodeRows,
    Op,
    V4TreeOps,
    Value,
    i64,
)

M, DIM, VOCAB = 3, 40, 23
GAINS = HyperGains(M, 20, 1e-6, 1e-6)
INF = np.float32(np.inf)
Emit = Callable[[V4TreeOps, Op, dict[str, Value]], Any]
SITE = 2 * M + M * M


def fused_as(name: str) -> Callable[[ir.Model], None]:
    """Fuses a graph; one native node, of this name, is left."""

    def rewrite(model: ir.Model) -> None:
        fuse(model)
        assert [node.op_type for node in model.graph if node.domain == DOMAIN] == [name]

    return rewrite


def check(name: str, emit: Emit, feeds: Arrays, weights: Arrays) -> list[np.ndarray]:
    """The fused graph gives the bits of the native nodes, which are the reference up to rounding."""
    wanted, apart = (run(ops, emit, feeds, weights) for ops in (V4TreeOps(), NativeOps(False)))
    got = run(NativeOps(False), emit, feeds, weights, fused_as(name))
    for a, b, c in zip(wanted, apart, got, strict=True):
        np.testing.assert_array_equal(c, b)
        np.testing.assert_allclose(c, a, rtol=5e-5, atol=5e-5)
    return got


def named(op: Op, values: tuple[Value | None, ...], integers: tuple[int, ...] = ()) -> tuple[Value, ...]:
    """The values as outputs of a graph, whichever node makes them."""
    out = []
    for i, value in enumerate(values):
        last = op.Identity(value)
        last.type = ir.TensorType(ir.DataType.INT64 if i in integers else ir.DataType.FLOAT)
        out.append(last)
    return tuple(out)


def emit_entry(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> tuple[Value, ...]:
    row = op.Gather(v["table"], v["t"], axis=0) if "t" in v else v["rows"]
    x = op.Add(ops.norm_linear(op, v["s"], v["hnorm"], 1e-6, v["h_proj"]), op.Unsqueeze(row, i64(op, 2)))
    return named(op, (x, *ops.hyper_mix(op, x, v["fn"], v["base"], v["norm"], GAINS)))


def entry_case(rng: np.random.Generator, batch: int, nodes: int, folded: bool) -> tuple[Arrays, Arrays]:
    feeds = {"s": normal(rng, batch, nodes, M, DIM)}
    weights = {
        "h_proj": normal(rng, DIM, DIM), "hnorm": normal(rng, DIM), "fn": normal(rng, M * DIM, SITE, scale=0.05),
        "base": normal(rng, SITE), "norm": normal(rng, DIM),
    }  # fmt: skip
    if folded:
        weights["table"] = normal(rng, VOCAB, DIM)
        return feeds | {"t": rng.integers(0, VOCAB, (batch, nodes))}, weights
    return feeds | {"rows": normal(rng, batch, nodes, DIM)}, weights


@pytest.mark.parametrize("batch,nodes", [(1, 1), (2, 3), (5, 9)])
@pytest.mark.parametrize("folded", [True, False])
def test_entry(batch: int, nodes: int, folded: bool) -> None:
    feeds, weights = entry_case(np.random.default_rng(nodes), batch, nodes, folded)
    got = check("DraftEntry", emit_entry, feeds, weights)
    s = feeds["s"].astype(np.float64)
    normed = s / np.sqrt(np.square(s).mean(axis=-1, keepdims=True) + 1e-6) * weights["hnorm"]
    row = weights["table"][feeds["t"]] if folded else feeds["rows"]
    np.testing.assert_allclose(got[0], normed @ weights["h_proj"] + row[:, :, None], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"t": np.array([[0, VOCAB]])}, "token id is out of range"),
        ({"t": np.array([[0, -1]])}, "token id is out of range"),
        ({"t": np.array([[0]])}, "one row per node"),
        ({"hnorm": np.ones(DIM + 1, np.float32)}, "does not fit the streams"),
        ({"table": np.ones((VOCAB, DIM + 1), np.float32)}, "does not fit the streams"),
        ({"base": np.ones(SITE + 1, np.float32)}, "base or norm"),
    ],
)
def test_a_wrong_entry_is_an_error(change: Arrays, message: str) -> None:
    feeds, weights = entry_case(np.random.default_rng(0), 1, 2, True)
    given = [{k: change.get(k, v) for k, v in arrays.items()} for arrays in (feeds, weights)]
    with pytest.raises(Exception, match=message):
        run(NativeOps(False), emit_entry, *given, fused_as("DraftEntry"))


def emit_rows(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> tuple[Value, ...]:
    return named(op, tuple(ops.take_row(op, v["i"], [v["a"], v["b"], v["c"]])))


def test_one_row_of_every_sequence() -> None:
    rng = np.random.default_rng(0)
    feeds = {"i": np.array([[2], [0]]), "a": normal(rng, 2, 3, 4), "b": normal(rng, 2, 3, 2, 5), "c": normal(rng, 2, 3)}
    for ops in (V4TreeOps(), NativeOps(False)):
        for name, got in zip("abc", run(ops, emit_rows, feeds, {}), strict=True):
            np.testing.assert_array_equal(got, np.stack([feeds[name][0, [2]], feeds[name][1, [0]]]))
    for index, message in ((np.array([[2], [3]]), "row is out of range"), (np.array([[2]]), "one index per sequence")):
        with pytest.raises(Exception, match=message):
            run(NativeOps(False), emit_rows, feeds | {"i": index}, {})


def level_case(rng: np.random.Generator, batch: int, level: int, topk: int) -> Arrays:
    """What is known before level 0, 1, .. proposes: W = 5 columns that are not drafted, `topk` drafted ones for every level before."""
    nodes = topk if level else 1
    feeds = {
        "streams": normal(rng, batch, nodes, M, DIM),
        "mask": np.where(rng.random((batch, nodes, 5 + level * topk)) < 0.5, 0, -INF).astype(np.float32),
        "masks": np.where(rng.random((batch, 4, 5)) < 0.5, 0, -INF).astype(np.float32),
        "root": rng.integers(0, 9, (batch, 1)),
    }
    if level:
        feeds |= {"scores": normal(rng, batch, nodes), "ids": rng.integers(0, 99, (batch, nodes))}
    return feeds


def emit_level(level: int, topk: int, last: bool = False) -> Callable[[V4TreeOps, Op, dict[str, Value], Value, Value, Value], Any]:  # fmt: skip
    """The candidates and the next frontier of a level; the reference is told apart what the mask says of drafted rows."""

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value], streams: Value, log_probs: Value, tokens: Value) -> Any:
        drafted = op.Slice(v["mask"], i64(op, 5), i64(op, 99), i64(op, 2)) if level else None
        at = Frontier(streams, v["mask"], None, v.get("scores"), v.get("ids"), drafted)
        constants = DraftLevel(v["masks"], op.Sub(v["root"], v["root"]), None if last else level, 10 * level, topk)
        found, following = ops.draft_level(op, log_probs, tokens, at, constants)
        values = (found.scores, found.tokens, found.parents)
        if following is None:
            return named(op, values, (1, 2))
        f = following
        return named(op, (*values, f.scores, f.tokens, f.ids, f.streams, f.mask), (1, 2, 4, 5))

    return emit


def expected_level(feeds: Arrays, level: int, topk: int) -> list[np.ndarray]:
    """One sequence and one child at a time."""
    out: list[list[Any]] = [[] for _ in range(8)]
    for b, log_probs in enumerate(feeds["log_probs"]):
        children = []
        for n in range(len(log_probs)):
            for c in range(topk):
                score = log_probs[n, c] + feeds["scores"][b, n] if level else log_probs[n, c]
                children.append((score, feeds["tokens"][b, n, c], feeds["ids"][b, n] if level else -1, n))
        best = sorted(range(len(children)), key=lambda i: (-children[i][0], i))[:topk]
        for i in range(3):
            out[i].append([child[i] for child in children])
        out[3].append([children[i][0] for i in best])
        out[4].append([children[i][1] for i in best])
        out[5].append([10 * level + i for i in best])
        out[6].append([feeds["streams"][b, children[i][3]] for i in best])
        own = np.where(np.eye(topk) == 1, 0, -INF)
        seen = [(feeds["masks"][b, level], feeds["mask"][b, children[i][3], 5:], own[r]) for r, i in enumerate(best)]
        out[7].append([np.concatenate(parts) for parts in seen])
    return [np.array(values) for values in out]


@pytest.mark.parametrize("level,topk", [(0, 1), (0, 3), (1, 1), (1, 2), (3, 1), (3, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_frontier(level: int, topk: int, batch: int) -> None:
    rng = np.random.default_rng(level * 10 + topk)
    feeds = level_case(rng, batch, level, topk)
    shape = (*feeds["streams"].shape[:2], topk)
    coarse = -np.sort(rng.integers(0, 3, shape)).astype(np.float32)  # with ties
    feeds |= {"log_probs": coarse, "tokens": rng.integers(0, 99, shape)}
    if level:
        feeds["scores"] = np.round(feeds["scores"])
    for last in (False, True):
        emit = emit_level(level, topk, last)
        for ops in (V4TreeOps(), NativeOps(False)):
            got = run(
                ops,
                lambda ops, op, v, emit=emit: emit(ops, op, v, v["streams"], v["log_probs"], v["tokens"]),  # type: ignore[misc]
                feeds,
                {},
            )
            for value, wanted in zip(got, expected_level(feeds, level, topk), strict=False):
                np.testing.assert_array_equal(value, wanted)


def emit_proposal(level: int, topk: int, last: bool) -> Emit:
    """The end of a block, the head, and the frontier; with `ids` columns of the head are these tokens."""

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Any:
        streams = ops.stream_post_mix(op, v["streams"], v["o"], v["p"], v["c"])
        x = ops.hyper_head(op, streams, v["fn"], v["base"], v["norm"], GAINS)
        log_probs, tokens = ops.top_log_probs(op, x, v["head"], topk)
        if "names" in v:
            tokens = op.Gather(v["names"], tokens, axis=0)
        return emit_level(level, topk, last)(ops, op, v, streams, log_probs, tokens)

    return emit


def proposal_case(rng: np.random.Generator, batch: int, level: int, topk: int) -> tuple[Arrays, Arrays]:
    feeds = level_case(rng, batch, level, topk)
    nodes = feeds["streams"].shape[1]
    feeds |= {
        "o": normal(rng, batch, nodes, DIM), "p": normal(rng, batch, nodes, 1, M), "c": normal(rng, batch, nodes, M, M)
    }  # fmt: skip
    return feeds, {
        "fn": normal(rng, M * DIM, M, scale=0.05), "base": normal(rng, M), "norm": normal(rng, DIM),
        "head": normal(rng, DIM, VOCAB),
    }  # fmt: skip


@pytest.mark.parametrize("level,topk", [(0, 1), (0, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_proposal(level: int, topk: int, last: bool, some: bool) -> None:
    rng = np.random.default_rng(level * 10 + topk)
    for batch in (1, 4):
        feeds, weights = proposal_case(rng, batch, level, topk)
        if some:
            weights["names"] = np.sort(rng.choice(1000, VOCAB, replace=False))
        check("DraftProposal", emit_proposal(level, topk, last), feeds, weights)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"scores": np.ones((1, 3), np.float32)}, "do not fit the frontier"),
        ({"ids": np.ones((1, 1), np.int64)}, "do not fit the frontier"),
        ({"masks": np.ones((1, 2, 5), np.float32)}, "masks do not fit"),
        ({"mask": np.ones((1, 3, 9), np.float32)}, "masks do not fit"),
        ({"mask": np.ones((1, 2, 4), np.float32)}, "masks do not fit"),
        ({"names": np.arange(VOCAB - 1)}, "head has the wrong size"),
        ({"head": np.ones((DIM, VOCAB + 16), np.float32)}, "head has the wrong size"),
    ],
)
def test_a_wrong_proposal_is_an_error(change: Arrays, message: str) -> None:
    feeds, weights = proposal_case(np.random.default_rng(0), 1, 2, 2)
    weights["names"] = np.arange(VOCAB)
    given = [{k: change.get(k, v) for k, v in arrays.items()} for arrays in (feeds, weights)]
    with pytest.raises(Exception, match=message):
        run(NativeOps(False), emit_proposal(2, 2, False), *given, fused_as("DraftProposal"))


def parts_case(widths: tuple[int, ...]) -> tuple[Arrays, Emit]:
    """Attention over nodes whose rows come in parts of these widths."""
    rng, total = np.random.default_rng(1), sum(widths)
    feeds = key_feeds(rng, 2, total, 0) | {"q": normal(rng, 2, total, DIMS.query_width + 20 * 16)}
    rope, rows = rope_of(feeds, rng, 2, total), feeds.pop("nodes")
    for i, part in enumerate(np.split(rows, np.cumsum(widths)[:-1], axis=1)):
        feeds[f"part{i}"] = np.ascontiguousarray(part)
    unread = ("entries", "entry_rows", "branch", "entry_mask")

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Any:
        joined = v["part0"]
        for i in range(1, len(widths)):
            joined = op.Concat(joined, v[f"part{i}"], axis=1)
        keys = KeySources(v["window"], v["window_rows"], joined, v["node_mask"])
        out = ops.attend(op, NodeRows(joined, None, None, v["q"], None), keys, v["sink"], rope(v), DIMS)
        return named(op, (out,))

    return {name: array for name, array in feeds.items() if name not in unread}, emit


@pytest.mark.parametrize("widths", [(1, 1), (3, 1, 2), (2, 1, 1, 1, 1, 1, 1, 1)])
def test_attention_reads_rows_in_parts(widths: tuple[int, ...]) -> None:
    feeds, emit = parts_case(widths)
    check("TreeAttention", emit, feeds, {"sink": normal(np.random.default_rng(2), 1, 1, 5, 1)})


@pytest.mark.parametrize(
    "shape,message", [((2, 3, 32), "node mask"), ((1, 2, 32), "do not fit"), ((2, 2, 16), "do not fit")]
)
def test_parts_that_do_not_fit_are_an_error(shape: tuple[int, ...], message: str) -> None:
    feeds, emit = parts_case((3, 2))
    with pytest.raises(Exception, match=message):
        run(
            NativeOps(False),
            emit,
            feeds | {"part1": np.ones(shape, np.float32)},
            {"sink": np.ones((1, 1, 5, 1), np.float32)},
            fused_as("TreeAttention"),
        )
