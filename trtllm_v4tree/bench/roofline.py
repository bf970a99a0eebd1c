"""A roofline of decoding DeepSeek-V4: time of a pass over T tokens from bytes, operations and collectives. A prediction, not a measurement.

Every part takes the larger of its bytes over the memory's bandwidth and its operations over the peak; parts follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_v4tree.bench import footprint
from trtllm_v4tree.config import ModelConfig


@dataclass(frozen=True)
class Hardware:
    """`devices` accelerators. memory, bandwidth, link and host_link per device: bytes, bytes/s (link: NVLink, one direction;
    host_link: PCIe, for weights that do not fit); peak: dense FP8 operations per second."""

    name: str
    devices: int
    memory: float
    bandwidth: float
    peak: float
    link: float
    host_link: float = 55e9


HARDWARE = {
    "h200x8": Hardware("8 x H200 SXM", 8, 141e9, 4.8e12, 1.979e15, 450e9),
    "b200x8": Hardware("8 x B200 SXM", 8, 180e9, 8.0e12, 4.5e15, 900e9),
    "rtxpro6000": Hardware("RTX PRO 6000 Blackwell", 1, 96e9, 1.79e12, 1.0e15, 0.0),
}
"""Vendor data sheets, dense rates."""


@dataclass(frozen=True)
class Assumptions:
    """What the prediction takes for granted; every value is printed."""

    memory_efficiency: float = 0.75
    compute_efficiency: float = 0.5
    collectives_per_layer: int = 2
    collective_us: float = 9.0
    layer_us: float = 12.0
    round_host_us: float = 300.0
    reserve: float = 0.08

    def lines(self, hardware: Hardware) -> list[str]:
        """One sentence each."""
        shared = hardware.devices > 1
        collectives = (
            f"{self.collectives_per_layer} collectives a layer, each {self.collective_us:g} us plus 2 (n-1)/n of T x hidden bf16 "
            f"values over a link of {hardware.link / 1e9:g} GB/s; weights and work split evenly over {hardware.devices} devices"
        )
        return [
            f"{hardware.name}: {hardware.memory / 1e9:g} GB and {hardware.bandwidth / 1e12:g} TB/s each, of which "
            f"{self.memory_efficiency:.0%} is reached; {hardware.peak / 1e15:g} PFLOP/s dense FP8, of which {self.compute_efficiency:.0%}",
            "weights as published: FP8 linears, FP4 experts (computed at the FP8 rate), bf16 head; no expert is replicated",
            "experts are chosen evenly and independently: E (1 - (1 - k/E)^T) of a layer's E are read for T tokens. Real tokens of one "
            "tree agree more, which helps every kind of speculation, and experts spread unevenly over devices, which hurts",
            "cache as served today: 584 bytes a row, 132 an indexer key; window, HCA entries and indexer keys are read once a "
            "sequence, the top-k CSA entries once a node",
            collectives if shared else "one device, no collectives",
            f"{self.layer_us:g} us a layer of work that no roofline sees (norms, hyper-connections, gates, launches), and "
            f"{self.round_host_us:g} us a round on the host",
            f"{self.reserve:.0%} of the memory is kept for cache and buffers; experts that do not fit are read over PCIe at "
            f"{hardware.host_link / 1e9:g} GB/s",
            "the drafter reads the output head in full at every step and touches experts by its own tokens",
        ]


class Roofline:
    """Times in seconds of one model on one machine at one context length."""

    def __init__(self, config: ModelConfig, hardware: Hardware, context: int, assumptions: Assumptions) -> None:
        self.config, self.hardware, self.context, self.given = config, hardware, context, assumptions
        self.bandwidth = hardware.devices * hardware.bandwidth * assumptions.memory_efficiency
        self.peak = hardware.devices * hardware.peak * assumptions.compute_efficiency

    def plain(self, batch: int) -> float:
        """One step of plain decoding."""
        return self.verify(batch, 1) + self._host

    def round(self, batch: int, nodes: int, steps: int, topk: int, accepted: float) -> float:
        """One round: catch up over the accepted rows, `steps` levels of a draft, verify `nodes` of each sequence."""
        first = self.draft_step(batch * accepted, batch)
        further = self.draft_step(batch * topk, batch) * (steps - 1)
        return first + further + self.verify(batch, nodes) + self._host

    def verify(self, batch: int, nodes: int) -> float:
        """One pass of the trunk over `nodes` of each of `batch` sequences."""
        c, tokens = self.config, batch * nodes
        total = self._part(footprint.head_bytes(c), tokens)
        for layer in range(c.num_layers):
            kind = c.layer_kind(layer)
            total += self._part(footprint.attention_bytes(c, kind) + footprint.layer_rest_bytes(c), tokens)
            total += self._experts(tokens) + self._attention(kind, batch, nodes)
        return total + c.num_layers * self._layer_overhead(tokens)

    def draft_step(self, tokens: float, batch: int) -> float:
        """One pass of the drafter over `tokens` rows."""
        c = self.config
        weights = self._part(footprint.drafter_bytes(c) + footprint.head_bytes(c), tokens)
        return (
            weights
            + self._experts(tokens)
            + self._attention("swa", batch, max(1, round(tokens / batch)))
            + self._layer_overhead(tokens)
        )

    def experts_touched(self, tokens: float) -> float:
        """Expected routed experts of one layer that `tokens` tokens use."""
        c = self.config
        return c.num_experts * (1 - (1 - c.num_experts_per_tok / c.num_experts) ** tokens)

    @property
    def spilled(self) -> float:
        """Share of the routed experts' bytes that does not fit into device memory."""
        whole = footprint.checkpoint_bytes(self.config)
        room = self.hardware.devices * self.hardware.memory * (1 - self.given.reserve)
        layers = self.config.num_layers + self.config.num_mtp_layers
        experts = layers * self.config.num_experts * footprint.expert_bytes(self.config)
        return min(1.0, max(0.0, whole - room) / experts)

    @property
    def _host(self) -> float:
        return self.given.round_host_us * 1e-6

    def _part(self, size: float, tokens: float) -> float:
        """Weights read once and multiplied with `tokens` rows: about two operations a weight byte (FP8) and row."""
        return max(size / self.bandwidth, 2 * size * tokens / self.peak)

    def _experts(self, tokens: float) -> float:
        one = footprint.expert_bytes(self.config)
        read = self.experts_touched(tokens) * one
        near = read * (1 - self.spilled) / self.bandwidth
        far = read * self.spilled / (self.hardware.devices * self.hardware.host_link)
        weights = 3 * self.config.hidden_size * self.config.moe_intermediate_size
        return max(near + far, 2 * weights * self.config.num_experts_per_tok * tokens / self.peak)

    def _attention(self, kind: str, batch: int, nodes: int) -> float:
        """Cache rows read and the scores over them; `nodes` queries per sequence."""
        c = self.config
        entries = {"swa": 0, "csa": self.context // c.csa_ratio, "hca": self.context // c.hca_ratio}[kind]
        selected = min(entries, c.index_topk) if kind == "csa" else entries
        once = min(self.context, c.sliding_window) + (entries if kind == "hca" else 0)
        each = selected if kind == "csa" else 0
        rows = batch * (once + each * nodes)
        index = batch * entries if kind == "csa" else 0
        keys = min(self.context, c.sliding_window) + selected
        scores = 4 * batch * nodes * c.num_heads * c.head_dim * keys
        scored = 2 * batch * nodes * c.index_n_heads * c.index_head_dim * entries if kind == "csa" else 0
        size = rows * footprint.ROW_BYTES + index * footprint.INDEX_BYTES
        return max(size / self.bandwidth, (scores + scored) / (self.peak / 2))

    def _layer_overhead(self, tokens: float) -> float:
        n, g = self.hardware.devices, self.given
        if n == 1:
            return g.layer_us * 1e-6
        sent = 2 * (n - 1) / n * tokens * self.config.hidden_size * 2 / self.hardware.link
        return g.layer_us * 1e-6 + g.collectives_per_layer * (g.collective_us * 1e-6 + sent)
