"""The target tensorrt-rtx: ahead-of-time TensorRT-RTX engines from the portable operator bodies, built without a GPU.

One plan per graph holds code for every compute capability asked for. The optimisation profiles come from the one sizes object.
`tensorrt_rtx` is imported only when this target is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import onnx_ir as ir

from trtllm_v4tree import contract
from trtllm_v4tree.compiler.plan_builder import PlanBuilder, Range
from trtllm_v4tree.compiler.trt_ops import TensorRtOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import Shapes
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.weight import Weight
from trtllm_v4tree.sizes import EngineSizes

CAPABILITIES = ("SM80", "SM86", "SM89", "SM120", "SM121")
"""SM75 is left out: the compiler has no FP32 matrix product for it. Code for one more takes next to no time nor space."""
DEFAULT_CAPABILITIES = ("SM89", "SM120")
DTYPES = ("float32",)
Report = Callable[[str, float], None]


def load_tensorrt_rtx() -> ModuleType:
    """The `tensorrt_rtx` module; ConfigError with the install line where it is missing."""
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:
        raise ConfigError(
            "target tensorrt-rtx needs TensorRT-RTX, which is not installed here: pip install 'tensorrt-rtx>=1.7'."
        ) from error
    return tensorrt_rtx


def check_options(capabilities: Sequence[str], dtype: str, draft_dtype: str = "float32") -> None:
    """Raises ConfigError for a compute capability or dtype that this target lacks; needs no TensorRT."""
    for name in capabilities:
        if name not in CAPABILITIES:
            raise ConfigError(
                f"compute capability {name[:20].removeprefix('SM')!r} is none that target tensorrt-rtx compiles float32 for: "
                f"choose from {_choice()}."
            )
    if not capabilities:
        raise ConfigError(f"no compute capability was given: choose from {_choice()}.")
    if dtype not in DTYPES:
        raise ConfigError(f"target tensorrt-rtx computes in float32, not {dtype}: build with --dtype float32.")
    if draft_dtype not in DTYPES:
        raise ConfigError(
            f"target tensorrt-rtx drafts in float32, not {draft_dtype}: build with --draft_dtype float32."
        )


def parse_capabilities(text: str) -> tuple[str, ...]:
    """`89,120`, `8.9,12.0` or `sm_89,sm_120` -> (SM89, SM120); what does not look like one is left for `check_options`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found = [(part, re.fullmatch(r"(?:sm_?)?([0-9]{1,2})\.?([0-9])", part, re.IGNORECASE)) for part in parts]
    return tuple(dict.fromkeys(f"SM{match[1]}{match[2]}" if match else part for part, match in found))


def _choice() -> str:
    return ", ".join(name.removeprefix("SM") for name in CAPABILITIES)


def default_draft_shapes(max_verify_tokens: int) -> Shapes:
    """One tree and one chain, as deep as D nodes allow: each round takes the compiler many seconds."""
    deepest = max_verify_tokens - 1
    wanted = ((min(4, deepest), 3), (min(5, deepest), 1))
    return tuple(shape for shape in wanted if shape[0] > 0)


def profiles(sizes: EngineSizes, nodes: int, batch: int) -> dict[str, Range]:
    """Range of every symbol of the contract for passes of at most `nodes` nodes per sequence, typically `nodes` themselves."""
    s, most = sizes, batch * nodes
    csa, hca = -(-s.max_seq_len // s.csa_ratio), -(-s.max_seq_len // s.hca_ratio)
    tops = {
        "B": batch, "N": nodes, "R": nodes, "S": s.max_commit, "D": batch, "W": s.window, "E": csa, "F": hca,
        "M": nodes, "Q": nodes, "T": 1 + min(s.hca_ratio, nodes), "A": batch * s.max_commit, "Z": batch * s.max_commit,
        "P": 1 + s.csa_ratio, "O": 1 + nodes, "X": most, "Y": most,
    }  # fmt: skip
    least = dict.fromkeys(tops, 0) | dict.fromkeys(("B", "N", "W", "T", "P", "O", "S"), 1)
    typical = {
        "M": -(-nodes // s.csa_ratio),
        "Q": 1,
        "X": batch,
        "Y": batch,
        "S": min(4, s.max_commit),
        "A": most,
        "Z": most,
    }
    return {name: (least[name], min(typical.get(name, top), top), top) for name, top in tops.items()}


def graph_profiles(stem: str, sizes: EngineSizes) -> list[dict[str, Range]]:
    """The optimisation profiles of a graph: decode (one node), verify and prefill for the target step, else one for all."""
    widths = sizes.pass_widths if stem == "target_step" else (sizes.max_commit,)
    return [profiles(sizes, nodes, sizes.max_batch_size) for nodes in widths]


def trace_all(
    config: ModelConfig,
    sizes: EngineSizes,
    shapes: Iterable[tuple[int, int]],
    vocab: Sequence[int] | None = None,
) -> Iterator[tuple[GraphContract, ir.Model]]:
    """Contract and network of every graph, lowered for TensorRT."""
    ops = TensorRtOps()
    yield contract.target_step(config, sizes), graphs.target_step(config, sizes, ops)
    yield contract.commit(config, sizes), graphs.commit(config, sizes, ops)
    if sizes.has_mtp:
        for steps, topk in ((0, 1), *shapes):
            model = graphs.draft_round(config, sizes, ops, steps, topk, vocab)
            yield contract.draft_round(config, sizes, steps, topk), model


def weights_as_inputs(model: ir.Model) -> None:
    """Turns weights into graph inputs: a plan without weights, which all plans of an engine can then share on the device."""
    for name, value in list(model.graph.initializers.items()):
        if isinstance(value, Weight):
            del model.graph.initializers[name]
            model.graph.inputs.append(value)


class RtxBuilder(PlanBuilder):
    """Compiles ONNX files to plans for a set of compute capabilities."""

    product = "TensorRT-RTX"

    def __init__(self, capabilities: Sequence[str], dtype: str = "float32") -> None:
        check_options(capabilities, dtype)
        super().__init__(load_tensorrt_rtx())
        self.capabilities = tuple(capabilities)

    def configure(self, config: Any) -> None:
        config.num_compute_capabilities = len(self.capabilities)
        for index, name in enumerate(self.capabilities):
            config.set_compute_capability(getattr(self.trt.ComputeCapability, name), index)
